"""Autoregressive generation with a cache, in one compiled loop.

A new token attends to the whole text before it, as long as that fits into the context. When the
context of a text is full, the model drops the first half and reads the last half again, from
position 0. So a token sees at least the last `context_length // 2` tokens, and at most
`context_length`. Its logits are exactly those of the model for these tokens, for any kind of block.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, Shaped

from gptlite.config import SamplingConfig, UserError, require
from gptlite.generation.sampling import sample
from gptlite.models.gpt import GPT
from gptlite.nn.cache import Cache, read_at
from gptlite.nn.context import PerSequence
from gptlite.runtime import free_memory

# Tokens generated in one compiled call: few enough to stream smoothly, enough to hide the call.
TOKENS_PER_CALL = 32

# The minimum padded length of a prompt.
MIN_PREFILL = 16


class GenerationState(eqx.Module):
    """What one token passes to the next."""

    logits: Float[Array, "batch vocab"]
    cache: Cache
    n_generated: Int[Array, ""]
    """Tokens generated so far."""


def generate(
    model: GPT,
    prompt: Int[Array, "batch prompt"],
    max_new_tokens: int,
    config: SamplingConfig | None = None,
    *,
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
    keys: Key[Array, " batch"],
) -> Int[Array, "batch new"]:
    """`max_new_tokens` tokens after each prompt. The arguments are those of `stream`.

    **Raises:** `UserError` as `stream` does.
    """
    chunks = list(stream(model, prompt, max_new_tokens, config, lengths=lengths, keys=keys))
    return jnp.concatenate([jnp.zeros((len(prompt), 0), jnp.int32), *chunks], axis=1)


def stream(
    model: GPT,
    prompt: Int[Array, "batch prompt"],
    max_new_tokens: int,
    config: SamplingConfig | None = None,
    *,
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
    keys: Key[Array, " batch"],
) -> Iterator[Int[Array, "batch chunk"]]:
    """`generate`, a few tokens at a time. Each row is what it would be alone with its key.

    The model's layers are unstacked first, which takes as long as about forty tokens of a small
    model. To call this often, pass `model.unstacked()`.

    **Arguments:**

    - `lengths`: how many tokens of each prompt are real; padding follows them. Default: all.
    - `keys`: a key for each row.

    **Raises:** `UserError` if a prompt is empty or longer than the context, or the cache does not
    fit into memory.
    """
    context = model.config.context_length
    longest = prompt.shape[1]
    # With one length for all rows, a cache is written at one position, which is faster.
    one_length = lengths is None or not len(prompt)
    length: np.ndarray = np.asarray(longest if one_length else lengths, np.int32)
    for tokens in (int(length.min()), int(length.max())):
        if not 1 <= tokens <= context:
            raise UserError(
                f"The prompt must have 1 to {context} tokens (the model's context), got {tokens}."
            )
        require(
            tokens <= longest,
            f"lengths must be at most {longest}, the width of prompt, got {tokens}.",
        )
    config = SamplingConfig() if config is None else config
    # Powers of two, so that prompts of all lengths share a few programs.
    room = min(context, max(MIN_PREFILL, _power_of_two(longest)))
    capacity = min(context, max(room, _power_of_two(longest + max_new_tokens)))
    _check_memory(model, len(prompt), capacity)
    padded = jnp.zeros((len(prompt), room), jnp.int32).at[:, :longest].set(prompt[:, :room])
    model = model.unstacked()
    state = _prefill(model, padded, jnp.asarray(length), capacity)
    left = max_new_tokens
    while left > 0:
        if length.max() == context:
            state = _drop_first_half(model, state)
            length = np.where(length == context, context // 2, length)
        count = min(TOKENS_PER_CALL, left, context - int(length.max()))
        state, tokens = _decode(model, state, keys, jnp.asarray(count), config)
        yield tokens[:, :count]
        left, length = left - count, length + count


def _power_of_two(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`."""
    return 1 << (tokens - 1).bit_length()


def _check_memory(model: GPT, batch: int, capacity: int) -> None:
    """**Raises:** `UserError` if the cache does not fit into memory. (Linux would grant the memory
    and end the process when it is used.)"""
    if batch * capacity < 2**16:  # smaller than the weights of such a model
        return
    cache = eqx.filter_eval_shape(lambda m: m.init_cache((batch,), capacity=capacity), model)
    needed, free = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)), free_memory()
    require(
        needed <= free,
        f"The cache of {batch} texts of {capacity:,} tokens takes {needed / 2**30:,.1f} GiB, and "
        f"{free / 2**30:,.1f} GiB are free: generate fewer tokens or fewer texts at once.",
    )


@eqx.filter_jit
def _prefill(
    model: GPT, padded: Int[Array, "batch room"], length: PerSequence, capacity: int
) -> GenerationState:
    padded, length = drop_single(padded), length[0] if length.shape == (1,) else length
    empty = model.init_cache(padded.shape[:-1], capacity=capacity)
    hidden, cache = model.extend(padded, empty, length)
    logits = model.logits(read_at(hidden, length - 1, 1, axis=-2))
    return GenerationState(logits.reshape(-1, model.vocab_size), cache, jnp.zeros((), jnp.int32))


@eqx.filter_jit
def _drop_first_half(model: GPT, state: GenerationState) -> GenerationState:
    """Drop the first half of the texts whose context is full. This is not in `_decode`'s loop,
    because a condition there would copy the cache at every token."""
    context, cache = model.config.context_length, state.cache
    half = context // 2
    window = jnp.roll(cache.ids[..., -context:], half - context, axis=-1)
    batch = window.shape[:-1]
    _, new = model.extend(window, model.init_cache(batch), jnp.asarray(half))
    full = cache.length == context
    if full.ndim:

        def choose(new, old):
            return jnp.where(full.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        new = eqx.tree_at(lambda c: c.length, new, jnp.full(batch, half, jnp.int32))
        new = jax.tree.map(choose, new, cache)
    return GenerationState(state.logits, new, state.n_generated)


@eqx.filter_jit
def _decode(
    model: GPT,
    state: GenerationState,
    keys: Key[Array, " batch"],
    count: Int[Array, ""],
    config: SamplingConfig,
) -> tuple[GenerationState, Int[Array, "batch new"]]:
    """`count` tokens, no more than `TOKENS_PER_CALL` and the room in the context; the rest of the
    result is 0."""

    # All random numbers are drawn before the loop. In it, they took half the time of a small model.
    numbers = state.n_generated + jnp.arange(TOKENS_PER_CALL)
    token_keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, numbers))(keys)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(token_keys)

    def body(i, carry):
        state, tokens = carry
        token = sample(state.logits, config, uniform[:, i])
        state = GenerationState(*next_logits(model, token, state.cache), state.n_generated + 1)
        return state, tokens.at[:, i].set(token)

    tokens = jnp.zeros((len(keys), TOKENS_PER_CALL), jnp.int32)
    return lax.fori_loop(0, count, body, (state, tokens))


def drop_single(x: Shaped[Array, "batch ..."]) -> Shaped[Array, "..."]:
    """`x` without its batch axis, if that has the length 1. With such an axis, XLA's CPU compiler
    copies the cache at every token."""
    return x[0] if len(x) == 1 else x


def next_logits(
    model: GPT, token: Int[Array, " batch"], cache: Cache
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Logits of the token after `token`, and the cache with `token` added. The cache of a single
    text may have no batch axis."""
    hidden, cache = model.extend(token.reshape(*cache.ids.shape[:-1], 1), cache)
    return model.logits(hidden).reshape(len(token), model.vocab_size), cache
