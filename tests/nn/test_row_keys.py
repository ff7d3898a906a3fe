"""A shard's random numbers are those that one draw for all rows gives its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptlite.nn.kernels.row_keys import _high_word, row_key

KEY = jax.random.key(7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shards", [1, 2, 8])
def test_shards_draw_what_the_whole_batch_draws(dtype, shards):
    whole = jax.random.uniform(KEY, (8, 3, 5), dtype)
    draw = jax.jit(
        lambda shard: jax.random.uniform(row_key(KEY, shard, shards), (8 // shards, 3, 5), dtype)
    )
    np.testing.assert_array_equal(whole, np.concatenate([draw(i) for i in range(shards)]))


def test_keys_split_from_it_are_of_the_same_rows():
    for derive in (lambda key: jax.random.split(key)[1], lambda key: jax.random.fold_in(key, 5)):
        whole = jax.random.bernoulli(derive(KEY), 0.3, (8, 40))
        part = jax.random.bernoulli(derive(row_key(row_key(KEY, 1, 2), 1, 2)), 0.3, (2, 40))
        np.testing.assert_array_equal(whole[6:], part)


def test_places_beyond_32_bits_have_numbers_of_their_own():
    """Shard 2**15 of shards of 2**17 numbers begins where place 2**32 is; shard 0 at place 0."""
    first, other = (jax.random.bits(row_key(KEY, shard, 2**16), (2**17,)) for shard in (0, 2**15))
    assert np.mean(np.asarray(first) == np.asarray(other)) < 1e-3
    random = np.random.default_rng(0)
    shards, sizes = random.integers(2**16, size=50), random.integers(2**32, size=50)
    for shard, size in zip(shards, sizes, strict=True):
        assert int(_high_word(jnp.uint32(shard), int(size))) == int(shard) * int(size) >> 32
