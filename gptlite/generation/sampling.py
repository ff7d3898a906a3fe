"""From logits to a token."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.config import SamplingConfig
from gptlite.machine.fields import MAX_INT32

# Filters look at so many of the most probable tokens first: that takes an 80th of the time that
# sorting 50,000 does.
FEW = 256
# Tokens in a block, of which the sum is drawn from first.
BLOCK = 256


class Filters(eqx.Module):
    """Which tokens are drawn from. A filter that is off has a number that keeps all tokens."""

    top_k: Int[Array | np.ndarray, " batch"]
    top_p: Float[Array | np.ndarray, " batch"]
    min_p: Float[Array | np.ndarray, " batch"]


class Sampling(eqx.Module):
    """The `SamplingConfig` of each row as numbers, so that rows with different ones share a
    compiled program."""

    temperature: Float[Array | np.ndarray, " batch"]
    """0: always the most probable token."""
    filters: Filters | None
    """None if no row has any: they take time."""

    @staticmethod
    def of(configs: Sequence[SamplingConfig]) -> "Sampling":
        """A row for each config."""
        temperature = [0.0 if config.greedy else config.temperature for config in configs]
        filters = [
            (config.top_k or MAX_INT32, config.top_p or 2.0, config.min_p or 0.0)
            for config in configs
        ]
        top_k, top_p, min_p = zip(*filters, strict=True) if filters else ((), (), ())
        any_filter = any(x != (MAX_INT32, 2.0, 0.0) for x in filters)
        return Sampling(
            np.array(temperature, np.float32),
            Filters(
                np.array(top_k, np.int32), np.array(top_p, np.float32), np.array(min_p, np.float32)
            )
            if any_filter
            else None,
        )


def candidates(
    logits: Float[Array, "batch vocab"], sampling: Sampling
) -> Float[Array, "batch vocab"]:
    """Logits divided by the temperature, shifted so that the largest is 0. Tokens that the filters
    exclude have -inf.

    top-k: Fan et al., 2018, section 5.4. top-p: Holtzman et al., 2020, section 3.1. min-p:
    Nguyen et al., 2024, section 3. Of equal logits the lower id comes first.
    """
    temperature = jnp.asarray(sampling.temperature)[:, None]
    # Shifted before the division, so that a tiny temperature gives no infinity.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    if sampling.filters is None:
        return logits
    filters, vocab = sampling.filters, logits.shape[-1]
    top_k, top_p, min_p = (
        jnp.asarray(x)[:, None] for x in (filters.top_k, filters.top_p, filters.min_p)
    )

    def rank(best: int) -> tuple[Array, Array, Array]:
        """Of so many of the best tokens: how many top-k and top-p keep, and the logit and the id
        of the last of these."""
        values, ids = lax.top_k(logits, best)
        weights = jnp.where(jnp.arange(best) < top_k, jnp.exp(values), 0)
        mass = jnp.sum(weights, axis=-1, keepdims=True)
        if best < vocab:
            whole = jnp.sum(jnp.exp(logits), axis=-1, keepdims=True)
            mass = jnp.where(top_k < vocab, mass, whole)
        before = jnp.cumsum(weights, axis=-1) - weights
        kept = jnp.minimum(jnp.sum(before < top_p * mass, axis=-1, keepdims=True), top_k)
        place = jnp.clip(kept, 1, best) - 1
        last, last_id = (jnp.take_along_axis(x, place, axis=-1) for x in (values, ids))
        return kept, last, last_id

    few = min(FEW, vocab)
    kept, last, last_id = rank(few)
    if few < vocab:
        is_ranked = (top_k < vocab) | (top_p <= 1)
        # The few do not tell the mass of more than them.
        more = is_ranked & (top_k > few) & ((top_k < vocab) | (kept == few))
        few_best = kept, last, last_id
        found = lax.cond(jnp.any(more), lambda: rank(vocab), lambda: few_best)
        # Sums of more tokens round differently, so that a row keeps to what it would use alone.
        _, last, last_id = (jnp.where(more, x, y) for x, y in zip(found, few_best, strict=True))
        last = jnp.where(is_ranked, last, -jnp.inf)
    keep = (logits > last) | ((logits == last) & (jnp.arange(vocab) <= last_id))
    keep &= logits >= jnp.log(min_p)
    return jnp.where(keep, logits, -jnp.inf)


def sample(
    logits: Float[Array, "batch vocab"], sampling: Sampling, uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """One token a row: the first at which the cumulative probability exceeds the row's number in
    [0, 1). That is one random number per token. The Gumbel trick needs one per candidate, which on
    a CPU took half the time of a small model."""
    weights = jnp.exp(candidates(logits, sampling))
    batch, vocab = weights.shape
    if vocab <= 4 * BLOCK:
        drawn, _ = _draw(weights, uniform)
    else:
        # First a block of tokens, then a token in it: a sum over blocks takes a tenth of the time
        # of a cumulative sum.
        blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(batch, -1, BLOCK)
        block, rest = _draw(jnp.sum(blocks, axis=-1), uniform)
        inside, _ = _draw(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], rest)
        drawn = BLOCK * block + inside
    greedy = jnp.argmax(logits, axis=-1)
    return jnp.where(sampling.temperature > 0, drawn, greedy).astype(jnp.int32)


def _draw(
    weights: Float[Array, "batch n"], uniform: Float[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """The first entry of each row at which the sum exceeds the row's number times the sum of all,
    and how far into that entry the number reaches, again in [0, 1)."""
    # Rounding may increase a sum at an excluded token, so these do not count.
    total = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0)
    goal = uniform[:, None] * jnp.max(total, axis=-1, keepdims=True)
    choice = jnp.argmax(total > goal, axis=-1)[:, None]
    here, weight = (jnp.take_along_axis(x, choice, axis=-1) for x in (total, weights))
    rest = jnp.clip(1 - (here - goal) / weight, 0, 1 - 2.0**-24)
    return choice[:, 0], rest[:, 0]
