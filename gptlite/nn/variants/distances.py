"""Positions that are added to attention's scores, by distance.

Each is called as `bias(queries, keys, start)`, and returns what is added to the scores of queries
at positions from `start` on and keys at positions from 0 on.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.errors import require
from gptlite.machine.fields import Between, Count, Options
from gptlite.nn.context import Start
from gptlite.nn.embedding import Embedding
from gptlite.nn.positions import token_positions


class ALiBi(eqx.Module):
    """Subtracts `slope · distance` from the score of a key at that distance. The slope of head h,
    counted from 1, is `2^(-8h / n_heads)` (Press et al., 2022, section 3).

    Loss against rotary: +0.055 ± 0.034 nats per token (benchmarks/blocks.md).
    """

    n_heads: int = eqx.field(static=True)

    def __call__(
        self, queries: int, keys: int, start: Start
    ) -> Float[Array, "*rows heads queries keys"]:
        slope = 2.0 ** (-8.0 * jnp.arange(1, self.n_heads + 1) / self.n_heads)
        return -slope[:, None, None] * jnp.abs(_distance(queries, keys, start))[..., None, :, :]


@dataclass(frozen=True, kw_only=True)
class RelativeOptions(Options):
    """The options of `RelativeBias`."""

    buckets: Annotated[int, Between(2, 10_000)] = 32
    max_distance: Count = 128


class RelativeBias(eqx.Module):
    """Adds a trained number for each head and bucket of distances (Raffel et al., 2020, section
    2.1). Each distance below half of the number of buckets has a bucket of its own. Buckets for
    larger distances grow, up to `max_distance`; all distances beyond that share the last one. With
    `bidirectional`, for encoders, later keys have one half of the buckets, earlier keys the other.

    Raffel et al. share the table between layers; here each layer has its own.

    **Raises:** `UserError` if `buckets` or `max_distance` is too small.

    Loss against rotary: +0.081 ± 0.030 nats per token (benchmarks/blocks.md).
    """

    table: Embedding
    max_distance: int = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)

    def __init__(
        self,
        n_heads: int,
        *,
        buckets: int = RelativeOptions.buckets,
        max_distance: int = RelativeOptions.max_distance,
        bidirectional: bool = False,
        key: PRNGKeyArray,
    ):
        near = buckets // (4 if bidirectional else 2)
        require(
            1 <= near < max_distance,
            f"The buckets of relative positions must be at least {4 if bidirectional else 2}, "
            f"and max_distance above the {near} distances with a bucket of their own, got "
            f"{buckets} and {max_distance}.",
        )
        self.table = Embedding(buckets, n_heads, std=0.02, key=key)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    @classmethod
    def from_config(
        cls, config: Any, options: RelativeOptions, *, causal: bool = True, key: PRNGKeyArray
    ) -> "RelativeBias":
        """`bidirectional` if it is not `causal`."""
        return cls(config.n_heads, **vars(options), bidirectional=not causal, key=key)

    def __call__(
        self, queries: int, keys: int, start: Start
    ) -> Float[Array, "*rows heads queries keys"]:
        distance = _distance(queries, keys, start)
        buckets = len(self.table.weight) // (2 if self.bidirectional else 1)
        near = buckets // 2
        back = jnp.abs(distance) if self.bidirectional else jnp.maximum(distance, 0)
        ratio = jnp.log(jnp.maximum(back, near) / near) / math.log(self.max_distance / near)
        far = near + (ratio * (buckets - near)).astype(back.dtype)
        bucket = jnp.where(back < near, back, jnp.minimum(far, buckets - 1))
        if self.bidirectional:
            bucket += jnp.where(distance < 0, buckets, 0)
        return jnp.moveaxis(self.table(bucket), -1, -3)


def _distance(queries: int, keys: int, start: Start) -> Int[Array, "*rows queries keys"]:
    """The position of each query, from `start` on, minus that of each key."""
    return token_positions(queries, start)[..., None] - jnp.arange(keys)
