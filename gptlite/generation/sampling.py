"""From logits to a token."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.config import SamplingConfig


def candidates(
    logits: Float[Array, "batch vocab"], config: SamplingConfig
) -> tuple[Float[Array, "batch candidates"], Int[Array, "batch candidates"]]:
    """Logits divided by the temperature, shifted so that the largest is 0, and their token ids.
    Tokens that the filters exclude have -inf.

    top-k: Fan et al., 2018, section 5.4. top-p: Holtzman et al., 2020, section 3.1. min-p:
    Nguyen et al., 2024, section 3. Of equal logits the lower id comes first.
    """
    batch, vocab = logits.shape
    # Shifted before the division, so that a tiny temperature gives no infinity.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / config.temperature
    if config.top_k is None and config.top_p is None:
        ids = jnp.broadcast_to(jnp.arange(vocab), (batch, vocab))
    else:
        logits, ids = lax.top_k(logits, min(config.top_k or vocab, vocab))
    keep = jnp.ones(logits.shape, bool)
    if config.top_p is not None:
        probability = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        keep &= before < config.top_p
    if config.min_p:
        keep &= logits >= jnp.max(logits, axis=-1, keepdims=True) + math.log(config.min_p)
    return jnp.where(keep, logits, -jnp.inf), ids


def sample(
    logits: Float[Array, "batch vocab"], config: SamplingConfig, uniform: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """One token a row: the first at which the cumulative probability exceeds the row's number in
    [0, 1). That is one random number per token. The Gumbel trick needs one per candidate, which on
    a CPU took half the time of a small model."""
    if config.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept, ids = candidates(logits, config)
    # Rounding may increase a sum at an excluded token, so these do not count.
    total = jnp.where(jnp.isfinite(kept), jnp.cumsum(jnp.exp(kept), axis=-1), 0)
    reached = total > uniform[:, None] * jnp.max(total, axis=-1, keepdims=True)
    choice = jnp.argmax(reached, axis=-1)
    return jnp.take_along_axis(ids, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
