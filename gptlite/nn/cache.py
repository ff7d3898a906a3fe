"""What attention remembers of earlier tokens (Shazeer, 2019, section 2.4)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.nn.positions import Offset


class LayerCache(eqx.Module):
    """One layer's keys and values, with room for `capacity` positions."""

    keys: Float[Array, "rows capacity d_head"]
    values: Float[Array, "rows capacity d_head"]

    def write(
        self,
        keys: Float[Array, "rows seq d_head"],
        values: Float[Array, "rows seq d_head"],
        offset: Offset,
    ) -> "LayerCache":
        """The cache with positions `offset` to `offset + seq - 1` set. They must lie within the
        capacity; the offset is known only when the program runs, so that is the caller's duty."""
        return LayerCache(
            keys=lax.dynamic_update_slice_in_dim(self.keys, keys, offset, axis=-2),
            values=lax.dynamic_update_slice_in_dim(self.values, values, offset, axis=-2),
        )

    def take(self, sequences: Int[Array, " batch"]) -> "LayerCache":
        """As many sequences as there are, those at the places `sequences`."""
        heads = self.keys.shape[-3] // len(sequences)
        rows = (sequences[:, None] * heads + jnp.arange(heads)).reshape(-1)
        # (Stacked for a scan, a cache has an axis of layers before its rows.)
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=-3), self)


class Cache(eqx.Module):
    """All layers' caches, in the form that the stack wants them, and the tokens that they hold.

    `ids` begins with one -1 (no token) for each earlier token that the embedding looks back at.
    """

    layers: Any
    ids: Int[Array, "*batch capacity"]
    length: Int[Array, ""]
