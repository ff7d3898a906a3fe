"""From logits to a token."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gptlite.config import SamplingConfig
from gptlite.machine.fields import MAX_INT32
from gptlite.nn.kernels.drawing import draw_by_blocks, last_kept


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
        # A top-p of 1 is off, too: else the vocabulary would be sorted to find that all is kept.
        filters = [
            (c.top_k or MAX_INT32, c.top_p if (c.top_p or 1) < 1 else 2.0, c.min_p or 0.0)
            for c in configs
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
    Nguyen et al., 2024, section 3. Among equal logits the lower id comes first.
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

    last, last_id = last_kept(logits, top_k, top_p)
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
    drawn = draw_by_blocks(weights, uniform)
    greedy = jnp.argmax(logits, axis=-1)
    return jnp.where(sampling.temperature > 0, drawn, greedy).astype(jnp.int32)
