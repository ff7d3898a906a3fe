"""The context that all layers are given with their input."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

# A number for all sequences of a batch, or one for each.
PerSequence = Int[Array | np.ndarray, "..."]
# A plain int is known while JAX traces: 0 means whole sequences.
Start = int | PerSequence


class Context(eqx.Module):
    """Facts about a layer's input. Default: a whole sequence without padding.

    It is one object: a new kind of layer adds a field here, and no argument to all other layers.
    """

    start: Start = 0
    """The position of the input's first token, which is the number of tokens in the cache."""
    lengths: PerSequence | None = None
    """How many of the input's tokens are real; padding follows them. None: all."""
    document_starts: Int[Array, "*batch seq"] | None = None
    """For each token of the input, the position of the first token of its document. None: 0."""
    memory: Float[Array, "*batch keys d_model"] | None = None
    """An encoder's output, for `CrossAttention`."""
    memory_lengths: PerSequence | None = None
    """How many of the encoder's tokens are real. None: all."""


WHOLE_SEQUENCE = Context()


def document_starts(ids: Int[Array, "*batch seq"], separator: int) -> Int[Array, "*batch seq"]:
    """For each token, the position of the first token of its document. A document begins with
    `separator`, or where the sequence does."""
    begins = jnp.where(ids == separator, jnp.arange(ids.shape[-1]), 0)
    return lax.cummax(begins, axis=ids.ndim - 1)
