"""Random numbers for some rows of a batch. The reference: the rows of one draw for all."""

import math

import jax
import jax.extend
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PRNGKeyArray, Shaped, UInt, UInt32

THREEFRY = jax.extend.random.threefry_prng_impl


def row_key(key: PRNGKeyArray, shard: ArrayLike, shards: int) -> PRNGKeyArray:
    """A key for the rows of shard number `shard`, when the rows that `key` is for are cut into so
    many equal shards, one after the other.

    What is drawn with it, in the shape `[rows of a shard, ...]`, is that shard's part of what `key`
    draws in the shape `[rows of all shards, ...]`. The same holds for keys that are split from it.
    So dropout does not depend on the number of devices, or of parts of a batch.

    `key` must be one of these, or one of Threefry with `jax_threefry_partitionable`: JAX's default.
    """
    threefry, outer = jnp.split(jax.random.key_data(key), [2])
    place = (outer if outer.size else jnp.zeros(1, jnp.uint32)) * jnp.uint32(shards)
    data = jnp.concatenate([threefry, place + jnp.asarray(shard, jnp.uint32)])
    return jax.random.wrap_key_data(data, impl=_ROWS)


def _random_bits(
    key: UInt32[Array, "3"], bit_width: int, shape: tuple[int, ...]
) -> UInt[Array, "*shape"]:
    # Threefry enciphers the place of a number in the array, as two words. The places of this shard
    # follow those of the shards before it.
    size = math.prod(shape)
    first = key[2] * jnp.uint32(size)
    low = first + jax.lax.iota(jnp.uint32, size)
    # A shard of a batch has fewer than 2³² numbers, all shards together may have more.
    high = _high_word(key[2], size) + (low < first)
    a, b = jax.extend.random.threefry2x32_p.bind(key[0], key[1], high, low)
    if bit_width == 64:
        bits = a.astype(jnp.uint64) << 32 | b.astype(jnp.uint64)
    else:
        bits = (a ^ b).astype(f"uint{bit_width}")
    return bits.reshape(shape)


def _high_word(shard: UInt32[Array, ""], size: int) -> UInt32[Array, ""]:
    """The higher 32 bits of `shard * size`, both below 2³² and shard below 2¹⁶."""
    high, low = divmod(size, 2**16)
    return (shard * jnp.uint32(high) + (shard * jnp.uint32(low) >> 16)) >> 16


def _with_shard(data: Shaped[Array, "*shape 2"], key: UInt32[Array, "3"]) -> Array:
    return jnp.concatenate([data, jnp.broadcast_to(key[2:], (*data.shape[:-1], 1))], axis=-1)


_ROWS = jax.extend.random.define_prng_impl(
    key_shape=(3,),
    seed=lambda seed: jnp.append(THREEFRY.seed(seed), jnp.uint32(0)),
    split=lambda key, shape: _with_shard(THREEFRY.split(key[:2], shape), key),
    random_bits=_random_bits,
    fold_in=lambda key, data: _with_shard(THREEFRY.fold_in(key[:2], data), key),
    name="rows",
    tag="row",
)
