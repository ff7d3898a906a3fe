"""Autoregressive generation with a cache, in one compiled loop.

A new token attends to the whole text before it, as long as that fits into the context. When the
context of a text is full, the model drops the first half and reads the last half again, from
position 0. So a token sees at least the last `context_length // 2` tokens, and at most
`context_length`. Its logits are exactly those of the model for these tokens, for any kind of block.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

from gptlite.config import SamplingConfig
from gptlite.errors import require
from gptlite.generation.sampling import Sampling, sample
from gptlite.machine.ids import check_ids
from gptlite.machine.memory import check_cache_memory
from gptlite.machine.mesh import is_on_cpu, is_whole, replicate, row_mesh
from gptlite.machine.pytrees import size_of
from gptlite.models.gpt import GPT
from gptlite.nn.cache import Cache, read_at
from gptlite.nn.context import PerSequence
from gptlite.nn.kernels.decoding import rearranged
from gptlite.nn.kernels.rows import map_rows
from gptlite.nn.stack import unstacked

# Tokens generated in one compiled call: few enough to stream smoothly, enough to hide the call.
TOKENS_PER_CALL = 32

# The minimum padded length of a prompt.
MIN_PREFILL = 16
# Tokens of a text that are read at once: attention's scores are [heads, tokens, capacity].
MAX_PREFILL = 512


# `observe(logits, ids)` makes arrays that begin with the axes of rows and tokens.
Observe = Callable[[Float[Array, "batch tokens vocab"], Int[Array, "batch tokens"]], Any]
# A key for each row, of either kind that JAX has.
Keys = Key[Array, " batch"] | UInt32[Array, "batch 2"]


class PreparedModel(eqx.Module):
    """A model in the form that generation computes with: see `prepare`."""

    model: GPT
    mesh: Mesh | None = eqx.field(static=True)
    """The devices that share the rows, each with the whole model; or None."""


class GenerationState(eqx.Module):
    """The state that one token passes to the next."""

    logits: Float[Array, "batch vocab"]
    layers: tuple[Any, ...]
    """The caches of the layers."""
    ids: Int[Array, "batch places"]
    """The ids of the cache."""


class PrefillInputs(NamedTuple):
    """Arguments of `prefill` that are not donated."""

    prepared: PreparedModel
    ids: Int[Array | np.ndarray, "batch part"]
    start: PerSequence
    """How many tokens are in the cache."""
    length: PerSequence
    """How many of `ids` are real; padding follows them."""


class DecodeInputs(NamedTuple):
    """Arguments of `decode` that are not donated."""

    prepared: PreparedModel
    keys: Key[Array, " batch"]
    sampling: Sampling
    length: PerSequence
    """How many tokens are in the cache."""
    n_generated: PerSequence
    """How many tokens were generated before."""
    n_new: Int[Array | np.ndarray, ""]
    """How many to generate: at most `TOKENS_PER_CALL`, and the room in the context."""


def prepare(model: GPT, rows: int, *, share: bool = True) -> PreparedModel:
    """`model` in the form that generates `rows` texts fastest: the layers are separate.

    If it is not cut over devices, the matrices of queries, keys and values are one; on a CPU,
    matrices for several rows are stored as XLA's library multiplies them, which is faster; and
    several devices share the rows, if `share` and `row_mesh` finds them.

    **Raises:** `UserError` if JAX traces the model, as inside `jax.jit`."""
    _require_values(model)
    if not is_whole(model):
        return PreparedModel(unstacked(model), None)
    mesh, transposed = row_mesh(rows, model) if share else None, rows > 1 and is_on_cpu(model)
    if mesh is not None and not begins_with_rows(model, rows):
        mesh = None
    if mesh is not None:
        arrays, rest = eqx.partition(model, eqx.is_array)
        model = eqx.combine(replicate(arrays, mesh), rest)
    return PreparedModel(rearranged(model, transposed), mesh)


def begins_with_rows(model: GPT, rows: int) -> bool:
    """Whether the rows are the first axis of all that layers keep: custom ones may differ."""
    cache = eqx.filter_eval_shape(lambda model: model.init_cache((rows,)), model)
    return all(x.shape[:1] == (rows,) for x in jax.tree.leaves(cache.layers))


def generate(
    model: GPT | PreparedModel,
    prompt: Int[Array | np.ndarray, "*batch prompt"],
    max_new_tokens: int,
    config: SamplingConfig | None = None,
    *,
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
    key: PRNGKeyArray | None = None,
    keys: Keys | None = None,
) -> Int[Array, "*batch new"]:
    """`max_new_tokens` tokens after each prompt, or after a single one, `[prompt]`, whatever ends a
    text. The arguments are those of `stream`, in which a single prompt is a batch of one.

    **Raises:** `UserError` as `stream` does.
    """
    options = {"lengths": lengths, "key": key, "keys": keys}
    if prompt.ndim == 1:
        return generate(model, prompt[None], max_new_tokens, config, **options)[0]
    chunks = list(stream(model, prompt, max_new_tokens, config, **options))
    # With NumPy, because JAX would compile a program for each length.
    none = np.zeros((len(prompt), 0), np.int32)
    return jnp.asarray(np.concatenate([none, *map(np.asarray, chunks)], axis=1))


def stream(
    model: GPT | PreparedModel,
    prompt: Int[Array | np.ndarray, "batch prompt"],
    max_new_tokens: int,
    config: SamplingConfig | None = None,
    *,
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
    key: PRNGKeyArray | None = None,
    keys: Keys | None = None,
) -> Iterator[Int[Array, "batch chunk"]]:
    """`generate`, a few tokens at a time. Each row is what it would be alone with its key.

    **Arguments:**

    - `model`: to call this often, pass `prepare(model, len(prompt))`, which takes as long as some
      tokens of a small model.
    - `lengths`: how many tokens of each prompt are real; padding follows them. Default: all.
    - `key`: for all rows: row `i` is drawn with `jax.random.fold_in(key, i)`.
    - `keys`: in place of `key`, a key for each row. `jax.vmap` uses only the first of keys of the
      kind `rbg`, so that a row depends on the others.

    **Raises:** `UserError` if there is neither a key nor keys, or both, a prompt is empty, longer
    than the context or has an id beyond the vocabulary, memory is too small, the devices of a
    `PreparedModel` cannot share the rows evenly, or JAX traces an argument, as inside `jax.jit`.
    """
    _require_values((model, prompt, lengths, key, keys))
    require((key is None) != (keys is None), "Give either key, one for all rows, or keys.")
    key, keys = map(_typed, (key, keys))
    if key is not None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(prompt)))
    assert keys is not None
    whole, copied = (model, size_of(model)) if isinstance(model, GPT) else (model.model, 0)
    context_length, longest = whole.config.context_length, prompt.shape[1]
    # With one length for all rows, a cache is written at one position, which is faster.
    one_length = lengths is None or not len(prompt)
    length: np.ndarray = np.asarray(longest if one_length else lengths, np.int32)
    for tokens in (int(length.min()), int(length.max())):
        require(
            1 <= tokens <= context_length,
            f"The prompt must have 1 to {context_length} tokens (the model's context), got "
            f"{tokens}.",
        )
        require(
            tokens <= longest,
            f"lengths must be at most {longest}, the width of prompt, got {tokens}.",
        )
    check_ids(prompt, whole.vocab_size, length)
    require(max_new_tokens >= 0, f"max_new_tokens must be 0 or more, got {max_new_tokens}.")
    if max_new_tokens == 0:
        return
    config = SamplingConfig() if config is None else config
    sampling = Sampling.of([config] * len(prompt))
    room = padded_length(longest, context_length)
    capacity = max(room, padded_length(longest + max_new_tokens, context_length))
    # The number of tokens read at once, at the start or when the context is full.
    is_long = longest + max_new_tokens > context_length
    again = padded_length(context_length // 2, context_length) if is_long else 0
    part = min(MAX_PREFILL, max(room, again))
    check_cache_memory(whole, len(prompt), capacity, part, copied)
    prepared = prepare(model, len(prompt)) if isinstance(model, GPT) else model
    mesh = prepared.mesh
    if mesh is not None:
        require(
            len(prompt) % mesh.size == 0,
            f"The model is prepared for {mesh.size} devices, so the number of prompts must be a "
            f"multiple of {mesh.size}, got {len(prompt)}.",
        )
        keys = replicate(keys, mesh)
    # With NumPy, because each operation of JAX outside compiled code takes as long as a token.
    state = _prefill_prompt(prepared, np.asarray(prompt), length, capacity)
    done = 0
    while done < max_new_tokens:
        if length.max() == context_length:
            state = _drop_first_half(prepared, length, state)
            length = np.where(length == context_length, context_length // 2, length)
        count = min(TOKENS_PER_CALL, max_new_tokens - done, context_length - int(length.max()))
        inputs = DecodeInputs(prepared, keys, sampling, length, np.asarray(done), np.asarray(count))
        state, tokens, _ = decode(inputs, state)
        if mesh is not None:  # as a single device returns them
            tokens = jnp.asarray(jax.device_get(tokens))
        if count < TOKENS_PER_CALL:
            tokens = jnp.asarray(np.asarray(tokens)[:, :count])
        yield tokens
        done, length = done + count, np.asarray(length + count)


def _typed(keys: Any) -> Any:
    """Keys that `jax.random.PRNGKey` made, as those of `jax.random.key`."""
    if keys is None or jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        return keys
    return jax.random.wrap_key_data(keys)


def _require_values(tree: Any) -> None:
    """**Raises:** `UserError` if there is a tracer in `tree`."""
    require(
        not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)),
        "Generation compiles its own programs: call it outside of jit and other transformations.",
    )


def padded_length(tokens: int, context_length: int) -> int:
    """Places for `tokens` tokens, or for a whole context. Powers of two, so that texts of all
    lengths share a few programs, up to the context, or the next multiple of `MAX_PREFILL`."""
    room = min(context_length, max(MIN_PREFILL, 1 << (tokens - 1).bit_length()))
    return room if room <= MAX_PREFILL else -(-room // MAX_PREFILL) * MAX_PREFILL


def _prefill_prompt(
    prepared: PreparedModel,
    ids: Int[np.ndarray, "batch tokens"],
    length: PerSequence,
    capacity: int,
) -> GenerationState:
    """The state after the first `length` of `ids`, which are at least one."""
    room = padded_length(ids.shape[1], prepared.model.config.context_length)
    padded = np.zeros((len(ids), room), np.int32)
    padded[:, : ids.shape[1]] = ids[:, :room]
    state = None
    for start in range(0, room, MAX_PREFILL):
        # A text that has ended adds nothing. The ids after it are padding.
        read = np.minimum(length, start)
        here = np.clip(length - start, 0, MAX_PREFILL)
        inputs = PrefillInputs(prepared, padded[:, start : start + MAX_PREFILL], read, here)
        state, _ = prefill(inputs, state, capacity)
    assert state is not None
    return state


@eqx.filter_jit(donate="all-except-first")
def prefill(
    inputs: PrefillInputs,
    state: GenerationState | None,
    capacity: int,
    *,
    observe: Observe | None = None,
) -> tuple[GenerationState, Any]:
    """The state with the ids of `inputs` added, and what `observe` makes of them, if it is given.
    Without a state, the text begins here, the caches are made for `capacity` tokens, and the logits
    of the first token have no meaning.

    To observe takes memory for the logits of all ids at once."""

    def read(model: GPT, rows: Any) -> tuple[GenerationState, Any]:
        state, ids, start, length = rows
        batch = len(ids)
        if state is None:
            leading = () if batch == 1 else (batch,)
            cache = model.init_cache(leading, capacity=capacity)
            cache = eqx.tree_at(lambda c: c.length, cache, jnp.zeros_like(_drop_single(length)))
        else:
            cache = _cache(state, start)
        hidden, cache = model.extend(_drop_single(ids), cache, _drop_single(length))
        last = read_at(hidden, jnp.maximum(_drop_single(length) - 1, 0), 1, axis=-2)
        logits = model.logits(last).reshape(batch, model.vocab_size)
        if state is not None:
            logits = jnp.where((length > 0).reshape(-1, 1), logits, state.logits)
        observed = None
        if observe is not None:
            every = model.logits(hidden).reshape(*ids.shape, -1)
            before = jnp.zeros_like(logits) if state is None else state.logits
            every = jnp.concatenate([before[:, None], every[:, :-1]], axis=1)
            observed = observe(every, ids)
        return _state(logits, cache), observed

    prepared, *rest = inputs
    return map_rows(read, prepared.mesh, prepared.model, (state, *rest))


def _state(logits: Float[Array, "batch vocab"], cache: Cache) -> GenerationState:
    """The state with this cache, which may have no batch axis if there is one row."""
    batch = len(logits)
    add = batch == 1 and cache.ids.ndim == 1
    layers, ids = jax.tree.map(lambda x: x[None] if add else x, (cache.layers, cache.ids))
    return GenerationState(logits, layers, ids)


def _cache(state: GenerationState, length: PerSequence) -> Cache:
    """The cache of a state, without a batch axis if there is one row."""
    drop = len(state.ids) == 1
    layers, ids = jax.tree.map(lambda x: x[0] if drop else x, (state.layers, state.ids))
    return Cache(layers, ids, _drop_single(length))


def _drop_first_half(
    prepared: PreparedModel, length: np.ndarray, state: GenerationState
) -> GenerationState:
    """Drop the first half of the texts whose context is full."""
    end, back = prepared.model.config.context_length, len(prepared.model.previous)
    half = end // 2
    full = np.broadcast_to(length == end, len(state.ids))
    window = np.asarray(state.ids)[:, back:][:, end - half : end]
    window = np.where(full[:, None], window, 0)
    capacity = state.ids.shape[1] - back
    new = _prefill_prompt(prepared, window, np.full_like(length, half), capacity)
    if not length.ndim:
        return GenerationState(state.logits, new.layers, new.ids)
    return _choose((full, new), state)


@eqx.filter_jit(donate="all-except-first")
def _choose(
    replacement: tuple[Bool[Array | np.ndarray, " batch"], GenerationState], old: GenerationState
) -> GenerationState:
    """The caches of another state in the rows that are full, and all else of `old`."""
    full, new = replacement

    def choose(new, old):
        return jnp.where(full.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    return jax.tree.map(choose, GenerationState(old.logits, new.layers, new.ids), old)


@eqx.filter_jit(donate="all-except-first")
def decode(
    inputs: DecodeInputs, state: GenerationState, *, observe: Observe | None = None
) -> tuple[GenerationState, Int[Array, "batch new"], Any]:
    """The next `inputs.n_new` tokens, zeros after them, and what `observe` makes of them, if it is
    given."""

    def generate(model: GPT, rows: Any) -> tuple[GenerationState, Array, Any]:
        state, keys, sampling, length, done, count = rows
        batch = len(keys)
        # All random numbers are drawn before the loop. In it, they took half the time of a small
        # model.
        numbers = jnp.broadcast_to(done, batch)[:, None] + jnp.arange(TOKENS_PER_CALL)
        token_keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, numbers)
        uniform = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), "float32")))(token_keys)

        def body(i, carry):
            logits, cache, tokens, observed = carry
            token = sample(logits, sampling, uniform[:, i])
            if observe is not None:
                new = observe(logits[:, None], token[:, None])
                observed = jax.tree.map(lambda old, one: old.at[:, i].set(one[:, 0]), observed, new)
            logits, cache = next_logits(model, token, cache)
            return logits, cache, tokens.at[:, i].set(token), observed

        tokens = jnp.zeros((batch, TOKENS_PER_CALL), jnp.int32)
        observed = None
        if observe is not None:
            shapes = jax.eval_shape(observe, state.logits[:, None], tokens[:, :1])
            observed = jax.tree.map(
                lambda x: jnp.zeros((batch, TOKENS_PER_CALL, *x.shape[2:]), x.dtype), shapes
            )
        carry = state.logits, _cache(state, length), tokens, observed
        logits, cache, tokens, observed = lax.fori_loop(0, count, body, carry)
        return _state(logits, cache), tokens, observed

    prepared, *rest = inputs
    return map_rows(generate, prepared.mesh, prepared.model, (state, *rest))


def _drop_single(x: Any) -> Any:
    """`x` without its axis of rows, if that has the length 1. With such an axis, XLA's CPU compiler
    copies the cache at every token."""
    return x[0] if x.shape[:1] == (1,) else x


def next_logits(
    model: GPT, token: Int[Array, " batch"], cache: Cache
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Logits of the token after `token`, and the cache with `token` added. The cache of a single
    text may have no batch axis."""
    hidden, cache = model.extend(token.reshape(*cache.ids.shape[:-1], 1), cache)
    return model.logits(hidden).reshape(len(token), model.vocab_size), cache
