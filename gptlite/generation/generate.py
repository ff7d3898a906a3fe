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
from gptlite.runtime import require_memory

# Tokens generated in one compiled call: few enough to stream smoothly, enough to hide the call.
TOKENS_PER_CALL = 32

# The minimum padded length of a prompt.
MIN_PREFILL = 16
# Tokens of a text that are read at once: attention's scores are [heads, tokens, capacity].
MAX_PREFILL = 512
# Copies of the cache in memory: before and after a call, and inside it.
CACHE_COPIES = 3


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
    room = _room(longest, context)
    capacity = max(room, _room(longest + max_new_tokens, context))
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


def _check_memory(model: GPT, batch: int, capacity: int) -> None:
    """**Raises:** `UserError` if the cache does not fit into memory."""
    if batch * capacity < 2**16:  # not worth the time: smaller than the weights of such a model
        return
    cache = eqx.filter_eval_shape(lambda m: m.init_cache((batch,), capacity=capacity), model)
    needed = CACHE_COPIES * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    require_memory(f"To generate {batch} texts of {capacity:,} tokens", needed)


def _room(tokens: int, context: int) -> int:
    """Places for `tokens` tokens, or for a whole context. Powers of two, so that texts of all
    lengths share a few programs, up to the context, or the next multiple of `MAX_PREFILL`."""
    room = min(context, max(MIN_PREFILL, 1 << (tokens - 1).bit_length()))
    return room if room <= MAX_PREFILL else -(-room // MAX_PREFILL) * MAX_PREFILL


@eqx.filter_jit
def _prefill(
    model: GPT, padded: Int[Array, "batch room"], length: PerSequence, capacity: int
) -> GenerationState:
    padded, length = drop_single(padded), length[0] if length.shape == (1,) else length
    hidden, cache = _read(model, padded, length, capacity)
    logits = model.logits(hidden)
    return GenerationState(logits.reshape(-1, model.vocab_size), cache, jnp.zeros((), jnp.int32))


def _read(
    model: GPT, ids: Int[Array, "*batch room"], length: PerSequence, capacity: int
) -> tuple[Float[Array, "*batch 1 d_model"], Cache]:
    """The hidden state of the last of `length` tokens, and the cache with all of them."""
    cache = model.init_cache(ids.shape[:-1], capacity=capacity)
    if ids.shape[-1] <= MAX_PREFILL:
        hidden, cache = model.extend(ids, cache, length)
        return read_at(hidden, length - 1, 1, axis=-2), cache

    def part(carry, part):
        cache, last = carry
        ids, start = part
        # A text that has ended adds nothing. What is written after it is padding.
        here = jnp.clip(length - start, 0, MAX_PREFILL)
        hidden, cache = model.extend(ids, cache, here)
        new = read_at(hidden, jnp.maximum(here - 1, 0), 1, axis=-2)
        return (cache, jnp.where((here > 0)[..., None, None], new, last)), None

    parts = jnp.moveaxis(ids.reshape(*ids.shape[:-1], -1, MAX_PREFILL), -2, 0)
    starts = MAX_PREFILL * jnp.arange(len(parts))
    cache = eqx.tree_at(lambda c: c.length, cache, jnp.zeros_like(length))
    blank = jnp.zeros((*ids.shape[:-1], 1, model.config.d_model), model.embedding.weight.dtype)
    (cache, last), _ = lax.scan(part, (cache, blank), (parts, starts))
    return last, cache


@eqx.filter_jit
def _drop_first_half(model: GPT, state: GenerationState) -> GenerationState:
    """Drop the first half of the texts whose context is full. This is not in `_decode`'s loop,
    because a condition there would copy the cache at every token."""
    context, cache, back = model.config.context_length, state.cache, len(model.previous)
    half = context // 2
    ids = cache.ids[..., back:]
    batch, capacity = ids.shape[:-1], ids.shape[-1]
    window = jnp.roll(ids, half - context, axis=-1)[..., : _room(half, context)]
    _, new = _read(model, window, jnp.asarray(half), capacity)
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
