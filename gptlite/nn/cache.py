"""What attention keeps of earlier tokens (Shazeer, 2019, section 2.4)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gptlite.nn.positions import Offset


class LayerCache(eqx.Module):
    """One layer's keys and values, with room for `capacity` positions. (Stacked for a scan, both
    have an axis of layers first.)"""

    keys: Float[Array, "*batch kv_heads capacity d_head"]
    values: Float[Array, "*batch kv_heads capacity d_head"]

    def write(
        self,
        keys: Float[Array, "*batch kv_heads seq d_head"],
        values: Float[Array, "*batch kv_heads seq d_head"],
        offset: Offset,
    ) -> "LayerCache":
        """The cache with positions `offset` to `offset + seq - 1` set. They must lie within the
        capacity; the offset is known only when the program runs, so that is the caller's duty."""
        return LayerCache(
            keys=lax.dynamic_update_slice_in_dim(self.keys, keys, offset, axis=-2),
            values=lax.dynamic_update_slice_in_dim(self.values, values, offset, axis=-2),
        )

    def take(self, sequences: Int[Array, " batch"]) -> "LayerCache":
        """The cache with the sequences at the places `sequences` of a single leading axis."""
        return jax.tree.map(lambda x: jnp.take(x, sequences, axis=-4), self)


class Cache(eqx.Module):
    """All layers' caches, in the form that the stack wants them, and the tokens that they hold.

    `ids` begins with one -1 (no token) for each earlier token that the embedding looks back at.
    """

    layers: Any
    ids: Int[Array, "*batch capacity"]
    length: Int[Array, ""]
