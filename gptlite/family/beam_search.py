"""Beam search with an encoder-decoder, cached."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.errors import require
from gptlite.family.cross_attention import MemoryKV
from gptlite.family.seq2seq import Seq2Seq
from gptlite.generation.generate import next_logits
from gptlite.machine.fields import Between
from gptlite.machine.ids import check_ids
from gptlite.nn.cache import Cache
from gptlite.nn.context import Context
from gptlite.nn.stack import unstacked


class BeamSearchResult(eqx.Module):
    """A target for each source."""

    ids: Int[Array, "batch new"]
    """Up to and including the end token, if it was reached; -1 after it."""
    log_prob: Float[Array, " batch"]
    """The log probability of the target, in nats."""


class _Beam(eqx.Module):
    """The best prefixes of each target so far, the best first."""

    cache: Cache
    token: Int[Array, "batch beam"]
    """The last token, not yet in the cache; -1 in targets that have ended."""
    ids: Int[Array, "batch beam new"]
    total: Float[Array, "batch beam"]
    """Log probability."""
    score: Float[Array, "batch beam"]
    n_generated: Int[Array, ""]


def beam_search(
    model: Seq2Seq,
    source: Int[Array | np.ndarray, "batch source_seq"],
    *,
    beam: int = 4,
    length_penalty: float = 0.0,
    source_lengths: Int[Array | np.ndarray, " batch"] | None = None,
    start: int,
    end: int,
    max_new_tokens: int | None = None,
) -> BeamSearchResult:
    """The best target found by keeping, at every length, the `beam` best prefixes (Graves, 2012,
    section 2.5). With `beam` 1, that is greedy search. With `beam` at least the number of
    possible targets, the search is exhaustive.

    The score of a target is its log probability over `((5 + tokens) / 6) ^ length_penalty` (Wu et
    al., 2016, eq. 14), where the tokens include the end token.

    **Arguments:**

    - `length_penalty`: 0 favours short targets; 0.6 is usual.
    - `source_lengths`: how many tokens of each source are real; padding follows them. Default: all.
    - `start`, `end`: the token that the decoder reads first, and the one after which it stops.
    - `max_new_tokens`: the maximum length. Default: the model's context length.

    **Raises:** `UserError` if a source has no token, an id is not in its vocabulary, or a number is
    out of bounds.
    """
    context_length = model.config.context_length
    max_new_tokens = context_length if max_new_tokens is None else max_new_tokens
    require(source.size > 0, f"There must be a source with a token, got {list(source.shape)} ids.")
    Between(1, 2**20).check("beam", beam)
    Between(0.0, 10.0).check("length_penalty", length_penalty)
    Between(1, context_length).check("max_new_tokens", max_new_tokens)
    for name, token in (("start", start), ("end", end)):
        Between(0, model.decoder.vocab_size - 1).check(name, token)
    check_ids(source, model.encoder.vocab_size, source_lengths, shortest=1)
    model = unstacked(model)
    return _search(model, source, source_lengths, start, end, max_new_tokens, beam, length_penalty)


@eqx.filter_jit
def _search(
    model: Seq2Seq,
    source: Int[Array | np.ndarray, "batch source_seq"],
    source_lengths: Int[Array | np.ndarray, " batch"] | None,
    start: int,
    end: int,
    max_new_tokens: int,
    beam: int,
    length_penalty: float,
) -> BeamSearchResult:
    batch = len(source)

    def penalty(tokens):
        return ((5.0 + tokens) / 6.0) ** length_penalty

    def unfinished(state: _Beam):
        # A target that has ended keeps its score. One that continues can only lose probability, and
        # gains no more from its length than the longest target.
        at_best = jnp.where(state.token >= 0, state.total / penalty(max_new_tokens), -jnp.inf)
        settled = (state.token[:, 0] < 0) & (jnp.max(at_best, axis=1) <= state.score[:, 0])
        return (state.n_generated < max_new_tokens) & ~jnp.all(settled)

    def step(state: _Beam):
        logits, cache = next_logits(model.decoder, state.token.reshape(-1), state.cache)
        log_probs = jax.nn.log_softmax(logits).reshape(batch, beam, -1)
        vocab = log_probs.shape[-1]
        alive = state.token[..., None] >= 0
        # A target that has ended is continued by a single candidate: the end again, at no cost.
        ended = jnp.where(jnp.arange(vocab) == end, 0.0, -jnp.inf)
        total = state.total[..., None] + jnp.where(alive, log_probs, ended)
        before = jnp.sum(state.ids >= 0, axis=-1, keepdims=True)
        score = total / penalty(before + alive)
        score, place = lax.top_k(score.reshape(batch, -1), beam)
        parent, token = place // vocab, (place % vocab).astype(jnp.int32)
        alive = jnp.take_along_axis(alive[..., 0], parent, axis=1)
        ids = jnp.take_along_axis(state.ids, parent[..., None], axis=1)
        rows = (jnp.arange(batch)[:, None] * beam + parent).reshape(-1)
        return _Beam(
            cache=cache if beam == 1 else _reordered(cache, rows),
            token=jnp.where(alive & (token != end), token, -1),
            ids=ids.at[:, :, state.n_generated].set(jnp.where(alive, token, -1)),
            total=jnp.take_along_axis(total.reshape(batch, -1), place, axis=1),
            score=score,
            n_generated=state.n_generated + 1,
        )

    memory, lengths = (
        None if x is None else jnp.repeat(x, beam, axis=0)
        for x in (model.encode(source, source_lengths), source_lengths)
    )
    context = Context(memory=memory, memory_lengths=lengths)
    # A single prefix, so that no two are the same.
    total = jnp.full((batch, beam), -jnp.inf).at[:, 0].set(0.0)
    state = _Beam(
        cache=model.decoder.init_cache((batch * beam,), context),
        token=jnp.full((batch, beam), start, jnp.int32),
        ids=jnp.full((batch, beam, max_new_tokens), -1, jnp.int32),
        total=total,
        score=total,
        n_generated=jnp.zeros((), jnp.int32),
    )
    state = lax.while_loop(unfinished, step, state)
    return BeamSearchResult(state.ids[:, 0], state.total[:, 0])


def _reordered(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """`cache` with the sequences `rows`. A layer's `MemoryKV` of the source stays: it is the same
    for all prefixes of one target."""

    def is_memory(node: Any) -> bool:
        return isinstance(node, MemoryKV)

    layers = jax.tree.map(
        lambda node: node if is_memory(node) else node[rows], cache.layers, is_leaf=is_memory
    )
    return Cache(layers, cache.ids[rows], cache.length)
