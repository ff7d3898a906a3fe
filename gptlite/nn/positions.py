"""Position encodings.

`Learned` adds to the embeddings, `[*batch, seq, d_model]`, before the first block. `Rotary` acts on
queries and keys, `[*batch, heads, seq, d_head]`, inside attention. `NoPositions` fits both places.
All are called as `positions(x, start)`, where `start` is the position of the first token: a number
for all sequences, or one for each.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.errors import require
from gptlite.machine.fields import Between, Count, Options
from gptlite.nn.context import Start
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

    **Raises:** `ValueError` (while tracing) if a sequence goes beyond the context. (Where `start`
    is an array, a position beyond it is taken for the last.)

    Validation loss against rotary: +0.230 ± 0.011 nats per token (benchmarks/blocks.md).
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


@dataclass(frozen=True, kw_only=True)
class RotaryOptions(Options):
    """The options of `Rotary`. A `factor` above 1 is Llama 3.1's scaling, for contexts that are
    longer than those of the training before: pairs with a wavelength of more than
    `original_context / low_frequency` tokens turn `factor` times slower, those of less than
    `original_context / high_frequency` as before, and those between them by a mean of both
    (Grattafiori et al., 2024, "The Llama 3 herd of models"; the formula is that of Meta's
    `apply_scaling`).

    **Raises:** `UserError` if `low_frequency` is not below `high_frequency`.
    """

    theta: Annotated[float, Between(1.0, above=True)] = 10_000.0
    factor: Annotated[float, Between(1.0)] = 1.0
    low_frequency: Annotated[float, Between(0.0, above=True)] = 1.0
    high_frequency: Annotated[float, Between(0.0, above=True)] = 4.0
    original_context: Count = 8192

    def __post_init__(self):
        super().__post_init__()
        require(
            self.low_frequency < self.high_frequency,
            "low_frequency in model.positions rotary must be below high_frequency, got "
            f"{self.low_frequency} and {self.high_frequency}.",
        )

    def frequencies(self, d: int) -> Float[Array, " pairs"]:
        """How fast the channel pairs of a head of width `d` turn, in radians per token."""
        frequency = frequencies(d, self.theta)
        if self.factor == 1:
            return frequency
        turns = self.original_context * frequency / (2 * math.pi)
        share = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        share = jnp.clip(share, 0.0, 1.0)
        return (1 - share) * frequency / self.factor + share * frequency


class Rotary(eqx.Module):
    """Rotates the channel pair `(i, i + d/2)` at position t by `t / theta^(2i/d)`
    (Su et al., 2021, section 3.2, with GPT-NeoX's pairing), so that the product of a query and a
    key depends on their distance alone.

    **Raises:** `ValueError` (while tracing) if `d` is odd.
    """

    options: RotaryOptions = eqx.field(static=True, default=RotaryOptions())

    def __call__(
        self, x: Float[Array, "*batch heads seq d"], start: Start = 0
    ) -> Float[Array, "*batch heads seq d"]:
        frequency = self.options.frequencies(x.shape[-1])
        angle = angles(x.shape[-2], frequency, start)[..., None, :, :]  # for all heads
        cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def token_positions(seq: int, start: Start) -> Int[Array, "*rows seq"]:
    """The positions of `seq` tokens from `start` on."""
    return jnp.asarray(start)[..., None] + jnp.arange(seq)


def angles(
    seq: int, frequency: Float[Array, " pairs"], start: Start
) -> Float[Array, "*rows seq pairs"]:
    """The angles of pairs at positions from `start` on, in radians."""
    return token_positions(seq, start).astype(jnp.float32)[..., None] * frequency


def frequencies(d: int, theta: float = RotaryOptions.theta) -> Float[Array, " pairs"]:
    """`1 / theta^(2i/d)` for channel pairs `i`, in radians per token.

    **Raises:** `ValueError` (while tracing) if `d` is odd.
    """
    if d % 2:
        raise ValueError(
            f"Rotary and sinusoidal positions pair channels up; d must be even, got {d}."
        )
    return theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
