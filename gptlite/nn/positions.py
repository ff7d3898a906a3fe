"""Position encodings.

`Learned` and `Sinusoidal` add to the embeddings, `[*batch, seq, d_model]`, before the first block.
`Rotary` acts on queries and keys, `[*batch, heads, seq, d_head]`, inside attention. `NoPositions`
fits both places. All are called as `positions(x, start)`, where `start` is the position of the
first token: a number for all sequences, or one for each.

`ALiBi` and `RelativeBias` are called as `bias(queries, keys, start)`, and return what is added to
the scores of queries at positions from `start` on and keys at positions from 0 on.
"""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.errors import UserError
from gptlite.nn.context import Start
from gptlite.nn.embedding import Embedding
from gptlite.nn.kernels.sums import add_to_each


class NoPositions(eqx.Module):
    """The identity. Only the causal mask then depends on the order of tokens (Haviv et al., 2022).

    Validation loss against rotary: +0.112 ± 0.010 nats per token (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], start: Start = 0
    ) -> Float[Array, "*batch seq d"]:
        return x


class Learned(eqx.Module):
    """Adds a trained vector per position (Radford et al., 2018).

    **Raises:** `ValueError` (while tracing) if a sequence is longer than the context.

    Validation loss against rotary: +0.230 ± 0.011 nats per token (benchmarks/blocks.md).
    """

    weight: Float[Array, "context d"]

    def __init__(self, context_length: int, d: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (context_length, d))

    def __call__(
        self, x: Float[Array, "*batch seq d"], start: Start = 0
    ) -> Float[Array, "*batch seq d"]:
        context, seq = len(self.weight), x.shape[-2]
        if seq > context:
            raise ValueError(
                f"Learned positions end at context_length {context}, got a sequence of {seq}."
            )
        if isinstance(start, int):  # the gradient of a slice costs less than that of a lookup
            return add_to_each(x, self.weight[start : start + seq])
        return x + self.weight[token_positions(seq, start)]


class Sinusoidal(eqx.Module):
    """Adds `sin(t / 10000^(2i/d))` to channel 2i and the cosine to 2i + 1
    (Vaswani et al., 2017, section 3.5).

    Validation loss against rotary: +0.117 ± 0.016 nats per token (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], start: Start = 0
    ) -> Float[Array, "*batch seq d"]:
        angle = _angles(x.shape[-2], _frequencies(x.shape[-1]), start)
        table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        return x + table.reshape(*angle.shape[:-1], x.shape[-1]).astype(x.dtype)


class Rotary(eqx.Module):
    """Rotates the channel pair `(i, i + d/2)` at position t by `t / theta^(2i/d)`
    (Su et al., 2021, section 3.2, with GPT-NeoX's pairing), so that the product of a query and a
    key depends on their distance alone. `scaling` slows the rotation of some pairs."""

    theta: float = eqx.field(static=True, default=10_000.0)
    scaling: "RotaryScaling | None" = eqx.field(static=True, default=None)

    def __call__(
        self, x: Float[Array, "*batch heads seq d"], start: Start = 0
    ) -> Float[Array, "*batch heads seq d"]:
        frequency = _frequencies(x.shape[-1], self.theta)
        if self.scaling is not None:
            frequency = self.scaling(frequency)
        angle = _angles(x.shape[-2], frequency, start)[..., None, :, :]  # for all heads
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@dataclass(frozen=True)
class RotaryScaling:
    """Llama 3.1's scaling, for contexts that are longer than those of the training before: pairs
    with a wavelength of more than `original_context / low_frequency` tokens turn `factor` times
    slower, those of less than `original_context / high_frequency` as before, and those between them
    by a mean of both (Grattafiori et al., 2024, "The Llama 3 herd of models"; the formula is that
    of Meta's `apply_scaling`)."""

    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_context: int = 8192

    def __call__(self, frequency: Float[Array, " pairs"]) -> Float[Array, " pairs"]:
        turns = self.original_context * frequency / (2 * math.pi)
        share = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        share = jnp.clip(share, 0.0, 1.0)
        return (1 - share) * frequency / self.factor + share * frequency


class ALiBi(eqx.Module):
    """Subtracts `slope · distance` from the score of a key at that distance. The slope of head h,
    counted from 1, is `2^(-8h / n_heads)` (Press et al., 2022, section 3).

    Validation loss against rotary: +0.052 ± 0.014 nats per token (benchmarks/blocks.md).
    """

    n_heads: int = eqx.field(static=True)

    def __call__(
        self, queries: int, keys: int, start: Start
    ) -> Float[Array, "*rows heads queries keys"]:
        slope = 2.0 ** (-8.0 * jnp.arange(1, self.n_heads + 1) / self.n_heads)
        return -slope[:, None, None] * jnp.abs(_distance(queries, keys, start))[..., None, :, :]


class RelativeBias(eqx.Module):
    """Adds a trained number for each head and bucket of distances (Raffel et al., 2020, section
    2.1). Each distance below half of the number of buckets has a bucket of its own. Buckets for
    larger distances grow, up to `max_distance`; all distances beyond that share the last one. With
    `bidirectional`, for encoders, later keys have one half of the buckets, earlier keys the other.

    Raffel et al. share the table between layers; here each layer has its own.

    **Raises:** `UserError` if `buckets` or `max_distance` is too small.

    Validation loss against rotary: +0.066 ± 0.012 nats per token (benchmarks/blocks.md).
    """

    table: Embedding
    max_distance: int = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)

    def __init__(
        self,
        n_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        key: PRNGKeyArray,
    ):
        near = buckets // (4 if bidirectional else 2)
        if not 1 <= near < max_distance:
            raise UserError(
                f"The buckets of relative positions must be at least {4 if bidirectional else 2}, "
                f"and max_distance above the {near} distances with a bucket of their own, got "
                f"{buckets} and {max_distance}."
            )
        self.table = Embedding(buckets, n_heads, std=0.02, key=key)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

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


def token_positions(seq: int, start: Start) -> Int[Array, "*rows seq"]:
    """The positions of `seq` tokens from `start` on."""
    return jnp.asarray(start)[..., None] + jnp.arange(seq)


def _angles(
    seq: int, frequency: Float[Array, " pairs"], start: Start
) -> Float[Array, "*rows seq pairs"]:
    """The angles of pairs at positions from `start` on, in radians."""
    return token_positions(seq, start).astype(jnp.float32)[..., None] * frequency


def _frequencies(d: int, theta: float = 10_000.0) -> Float[Array, " pairs"]:
    """`1 / theta^(2i/d)` for channel pairs `i`, in radians per token.

    **Raises:** `ValueError` (while tracing) if `d` is odd.
    """
    if d % 2:
        raise ValueError(
            f"Rotary and sinusoidal positions pair channels up; d must be even, got {d}."
        )
    return theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
