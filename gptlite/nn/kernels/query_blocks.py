"""Causal attention in blocks of queries, each without the keys that none of its queries sees.

The reference:

    attend(query, key, value, bias, mask, dropout_key)

A step of M takes 0.94 of the time in float32, of 0.96 in bfloat16, `quick` 0.94: 2 cores of an AMD
EPYC (Zen 4), by turns (benchmarks/NOTES.md; `python benchmarks/train_speed.py`).
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

# Queries in a block, at least, and blocks, at most.
BLOCK, MAX_BLOCKS = 128, 8


def in_query_blocks(
    attend: Callable[..., Array],
    query: Float[Array, "*batch heads queries d_head"],
    key: Float[Array, "*batch kv_heads keys d_head"],
    value: Float[Array, "*batch kv_heads keys d_value"],
    bias: Float[Array, "*#batch heads queries keys"] | None,
    mask: Bool[Array, "*#batch #heads #queries keys"] | None,
    dropout_key: PRNGKeyArray | None,
    window: int | None,
) -> Float[Array, "*batch heads queries d_value"]:
    """`attend`, whose mask lets query i see the keys 0 to i at most, with `window` the last
    `window` of these."""
    assert mask is not None
    queries, keys = query.shape[-2], key.shape[-2]
    count = min(max(1, queries // BLOCK), MAX_BLOCKS)
    ends = [queries * i // count for i in range(count + 1)]
    blocks = []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        # At least one key, also where a block sees none.
        first = 0 if window is None else min(max(0, start + 1 - window), keys - 1)
        seen = slice(first, min(end, keys))
        blocks.append(
            attend(
                query[..., start:end, :],
                key[..., seen, :],
                value[..., seen, :],
                None if bias is None else bias[..., start:end, seen],
                mask[..., start:end, seen],
                None if dropout_key is None else jax.random.fold_in(dropout_key, i),
            )
        )
    return jnp.concatenate(blocks, axis=-2)
