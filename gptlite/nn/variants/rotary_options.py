"""How fast rotary positions turn, and which channels."""

import math
from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.errors import require
from gptlite.machine.fields import Between, Count, Options


@dataclass(frozen=True, kw_only=True)
class RotaryOptions(Options):
    """The options of `Rotary`. A `factor` above 1 is Llama 3.1's scaling, for contexts that are
    longer than those of the training before: pairs with a wavelength of more than
    `original_context / low_frequency` tokens turn `factor` times slower, those of less than
    `original_context / high_frequency` as before, and those between them by a mean of both
    (Grattafiori et al., 2024, "The Llama 3 herd of models"; the formula is that of Meta's
    `apply_scaling`). With a `share` below 1, only so many of the channels turn, the first ones
    (Black et al., 2022, "GPT-NeoX-20B", section 2.1).

    **Raises:** `UserError` if `low_frequency` is not below `high_frequency`.
    """

    theta: Annotated[float, Between(1.0, above=True)] = 10_000.0
    factor: Annotated[float, Between(1.0)] = 1.0
    low_frequency: Annotated[float, Between(0.0, above=True)] = 1.0
    high_frequency: Annotated[float, Between(0.0, above=True)] = 4.0
    original_context: Count = 8192
    share: Annotated[float, Between(0.0, 1.0, above=True)] = 1.0

    def __post_init__(self):
        super().__post_init__()
        require(
            self.low_frequency < self.high_frequency,
            "low_frequency in model.positions rotary must be below high_frequency, got "
            f"{self.low_frequency} and {self.high_frequency}.",
        )

    def width(self, d: int) -> int:
        """How many channels turn, of a head of width `d`.

        **Raises:** `UserError` if they cannot be paired up.
        """
        turning = int(self.share * d)
        require(
            turning > 0 and turning % 2 == 0,
            f"The share in model.positions rotary, {self.share}, of the width of a head, {d}, must "
            f"be an even number of channels, got {turning}.",
        )
        return turning

    def frequencies(self, d: int) -> Float[Array, " pairs"]:
        """How fast the channel pairs of a head of width `d` turn, in radians per token."""
        frequency = frequencies(self.width(d), self.theta)
        if self.factor == 1:
            return frequency
        turns = self.original_context * frequency / (2 * math.pi)
        share = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        share = jnp.clip(share, 0.0, 1.0)
        return (1 - share) * frequency / self.factor + share * frequency


def frequencies(d: int, theta: float = RotaryOptions.theta) -> Float[Array, " pairs"]:
    """`1 / theta^(2i/d)` for channel pairs `i`, in radians per token.

    **Raises:** `ValueError` (while tracing) if `d` is odd.
    """
    if d % 2:
        raise ValueError(
            f"Rotary and sinusoidal positions pair channels up; d must be even, got {d}."
        )
    return theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
