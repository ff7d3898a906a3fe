"""Autoregressive generation with a key/value cache, in one compiled loop.

What a new token attends to: everything before it, while that fits into the context. When the
context is full, the model forgets the older part and reads the last half of the context anew,
from position 0. So a token sees at least the last `context_length // 2` tokens and at most
`context_length` before it, and its logits are exactly those that the model would give for
that stretch of text by itself, for any position encoding.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, Shaped

from gptlite.config import SamplingConfig, UserError
from gptlite.generation.sampling import sample
from gptlite.models.gpt import GPT
from gptlite.nn.cache import Cache

# Tokens made in one compiled call: few enough to stream smoothly, enough to hide the call.
TOKENS_PER_CALL = 32

# A prompt is read in no fewer positions than these.
SHORTEST_READ = 16


class GenerationState(eqx.Module):
    """Between two tokens."""

    logits: Float[Array, "batch vocab"]
    cache: Cache
    made: Int[Array, ""]


def generate(
    model: GPT,
    prompt: Int[Array, "batch prompt"],
    max_new_tokens: int,
    config: SamplingConfig | None = None,
    *,
    keys: Key[Array, " batch"],
) -> Int[Array, "batch new"]:
    """`max_new_tokens` tokens after each prompt. Each row is what it would be alone with its key.

    **Raises:** `UserError` as `stream` does.
    """
    chunks = list(stream(model, prompt, max_new_tokens, config, keys=keys))
    return jnp.concatenate([jnp.zeros((len(prompt), 0), jnp.int32), *chunks], axis=1)


def stream(
    model: GPT,
    prompt: Int[Array, "batch prompt"],
    max_new_tokens: int,
    config: SamplingConfig | None = None,
    *,
    keys: Key[Array, " batch"],
) -> Iterator[Int[Array, "batch chunk"]]:
    """`generate`, a few tokens at a time.

    The model's layers are taken apart first, which costs as much as some forty tokens of a small
    model. To call this often, pass `model.unstacked()`.

    **Raises:** `UserError` if the prompt is empty or longer than the context.
    """
    context = model.config.context_length
    length = prompt.shape[1]
    if not 1 <= length <= context:
        raise UserError(
            f"The prompt must have 1 to {context} tokens (the model's context), got {length}."
        )
    config = SamplingConfig() if config is None else config
    # A power of two, so that prompts of all lengths share a few programs.
    room = min(context, max(SHORTEST_READ, 1 << (length - 1).bit_length()))
    padded = jnp.zeros((len(prompt), room), jnp.int32).at[:, :length].set(prompt)
    model = model.unstacked()
    state = _start(model, padded, jnp.asarray(length))
    left = max_new_tokens
    while left > 0:
        if length == context:
            state, length = _forget(model, state), context // 2
        count = min(TOKENS_PER_CALL, left, context - length)
        state, tokens = _advance(model, state, keys, jnp.asarray(count), config)
        yield tokens[:, :count]
        left, length = left - count, length + count


@eqx.filter_jit
def _start(model: GPT, padded: Int[Array, "batch room"], length: Int[Array, ""]) -> GenerationState:
    hidden, cache = _read(model, drop_single(padded), length)
    last = lax.dynamic_slice_in_dim(hidden, length - 1, 1, axis=-2)
    logits = model.logits(last).reshape(-1, model.vocab_size)
    return GenerationState(logits, cache, jnp.zeros((), jnp.int32))


@eqx.filter_jit
def _forget(model: GPT, state: GenerationState) -> GenerationState:
    """Make room in a full context. (Not in `_advance`'s loop: a condition there would have the
    cache copied at every token.)"""
    context = model.config.context_length
    window = state.cache.ids[..., -context:]
    window = jnp.roll(window, context // 2 - context, axis=-1)
    _, cache = _read(model, window, jnp.asarray(context // 2))
    return GenerationState(state.logits, cache, state.made)


@eqx.filter_jit
def _advance(
    model: GPT,
    state: GenerationState,
    keys: Key[Array, " batch"],
    count: Int[Array, ""],
    config: SamplingConfig,
) -> tuple[GenerationState, Int[Array, "batch new"]]:
    """`count` tokens, no more than `TOKENS_PER_CALL` and the room in the context; the rest of the
    result is 0."""

    # All random numbers at once: in the loop they took half the time of a small model.
    made = state.made + jnp.arange(TOKENS_PER_CALL)
    token_keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, made))(keys)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(token_keys)

    def body(i, carry):
        state, tokens = carry
        token = sample(state.logits, config, uniform[:, i])
        state = GenerationState(*next_logits(model, token, state.cache), state.made + 1)
        return state, tokens.at[:, i].set(token)

    tokens = jnp.zeros((len(keys), TOKENS_PER_CALL), jnp.int32)
    return lax.fori_loop(0, count, body, (state, tokens))


def drop_single(x: Shaped[Array, "batch ..."]) -> Shaped[Array, "..."]:
    """`x` without its batch axis, if that has the length 1: of such an axis in a cache, XLA's CPU
    compiler makes a copy of the cache at every token."""
    return x[0] if len(x) == 1 else x


def next_logits(
    model: GPT, token: Int[Array, " batch"], cache: Cache
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Logits of what follows `token`, and the cache with it read. The cache of a single text may
    be without a batch axis."""
    hidden, cache = model.extend(token.reshape(*cache.ids.shape[:-1], 1), cache)
    return model.logits(hidden).reshape(len(token), model.vocab_size), cache


def _read(
    model: GPT, padded: Int[Array, "*batch room"], length: Int[Array, ""]
) -> tuple[Float[Array, "*batch room d_model"], Cache]:
    """Hidden states and cache of the first `length` ids. The rest are read too, so that one
    program serves many lengths; being later, they are seen by none of the first, and written over
    when their turn comes."""
    hidden, cache = model.extend(padded, model.init_cache(padded.shape[:-1]))
    return hidden, Cache(cache.layers, cache.ids, length)
