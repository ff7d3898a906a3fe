"""The caches of layers: what is kept of earlier tokens, so that each is computed once."""

import functools
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from gptlite.nn.context import PerSequence


class KVCache(eqx.Module):
    """The keys and values of one layer's attention (Shazeer, 2019, section 2.4), with room for
    `capacity` tokens of each sequence."""

    keys: Float[Array, "*batch kv_heads capacity d_head"]
    values: Float[Array, "*batch kv_heads capacity d_head"]

    def write(
        self,
        keys: Float[Array, "*batch kv_heads seq d_head"],
        values: Float[Array, "*batch kv_heads seq d_head"],
        start: PerSequence,
    ) -> "KVCache":
        """The cache with the positions from `start` on replaced. The caller ensures that they are
        within the capacity: `start` is known only when the program runs."""
        return KVCache(
            keys=write_at(self.keys, keys, start, axis=-2),
            values=write_at(self.values, values, start, axis=-2),
        )


class Cache(eqx.Module):
    """The cache of a model: what it keeps of the tokens read so far."""

    layers: tuple[Any, ...]
    """The caches of the layers, as their `init_cache` makes them."""
    ids: Int[Array, "*batch places"]
    """The tokens, after a -1 (no token) for each earlier token that the embedding adds."""
    length: PerSequence
    """How many tokens have been read: a number for all sequences, or one for each."""


def write_at(
    array: Shaped[Array, "..."], update: Shaped[Array, "..."], start: PerSequence, axis: int
) -> Shaped[Array, "..."]:
    """`array` with `update` written along `axis` (negative) from `start` on. Where there is a start
    for each row, the rows are the leading axes."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=axis)
    for _ in start.shape:
        write = jax.vmap(write)
    return write(array, update, start)


def read_at(
    array: Shaped[Array, "..."], start: PerSequence, length: int, axis: int
) -> Shaped[Array, "..."]:
    """`length` entries of `array` along `axis`, as `write_at` writes them."""
    read = functools.partial(lax.dynamic_slice_in_dim, slice_size=length, axis=axis)
    for _ in start.shape:
        read = jax.vmap(read)
    return read(array, start)
