"""Position encodings.

`Learned`, `Sinusoidal`, `Rotary` and `NoPositions` have one call, `positions(x, offset)`, on
`[*batch, seq, d]` whose first token stands at absolute position `offset`. `Learned` and
`Sinusoidal` are for the embeddings, before the first block, and take an offset for each sequence,
too; `Rotary` is for queries and keys, inside attention; `NoPositions` fits both places.

`ALiBi` and `RelativeBias` are for attention's scores: `bias(queries, keys, offset)` is what is
added to those of queries at positions from `offset` on and keys from 0 on.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.nn.embedding import Embedding

Offset = int | Int[Array, ""]
# One for all sequences or one for each. What stands before position 0 is padding.
Offsets = Offset | Int[Array, "*batch"]


class NoPositions(eqx.Module):
    """The identity: attention's causal mask is then all that tells order (Haviv et al., 2022).

    Measured: against rotary, 0.112 ± 0.010 nats worse (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offsets = 0
    ) -> Float[Array, "*batch seq d"]:
        return x


class Learned(eqx.Module):
    """Adds a trained vector per position (Radford et al., 2018).

    **Raises:** `ValueError` (while tracing) if a sequence is longer than the context.

    Measured: against rotary, 0.230 ± 0.011 nats worse (benchmarks/blocks.md).
    """

    weight: Float[Array, "context d"]

    def __init__(self, context_length: int, d: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (context_length, d))

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offsets = 0
    ) -> Float[Array, "*batch seq d"]:
        context, seq = len(self.weight), x.shape[-2]
        if seq > context:
            raise ValueError(
                f"Learned positions end at context_length {context}, got a sequence of {seq}."
            )
        if isinstance(offset, int):
            return x + self.weight[offset : offset + seq]
        return x + self.weight[jnp.maximum(positions(seq, offset), 0)]


class Sinusoidal(eqx.Module):
    """Adds `sin(t / 10000^(2i/d))` to channel 2i and the cosine to 2i + 1
    (Vaswani et al., 2017, section 3.5).

    Measured: against rotary, 0.117 ± 0.016 nats worse (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offsets = 0
    ) -> Float[Array, "*batch seq d"]:
        angle = _angles(x.shape[-2], x.shape[-1], offset)
        table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        return x + table.reshape(*angle.shape[:-1], x.shape[-1]).astype(x.dtype)


class Rotary(eqx.Module):
    """Rotates the channel pair `(i, i + d/2)` at position t by `t / 10000^(2i/d)`
    (Su et al., 2021, section 3.2, with GPT-NeoX's pairing), so that the product of a query and a
    key depends on their distance alone.

    Measured: what the other positions are measured against (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offset = 0
    ) -> Float[Array, "*batch seq d"]:
        angle = _angles(x.shape[-2], x.shape[-1], offset)
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class ALiBi(eqx.Module):
    """Takes `slope · distance` off the score of a key at that distance; the slopes of the heads
    h = 1, 2, ... are `2^(-8h / n_heads)` (Press et al., 2022, section 3).

    Measured: against rotary, 0.052 ± 0.014 nats worse (benchmarks/blocks.md).
    """

    n_heads: int = eqx.field(static=True)

    def __call__(
        self, queries: int, keys: int, offset: Offset
    ) -> Float[Array, "heads queries keys"]:
        slope = 2.0 ** (-8.0 * jnp.arange(1, self.n_heads + 1) / self.n_heads)
        return -slope[:, None, None] * jnp.abs(_distance(queries, keys, offset))


class RelativeBias(eqx.Module):
    """Adds a trained number for the head and the key's distance: one for each distance below half
    of the buckets; farther ones share, in buckets that grow to `farthest`, and one for all beyond
    (Raffel et al., 2020, section 2.1). With `both_ways`, for encoders, later keys have one half of
    the buckets, and earlier ones the other.

    Raffel et al. share the table between layers; here each layer has its own.

    Measured: against rotary, 0.066 ± 0.012 nats worse (benchmarks/blocks.md).
    """

    table: Embedding
    farthest: int = eqx.field(static=True)
    both_ways: bool = eqx.field(static=True)

    def __init__(
        self,
        n_heads: int,
        *,
        buckets: int = 32,
        farthest: int = 128,
        both_ways: bool = False,
        key: PRNGKeyArray,
    ):
        self.table = Embedding(buckets, n_heads, std=0.02, key=key)
        self.farthest = farthest
        self.both_ways = both_ways

    def __call__(
        self, queries: int, keys: int, offset: Offset
    ) -> Float[Array, "heads queries keys"]:
        distance = _distance(queries, keys, offset)
        buckets = len(self.table.weight) // (2 if self.both_ways else 1)
        near = buckets // 2
        back = jnp.abs(distance) if self.both_ways else jnp.maximum(distance, 0)
        ratio = jnp.log(jnp.maximum(back, near) / near) / math.log(self.farthest / near)
        far = near + (ratio * (buckets - near)).astype(back.dtype)
        bucket = jnp.where(back < near, back, jnp.minimum(far, buckets - 1))
        if self.both_ways:
            bucket += jnp.where(distance < 0, buckets, 0)
        return jnp.moveaxis(self.table(bucket), -1, 0)


def _distance(queries: int, keys: int, offset: Offset) -> Int[Array, "queries keys"]:
    """From each query, at positions from `offset` on, back to each key."""
    return positions(queries, offset)[:, None] - jnp.arange(keys)


def positions(seq: int, offset: Offsets) -> Int[Array, "*batch seq"]:
    return jnp.asarray(offset)[..., None] + jnp.arange(seq)


def _angles(seq: int, d: int, offset: Offsets) -> Float[Array, "*batch seq half_d"]:
    """`t / 10000^(2i/d)` for positions `t` from `offset` and channel pairs `i`, in radians.

    **Raises:** `ValueError` (while tracing) if `d` is odd.
    """
    if d % 2:
        raise ValueError(
            f"Rotary and sinusoidal positions pair channels up; d must be even, got {d}."
        )
    frequency = 10000.0 ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    return positions(seq, offset).astype(jnp.float32)[..., None] * frequency
