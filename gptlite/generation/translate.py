"""From a source to a target, with an encoder-decoder: greedy search and beam search, cached."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.config import Between, UserError
from gptlite.generation.generate import drop_single, next_logits
from gptlite.models.seq2seq import Seq2Seq
from gptlite.nn.attention import Memory
from gptlite.nn.cache import Cache
from gptlite.nn.context import Context


class Translation(eqx.Module):
    """A target for each source."""

    ids: Int[Array, "batch new"]
    """Up to the end token, which is among them where it was reached; -1 from there on."""
    log_prob: Float[Array, " batch"]
    """Of all of them, in nats."""


def greedy_search(
    model: Seq2Seq,
    source: Int[Array, "batch source_seq"],
    *,
    source_lengths: Int[Array, " batch"] | None = None,
    start: int,
    end: int,
    max_new_tokens: int | None = None,
) -> Translation:
    """The most probable next token, again and again.

    **Arguments:**

    - `source_lengths`: how many tokens of each source are real; padding stands behind them.
      Default: all.
    - `start`, `end`: the token that the decoder reads first, and the one after which it stops.
    - `max_new_tokens`: stop there at the latest. By default the model's context length.

    **Raises:** `UserError` if there is no source, `start` or `end` is not in the target's
    vocabulary, or `max_new_tokens` is below 1 or above the model's context.
    """
    most = _check(model, source, start, end, max_new_tokens)
    return _greedy_search(model.unstacked(), source, source_lengths, start, end, most)


def beam_search(
    model: Seq2Seq,
    source: Int[Array, "batch source_seq"],
    *,
    beam: int = 4,
    length_penalty: float = 0.0,
    source_lengths: Int[Array, " batch"] | None = None,
    start: int,
    end: int,
    max_new_tokens: int | None = None,
) -> Translation:
    """The best target found by keeping, at every length, the `beam` best beginnings (Graves, 2012,
    section 2.5). With `beam` 1 that is `greedy_search`; with as many as there are targets, it finds
    the best of all.

    A target's score is its log probability over `((5 + tokens) / 6) ^ length_penalty` (Wu et al.,
    2016, eq. 14), the end token counted; 0 favours short ones, 0.6 is usual.

    **Raises:** `UserError` as `greedy_search` does, and if `beam` is below 1 or `length_penalty`
    not between 0 and 10.
    """
    Between(1, 2**20).check("beam", beam)
    Between(0.0, 10.0).check("length_penalty", length_penalty)
    most = _check(model, source, start, end, max_new_tokens)
    model = model.unstacked()
    return _beam_search(model, source, source_lengths, start, end, most, beam, length_penalty)


def _check(
    model: Seq2Seq,
    source: Int[Array, "batch source_seq"],
    start: int,
    end: int,
    max_new_tokens: int | None,
) -> int:
    """How many tokens there may be."""
    if source.size == 0:
        raise UserError(f"There must be a source with a token, got {list(source.shape)} ids.")
    for name, token in (("start", start), ("end", end)):
        Between(0, model.decoder.vocab_size - 1).check(name, token)
    context = model.config.context_length
    most = context if max_new_tokens is None else max_new_tokens
    if not 1 <= most <= context:
        raise UserError(
            f"max_new_tokens must be 1 to {context}, the model's context_length, got {most}."
        )
    return most


@eqx.filter_jit
def _greedy_search(
    model: Seq2Seq,
    source: Int[Array, "batch source_seq"],
    source_lengths: Int[Array, " batch"] | None,
    start: int,
    end: int,
    most: int,
) -> Translation:
    batch = len(source)

    def unfinished(carry):
        i, token, *_ = carry
        return (i < most) & jnp.any(token >= 0)

    def step(carry):
        i, token, cache, ids, total = carry
        alive = token >= 0
        log_probs, cache = _next(model, token, cache)
        best = jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        total += jnp.where(alive, jnp.max(log_probs, axis=-1), 0)
        ids = ids.at[:, i].set(jnp.where(alive, best, -1))
        return i + 1, jnp.where(alive & (best != end), best, -1), cache, ids, total

    lengths = None if source_lengths is None else drop_single(source_lengths)
    cache = model.init_cache(drop_single(source), lengths)
    token = jnp.full(batch, start, jnp.int32)
    ids = jnp.full((batch, most), -1, jnp.int32)
    *_, ids, total = lax.while_loop(
        unfinished, step, (jnp.zeros((), jnp.int32), token, cache, ids, jnp.zeros(batch))
    )
    return Translation(ids, total)


class _Beam(eqx.Module):
    """The best beginnings so far, the best first."""

    cache: Cache
    token: Int[Array, "batch beam"]
    """The last one, which is still to be read; -1 behind the end."""
    ids: Int[Array, "batch beam new"]
    total: Float[Array, "batch beam"]
    """Log probability."""
    score: Float[Array, "batch beam"]
    made: Int[Array, ""]


@eqx.filter_jit
def _beam_search(
    model: Seq2Seq,
    source: Int[Array, "batch source_seq"],
    source_lengths: Int[Array, " batch"] | None,
    start: int,
    end: int,
    most: int,
    beam: int,
    length_penalty: float,
) -> Translation:
    batch = len(source)

    def penalty(tokens):
        return ((5.0 + tokens) / 6.0) ** length_penalty

    def unfinished(state: _Beam):
        # What has ended stays what it is; what goes on can only lose probability, and can be
        # favoured by its length no more than the longest.
        at_best = jnp.where(state.token >= 0, state.total / penalty(most), -jnp.inf)
        settled = (state.token[:, 0] < 0) & (jnp.max(at_best, axis=1) <= state.score[:, 0])
        return (state.made < most) & ~jnp.all(settled)

    def step(state: _Beam):
        log_probs, cache = _next(model, state.token.reshape(-1), state.cache)
        vocab = log_probs.shape[-1]
        alive = state.token[..., None] >= 0
        # What has ended goes on as a single candidate: the end again, which costs nothing.
        standing = jnp.where(jnp.arange(vocab) == end, 0.0, -jnp.inf)
        total = state.total[..., None] + jnp.where(
            alive, log_probs.reshape(batch, beam, vocab), standing
        )
        before = jnp.sum(state.ids >= 0, axis=-1, keepdims=True)
        score = total / penalty(before + alive)
        score, place = lax.top_k(score.reshape(batch, -1), beam)
        parent, token = place // vocab, (place % vocab).astype(jnp.int32)
        alive = jnp.take_along_axis(alive[..., 0], parent, axis=1)
        ids = jnp.take_along_axis(state.ids, parent[..., None], axis=1)
        rows = (jnp.arange(batch)[:, None] * beam + parent).reshape(-1)
        return _Beam(
            cache=_reordered(cache, rows),
            token=jnp.where(alive & (token != end), token, -1),
            ids=ids.at[:, :, state.made].set(jnp.where(alive, token, -1)),
            total=jnp.take_along_axis(total.reshape(batch, -1), place, axis=1),
            score=score,
            made=state.made + 1,
        )

    memory = model.encode(source, source_lengths)
    memory, lengths = (
        None if x is None else jnp.repeat(x, beam, axis=0) for x in (memory, source_lengths)
    )
    context = Context(memory=memory, memory_lengths=lengths)
    # One beginning, so that no two are the same.
    total = jnp.full((batch, beam), -jnp.inf).at[:, 0].set(0.0)
    state = _Beam(
        cache=model.decoder.init_cache((batch * beam,), context),
        token=jnp.full((batch, beam), start, jnp.int32),
        ids=jnp.full((batch, beam, most), -1, jnp.int32),
        total=total,
        score=total,
        made=jnp.zeros((), jnp.int32),
    )
    state = lax.while_loop(unfinished, step, state)
    return Translation(state.ids[:, 0], state.total[:, 0])


def _next(
    model: Seq2Seq, token: Int[Array, " rows"], cache: Cache
) -> tuple[Float[Array, "rows vocab"], Cache]:
    """Log probabilities of what follows `token`, and the cache with it read."""
    logits, cache = next_logits(model.decoder, token, cache)
    return jax.nn.log_softmax(logits), cache


def _reordered(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """`cache` with the sequences `rows` in place of all. What a layer keeps of the source stays: it
    is the same for all sequences that may change places."""

    def is_memory(node: Any) -> bool:
        return isinstance(node, Memory)

    layers = jax.tree.map(
        lambda node: node if is_memory(node) else node[rows], cache.layers, is_leaf=is_memory
    )
    return Cache(layers, cache.ids[rows], cache.length)
