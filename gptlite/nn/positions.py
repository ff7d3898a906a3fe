"""Position encodings.

All have one call, `positions(x, offset)`, on `[*batch, seq, d]` whose first token stands at
absolute position `offset`. `Learned` and `Sinusoidal` are for the embeddings, before the first
block; `Rotary` is for queries and keys, inside attention; `NoPositions` fits both places.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

Offset = int | Int[Array, ""]


class NoPositions(eqx.Module):
    """The identity: attention's causal mask is then all that tells order (Haviv et al., 2022)."""

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offset = 0
    ) -> Float[Array, "*batch seq d"]:
        return x


class Learned(eqx.Module):
    """Adds a trained vector per position (Radford et al., 2018).

    **Raises:** `ValueError` (while tracing) if a sequence is longer than the context.
    """

    weight: Float[Array, "context d"]

    def __init__(self, context_length: int, d: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (context_length, d))

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offset = 0
    ) -> Float[Array, "*batch seq d"]:
        context, seq = len(self.weight), x.shape[-2]
        if seq > context:
            raise ValueError(
                f"Learned positions end at context_length {context}, got a sequence of {seq}."
            )
        return x + lax.dynamic_slice_in_dim(self.weight, offset, seq)


class Sinusoidal(eqx.Module):
    """Adds `sin(t / 10000^(2i/d))` to channel 2i and the cosine to 2i + 1
    (Vaswani et al., 2017, section 3.5)."""

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offset = 0
    ) -> Float[Array, "*batch seq d"]:
        angle = _angles(x.shape[-2], x.shape[-1], offset)
        table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(x.shape[-2:])
        return x + table.astype(x.dtype)


class Rotary(eqx.Module):
    """Rotates the channel pair `(i, i + d/2)` at position t by `t / 10000^(2i/d)`
    (Su et al., 2021, section 3.2, with GPT-NeoX's pairing), so that the product of a query and a
    key depends on their distance alone."""

    def __call__(
        self, x: Float[Array, "*batch seq d"], offset: Offset = 0
    ) -> Float[Array, "*batch seq d"]:
        angle = _angles(x.shape[-2], x.shape[-1], offset)
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _angles(seq: int, d: int, offset: Offset) -> Float[Array, "seq half_d"]:
    """`t / 10000^(2i/d)` for positions `t` from `offset` and channel pairs `i`, in radians.

    **Raises:** `ValueError` (while tracing) if `d` is odd.
    """
    if d % 2:
        raise ValueError(
            f"Rotary and sinusoidal positions pair channels up; d must be even, got {d}."
        )
    frequency = 10000.0 ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    position = (offset + jnp.arange(seq)).astype(jnp.float32)
    return position[:, None] * frequency
