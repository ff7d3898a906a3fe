"""What every layer is told besides its input."""

import equinox as eqx
from jaxtyping import Array, Float, Int

# A number for all sequences of a batch, or one for each.
Rows = Int[Array, "..."]
# A plain int is known while JAX traces: 0 stands for whole sequences.
Start = int | Rows


class Context(eqx.Module):
    """What every layer is told besides its input. The default is a whole sequence, all of it real.

    One object for all, so that a new kind of layer adds a field here, and no argument to the layers
    that do not need it.
    """

    start: Start = 0
    """The position of the input's first token: as many tokens are in the cache."""
    lengths: Rows | None = None
    """How many of the input's tokens are real. Padding stands behind them. None: all."""
    first_values: Float[Array, "*batch seq d"] | None = None
    """The first layer's values, for `ValueResidual`."""
    memory: Float[Array, "*batch keys d_model"] | None = None
    """An encoder's output, for `CrossAttention`."""
    memory_lengths: Rows | None = None
    """How many of the encoder's tokens are real. None: all."""


WHOLE_SEQUENCE = Context()
