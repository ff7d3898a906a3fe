"""Position encodings.

`Learned` adds to the embeddings, `[*batch, seq, d_model]`, before the first block. `Rotary` acts on
queries and keys, `[*batch, heads, seq, d_head]`, inside attention. `NoPositions` fits both places.
All are called as `positions(x, start)`, where `start` is the position of the first token: a number
for all sequences, or one for each.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.nn.context import Start
from gptlite.nn.kernels.sums import add_to_each
from gptlite.nn.variants.rotary_options import RotaryOptions


class NoPositions(eqx.Module):
    """The identity. Only the causal mask then depends on the order of tokens (Haviv et al., 2022).

    Loss against rotary: +0.121 ± 0.026 nats per token (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], start: Start = 0
    ) -> Float[Array, "*batch seq d"]:
        return x


class Learned(eqx.Module):
    """Adds a trained vector per position (Radford et al., 2018).

    **Raises:** `ValueError` (while tracing) if a sequence goes beyond the context. (Where `start`
    is an array, a position beyond it is taken for the last.)

    Loss against rotary: +0.248 ± 0.036 nats per token (benchmarks/blocks.md).
    """

    weight: Float[Array, "context d"]

    def __init__(self, context_length: int, d: int, *, std: float, key: PRNGKeyArray):
        self.weight = std * jax.random.normal(key, (context_length, d))

    def __call__(
        self, x: Float[Array, "*batch seq d"], start: Start = 0
    ) -> Float[Array, "*batch seq d"]:
        context, seq = len(self.weight), x.shape[-2]
        end = seq + (start if isinstance(start, int) else 0)
        if end > context:
            raise ValueError(
                f"Learned positions end at context_length {context}, got a sequence up to {end}."
            )
        if isinstance(start, int):  # the gradient of a slice costs less than that of a lookup
            return add_to_each(x, self.weight[start : start + seq])
        return x + self.weight[token_positions(seq, start)]


class Rotary(eqx.Module):
    """Rotates the channel pair `(i, i + d/2)` at position t by `t / theta^(2i/d)`
    (Su et al., 2021, section 3.2, with GPT-NeoX's pairing), so that the product of a query and a
    key depends on their distance alone. With the option `share`, d is that share of the channels.

    **Raises:** `UserError` (while tracing) if `d` is odd.
    """

    options: RotaryOptions = eqx.field(static=True, default=RotaryOptions())

    def __call__(
        self, x: Float[Array, "*batch heads seq d"], start: Start = 0
    ) -> Float[Array, "*batch heads seq d"]:
        frequency = self.options.frequencies(x.shape[-1])
        angle = angles(x.shape[-2], frequency, start)[..., None, :, :]  # for all heads
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        pairs = len(frequency)
        ends = [pairs, 2 * pairs] if 2 * pairs < x.shape[-1] else [pairs]
        a, b, *rest = jnp.split(x, ends, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *rest], axis=-1)


def token_positions(seq: int, start: Start) -> Int[Array, "*rows seq"]:
    """The positions of `seq` tokens from `start` on."""
    return jnp.asarray(start)[..., None] + jnp.arange(seq)


def angles(
    seq: int, frequency: Float[Array, " pairs"], start: Start
) -> Float[Array, "*rows seq pairs"]:
    """The angles of pairs at positions from `start` on, in radians."""
    return token_positions(seq, start).astype(jnp.float32)[..., None] * frequency
