import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention
from jaxtyping import TypeCheckError

from gptlite.nn import (
    ALiBi,
    Attention,
    Context,
    Heads,
    Linear,
    RelativeBias,
    Rotary,
    attend,
    causal_mask,
)
from gptlite.nn.kernels import fused_attention, query_blocks
from gptlite.nn.kernels.decoding import rearranged
from gptlite.nn.kernels.joined import joined_layer
from gptlite.research.seeds import seeds_mesh

CAUSAL = {"is_causal": True}

# Compiled as one program: operation by operation takes longer.
call = eqx.filter_jit(lambda module, *arguments: module(*arguments))


@eqx.filter_jit
def one_head(q, k, v, **options: Any):
    """`attend` for `[batch, seq, d_head]`."""
    return attend(q[:, None], k[:, None], v[:, None], **options)[:, 0]


@eqx.filter_jit
def three_heads(q, k, v, **options):
    """`attend` for `[heads, seq, d_head]`."""
    return attend(q[None], k[None], v[None], **options)[0]


@pytest.fixture
def cudnn(monkeypatch):
    """What is handed to cuDNN, computed by XLA."""
    jaxs = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        assert implementation == "cudnn"
        return jaxs(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    monkeypatch.setattr(fused_attention, "targets_nvidia", lambda: True)
    monkeypatch.setattr(fused_attention, "is_mesh_set", lambda: True)


@pytest.fixture
def splash(monkeypatch):
    """A TPU's kernel, interpreted on a CPU."""
    make = splash_attention.make_splash_mha_single_device
    interpreted = functools.partial(make, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", interpreted)
    monkeypatch.setattr(fused_attention, "targets_tpu", lambda: True)
    monkeypatch.setattr(fused_attention, "is_mesh_set", lambda: True)


def reference(query, key, value, offset=0):
    """softmax(Q Kᵀ / sqrt(d)) V in float64, one query at a time, over the keys it may see."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros((*query.shape[:-1], value.shape[-1]))
    for row in range(query.shape[0]):
        for i in range(query.shape[1]):
            seen = offset + i + 1
            scores = key[row, :seen] @ query[row, i] / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max())
            out[row, i] = (weights / weights.sum()) @ value[row, :seen]
    return out


def random_qkv(queries, keys, scale=1.0):
    random = np.random.default_rng(0)
    shapes = [(3, queries, 8), (3, keys, 8), (3, keys, 8)]
    return [jnp.asarray((scale * random.normal(size=x)).astype(np.float32)) for x in shapes]


@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(9, 9, 0), (1, 9, 0), (1, 9, 8), (4, 9, 3)]
)
def test_attention_is_the_formula(queries, keys, offset):
    q, k, v = random_qkv(queries, keys)
    out = one_head(q, k, v, mask=causal_mask(queries, keys, offset))
    # 1e-5: float32 sums of 8 to 9 terms of size 1, against float64.
    np.testing.assert_allclose(out, reference(q, k, v, offset), rtol=1e-5, atol=1e-5)
    if queries == keys:
        np.testing.assert_array_equal(out, one_head(q, k, v, **CAUSAL))


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(257, 257, None), (300, 320, 70), (1200, 1100, None)]
)
def test_blocks_of_queries_change_nothing(queries, keys, window, kv_heads, monkeypatch):
    """Value and gradients of long sequences, with a bias and a mask, in several blocks and in one.
    More keys than queries, and fewer."""
    q, k, v = random_qkv(queries, keys)
    k, v = k[:kv_heads], v[:kv_heads]
    bias, mask = jax.random.normal(jax.random.key(1), (2, 3, queries, keys))
    mask = mask.at[..., 0].set(1.0) > 0  # so that the first query sees a key

    def value_and_gradients():
        def loss(*arrays):
            *qkv, bias = arrays
            out = three_heads(*qkv, bias=bias, mask=mask[None, 0], is_causal=True, window=window)
            return jnp.sum(jnp.sin(out)), out

        gradient = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
        return jax.jit(gradient)(q, k, v, bias)

    blocks = value_and_gradients()
    monkeypatch.setattr(query_blocks, "BLOCK", 10_000)
    whole = value_and_gradients()
    for x, y in zip(jax.tree.leaves(blocks), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_blocks_may_have_no_key_to_see():
    """With a window, and far fewer keys than queries: those from 369 on see none."""
    q, k, v = random_qkv(1200, 300)
    out = one_head(q, k, v, is_causal=True, window=70)
    masked = one_head(q, k, v, mask=causal_mask(1200, 300, 0, window=70))
    np.testing.assert_allclose(out[:, :369], masked[:, :369], rtol=1e-5, atol=1e-5)
    assert jnp.isfinite(out).all()


def test_large_scores_neither_overflow_nor_lose_the_sum():
    q, k, v = random_qkv(6, 6, scale=40.0)
    out = one_head(q, k, v, **CAUSAL)
    # Scores reach 5,000, and float32 holds those to 5e-4: an error that the exponential passes on.
    np.testing.assert_allclose(out, reference(q, k, v), rtol=5e-3, atol=5e-2)


def test_each_row_may_start_somewhere_else():
    q, k, v = random_qkv(2, 9)
    starts = jnp.array([0, 4, 7])
    masked = functools.partial(one_head, mask=causal_mask(2, 9, starts))
    out = jax.jit(masked)(q, k, v)
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        alone = reference(q[one], k[one], v[one], int(start))
        np.testing.assert_allclose(out[row], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [CAUSAL, CAUSAL | {"window": 1}, CAUSAL | {"window": 4}, {}], ids=str
)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_cudnn_is_asked_for_the_same_in_value_and_gradients(mask, kv_heads, cudnn):
    assert_as_without_a_kernel(4, kv_heads, 10, **mask)


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL | {"window": 60}, {}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_splash_attention_is_the_same_in_value_and_gradients(mask, kv_heads, splash):
    assert_as_without_a_kernel(2, kv_heads, 256, **mask)


@pytest.mark.parametrize(("kernel", "seq"), [("cudnn", 10), ("splash", 256)])
@pytest.mark.parametrize("window", [None, 4])
def test_kernels_keep_documents_apart(kernel, seq, window, request):
    request.getfixturevalue(kernel)
    starts = jnp.stack([jnp.arange(seq) // 3 * 3, jnp.where(jnp.arange(seq) < 7, 0, 7)])
    assert_as_without_a_kernel(2, 1, seq, **CAUSAL, window=window, starts=starts)


def test_a_sweep_on_several_tpus_has_no_kernel(splash, monkeypatch):
    """Mosaic's kernels are not divided among devices by the compiler."""
    x = jnp.ones((2, 1, 2, 128, 8), jnp.bfloat16)
    sweep = jax.jit(jax.vmap(lambda x: attend(x, x, x, is_causal=True)))
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", None)
    with jax.set_mesh(seeds_mesh(1)), pytest.raises(TypeError, match="not callable"):
        sweep(x)
    with jax.set_mesh(seeds_mesh(2)):
        assert jnp.all(sweep(x) == 1)


def assert_as_without_a_kernel(heads, kv_heads, seq, **mask):
    random = np.random.default_rng(0)
    shapes = [(2, heads, seq, 8), (2, kv_heads, seq, 8), (2, kv_heads, seq, 8)]
    half = [jnp.asarray(random.normal(size=shape).astype(jnp.bfloat16)) for shape in shapes]

    @jax.jit
    def value_and_gradients(*args):
        def loss(args):
            out = attend(*args, **mask).astype(jnp.float32)
            return jnp.sum(jnp.sin(out)), out

        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(args)
        return out, *grads

    ours = value_and_gradients(*half)
    exact = value_and_gradients(*(x.astype(jnp.float32) for x in half))  # by no kernel
    for x, y in zip(ours, exact, strict=True):
        # 8 bits a number, some roundings deep. (Under a window of 1, queries have no gradient.)
        assert np.linalg.norm(np.float32(x) - y) < 0.02 * np.linalg.norm(y) + 1e-3


def test_without_a_mesh_a_kernel_is_taken_where_the_arrays_are(cudnn, monkeypatch):
    """The default device is a GPU, so that `jit(model)(ids)` has its kernel there; and arrays that
    were put on the CPU have none."""
    monkeypatch.setattr(fused_attention, "is_mesh_set", lambda: False)
    monkeypatch.setattr(fused_attention, "_cudnn", lambda query, *_: jnp.full_like(query, 7))
    q, k, v = (x[:, None].astype(jnp.bfloat16) for x in random_qkv(10, 10))
    attention = jax.jit(lambda *qkv: attend(*qkv, **CAUSAL))
    for platform, kernel in (("cuda", True), ("cpu", False)):
        lowered = attention.trace(q, k, v).lower(lowering_platforms=(platform,))
        assert ("dense<7.0" in lowered.as_text()) == kernel
    exact = one_head(*(np.float32(x[:, 0]) for x in (q, k, v)), **CAUSAL)
    np.testing.assert_allclose(np.float32(attention(q, k, v)[:, 0]), exact, atol=0.03)


def test_a_document_is_as_if_it_were_alone():
    q, k, v = random_qkv(9, 9)
    starts = jnp.tile(jnp.array([0, 0, 2, 2, 2, 2, 2, 7, 7]), (3, 1))
    out = one_head(q, k, v, **CAUSAL, starts=starts)
    for own in (slice(0, 2), slice(2, 7), slice(7, 9)):
        alone = reference(q[:, own], k[:, own], v[:, own])
        np.testing.assert_allclose(out[:, own], alone, rtol=1e-5, atol=1e-5)


def test_a_kernel_is_only_for_what_it_can_do(cudnn, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", None)

    def choose(queries: Any = slice(None), keys: Any = slice(None), **options: Any):
        """Traced anew, which is when a kernel is chosen."""
        q, k, v = (x[:, None].astype(jnp.bfloat16) for x in random_qkv(10, 10))
        q, k, v = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        eqx.filter_eval_shape(lambda *qkv: attend(*qkv, **options), q, k, v)

    with pytest.raises(TypeError, match="not callable"):
        choose(**CAUSAL)
    for options in (
        {"mask": jnp.ones((3, 1, 10, 10), bool)},
        {"bias": ALiBi(1)(10, 10, 0)},
        {"dropout": 0.1, "dropout_key": jax.random.key(0)},
    ):
        choose(**options)
    choose(slice(-1, None))
    choose(slice(1, None), slice(1, None), **CAUSAL)  # an odd length has no gradient
    starts = jnp.zeros((3, 10), jnp.int32)
    with jax.set_mesh(seeds_mesh(1)):  # a mask is not mapped over seeds
        choose(**CAUSAL, starts=starts)


def test_bfloat16_stays_near_float32():
    q, k, v = random_qkv(9, 9)
    out = one_head(*(x.astype(jnp.bfloat16) for x in (q, k, v)), **CAUSAL)
    assert out.dtype == jnp.bfloat16
    # bfloat16 holds 8 bits: 2^-8 of values of size 1, some roundings deep.
    np.testing.assert_allclose(out.astype(jnp.float32), reference(q, k, v), atol=0.05)


def test_dropout_on_weights_keeps_the_mean_and_needs_a_key():
    q, k, v = random_qkv(5, 5)
    plain = one_head(q, k, v, dropout=0.5)
    np.testing.assert_array_equal(plain, one_head(q, k, v))
    many = jax.vmap(lambda key: one_head(q, k, v, dropout=0.5, dropout_key=key))(
        jax.random.split(jax.random.key(1), 4000)
    )
    assert not np.allclose(many[0], many[1])
    # Standard error of the mean of 4,000 draws of size about 1.
    np.testing.assert_allclose(many.mean(0), plain, atol=6 / np.sqrt(4000))


def heads(d_model=16, n_heads=4, **options) -> Heads:
    make = functools.partial(Heads, d_model, n_heads, std=0.5, output_std=0.5, **options)
    return eqx.filter_jit(lambda key: make(key=key))(jax.random.key(0))


def attention(**options) -> Attention:
    return Attention(heads(**options), Rotary())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_multi_head_attention_is_its_parts(qk_norm):
    module = attention(qk_norm=qk_norm, qkv_bias=True, output_bias=True)
    x = jax.random.normal(jax.random.key(1), (6, 16))
    out, cache = call(module, x)
    assert cache is None

    def split(linear):
        y = np.asarray(x, np.float64) @ np.asarray(linear.weight).T + np.asarray(linear.bias)
        return y.reshape(6, 4, 4).transpose(1, 0, 2)

    def rotate(y):
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) if qk_norm else y
        angle = np.arange(6)[:, None] / 10000 ** (np.arange(2) / 2)
        a, b = y[..., :2], y[..., 2:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    h = module.heads
    mixed = reference(rotate(split(h.query)), rotate(split(h.key)), split(h.value))
    expected = mixed.transpose(1, 0, 2).reshape(6, 16) @ np.asarray(h.output.weight).T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_a_custom_query_projection_is_called():
    class Doubled(Linear):
        def __init__(self, key):
            super().__init__(16, 16, std=0.5, key=key)

        def __call__(self, x):
            return 2 * super().__call__(x)

    plain = attention()
    doubled = Doubled(jax.random.key(9))
    twice = eqx.tree_at(lambda a: a.heads.query, plain, doubled)
    weighted = eqx.tree_at(lambda a: a.heads.query.weight, plain, 2 * doubled.weight)
    x = jax.random.normal(jax.random.key(1), (6, 16))
    np.testing.assert_allclose(call(twice, x)[0], call(weighted, x)[0], rtol=1e-5, atol=1e-5)
    layers = (twice.heads.query, twice.heads.key, twice.heads.value)
    assert joined_layer(layers) is None


@pytest.mark.parametrize("bias", [False, True])
def test_joined_projections_give_what_each_gives(bias):
    apart = heads(n_kv_heads=2, qkv_bias=bias)
    if bias:
        apart = eqx.tree_at(lambda h: h.key.bias, apart, jnp.arange(8.0))
    x = jax.random.normal(jax.random.key(1), (6, 16))
    wanted = apart.qkv(x, fused=False)
    for joined in (
        apart.qkv(x, fused=True),
        rearranged(Attention(apart), False).heads.qkv(x, fused=False),
    ):
        for ours, one in zip(joined, wanted, strict=True):
            np.testing.assert_allclose(ours, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 3])
def test_a_cache_read_in_two_parts_equals_one_whole(first):
    module = attention()
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    whole, _ = call(module, x)
    cache = module.init_cache((2,), 10, jnp.float32)
    a, cache = call(module, x[:, :first], cache, Context(start=jnp.asarray(0)))
    b, cache = call(module, x[:, first:], cache, Context(start=jnp.asarray(first)))
    np.testing.assert_allclose(jnp.concatenate([a, b], 1), whole, rtol=1e-5, atol=1e-5)


def reference_with(query, key, value, *, bias=None, window=None):
    """The formula in float64, with what may be added to it: `bias[i, j]`, and a window."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(query.shape)
    for row, i in np.ndindex(query.shape[:2]):
        seen = [j for j in range(i + 1) if window is None or i - j < window]
        scores = key[row, seen] @ query[row, i] / np.sqrt(query.shape[-1])
        if bias is not None:
            scores = scores + bias[row, i, seen]
        weights = np.exp(scores - scores.max())
        out[row, i] = (weights / weights.sum()) @ value[row, seen]
    return out


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9), (9, 4), (1, 9)])
def test_bidirectional_every_query_sees_every_key(queries, keys):
    q, k, v = (np.asarray(x, np.float64) for x in random_qkv(queries, keys))
    weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(8))
    out = one_head(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(
        out, weights / weights.sum(-1, keepdims=True) @ v, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("n_kv_heads", [2, 4])
def test_the_output_is_weights_times_values(n_kv_heads):
    """With a cache, a mask, padding and shared keys."""
    layer = Attention(heads(n_kv_heads=n_kv_heads, qk_norm=True), Rotary(), window=3)
    x = jax.random.normal(jax.random.key(1), (2, 5, 16))
    cache = layer.init_cache((2,), 8, jnp.float32)
    given = cache, Context(start=jnp.array([0, 2]))
    weights = np.asarray(eqx.filter_jit(Attention.weights)(layer, x, *given))
    assert weights.shape == (2, 4, 5, 8)
    out, cache = call(layer, x, *given)
    assert cache is not None
    values = np.asarray(cache.values).reshape(2, n_kv_heads, 8, 4)
    joined = (weights @ values.repeat(4 // n_kv_heads, axis=1)).swapaxes(1, 2).reshape(2, 5, 16)
    wanted = joined @ np.asarray(layer.heads.output.weight).T
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


def test_relative_bias_bidirectional_has_half_of_the_buckets_for_each():
    """Raffel et al.'s relative_position_bucket(bidirectional=True), in Python."""
    module = RelativeBias(2, bidirectional=True, key=jax.random.key(0))

    def bucket(back):
        if abs(back) < 8:
            place = abs(back)
        else:
            place = min(15, 8 + int(np.log(abs(back) / 8) / np.log(128 / 8) * 8))
        return place + 16 * (back < 0)

    wanted = np.array([[bucket(i - j) for j in range(200)] for i in range(200)])
    found, table = call(module, 200, 200, 0), np.asarray(module.table.weight)
    np.testing.assert_allclose(found, np.moveaxis(table[wanted], -1, 0))


@pytest.mark.parametrize("window", [1, 4])
def test_a_sliding_window_sees_so_many(window):
    q, k, v = random_qkv(9, 9)
    out = one_head(q, k, v, **CAUSAL, window=window)
    np.testing.assert_allclose(out, reference_with(q, k, v, window=window), rtol=1e-5, atol=1e-5)


def test_alibi_takes_off_by_distance():
    # Press et al., 2022: for 8 heads 1/2, 1/4, ... 1/256; for 3 heads 2^(-8/3), ...
    q, k, v = random_qkv(9, 9)
    distance = np.arange(9)[:, None] - np.arange(9)
    bias = -(2.0 ** (-8 * np.arange(1, 4) / 3))[:, None, None] * distance
    out = three_heads(q, k, v, bias=call(ALiBi(3), 9, 9, 0), **CAUSAL)
    np.testing.assert_allclose(out, reference_with(q, k, v, bias=bias), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.asarray(call(ALiBi(8), 2, 2, 0))[:, 1, 0], -(0.5 ** np.arange(1, 9))
    )


def test_relative_bias_is_t5s_table():
    module = RelativeBias(3, key=jax.random.key(0))
    table = np.asarray(module.table.weight)
    found = np.asarray(call(module, 1, 400, jnp.asarray(399)))[:, 0]
    for distance in range(400):
        bucket = distance
        if distance >= 16:  # Raffel et al., 2020: logarithmic up to 128, one for all beyond
            bucket = min(31, 16 + int(np.log(distance / 16) / np.log(128 / 16) * 16))
        np.testing.assert_array_equal(found[:, 399 - distance], table[bucket], str(distance))


def test_grouped_queries_share_keys_and_values():
    grouped = attention(n_kv_heads=2, qkv_bias=True)
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    assert grouped.heads.key.weight.shape == (8, 16)
    assert grouped.init_cache((2,), 6, x.dtype).keys.shape == (2, 2, 6, 4)

    h = grouped.heads

    def repeated(layer):  # heads 0 and 1 are given the first, 2 and 3 the second
        weight = np.asarray(layer.weight).reshape(2, 4, 16).repeat(2, axis=0).reshape(16, 16)
        bias = np.asarray(layer.bias).reshape(2, 4).repeat(2, axis=0).reshape(16)
        twice = jnp.asarray(weight), jnp.asarray(bias)
        return eqx.tree_at(lambda it: (it.weight, it.bias), layer, twice)

    whole = eqx.tree_at(
        lambda a: (a.query, a.key, a.value, a.output),
        heads(qkv_bias=True),
        (h.query, repeated(h.key), repeated(h.value), h.output),
    )
    whole = Attention(whole, Rotary())
    np.testing.assert_allclose(call(grouped, x)[0], call(whole, x)[0], rtol=1e-5, atol=1e-5)


def test_an_encoder_does_not_see_padding():
    layer = Attention(heads(), Rotary(), causal=False)
    x = jax.random.normal(jax.random.key(1), (3, 6, 16))
    out, _ = call(layer, x, None, Context(lengths=jnp.array([6, 4, 4])))
    for row, length in enumerate((6, 4, 4)):
        alone, _ = call(layer, x[row, :length])
        np.testing.assert_allclose(out[row, :length], alone, rtol=1e-5, atol=1e-5)


class Bare(eqx.Module):
    function: Callable
    bias: None = None

    def __call__(self, x):
        return self.function(x)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="multiple of n_heads, got 16 and 3"):
        heads(16, 3)
    with pytest.raises(ValueError, match="multiple of n_kv_heads, got 4 and 3"):
        heads(n_kv_heads=3)


def test_an_odd_head_cannot_rotate():
    module = Attention(heads(6, 2), Rotary())
    with pytest.raises(ValueError, match="an even number of channels, got 3"):
        module(jnp.zeros((2, 6)))


def test_attention_that_is_not_causal_has_no_cache():
    module = Attention(heads(), causal=False)
    cache = module.init_cache((), 4, jnp.float32)
    with pytest.raises(ValueError, match="not causal has no cache"):
        module(jnp.zeros((2, 16)), cache)


def test_a_wrong_width_names_function_argument_and_axes():
    with pytest.raises(TypeCheckError) as error:
        attend(*(jnp.zeros((1, 2, 3, d)) for d in (8, 9, 8)))
    for words in (
        "gptlite.nn.dot_product.attend",
        "'key'",
        "batch kv_heads keys d_head",
        "d_head=8",
    ):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("buckets", "max_distance", "bidirectional"), [(1, 9, False), (3, 9, True), (8, 4, False)]
)
def test_relative_positions_without_room_for_large_distances_are_refused(
    buckets, max_distance, bidirectional
):
    options = {"max_distance": max_distance, "bidirectional": bidirectional}
    with pytest.raises(ValueError, match=f"got {buckets} and {max_distance}"):
        RelativeBias(2, buckets=buckets, **options, key=jax.random.key(0))


def test_two_buckets_are_near_and_far():
    bias = RelativeBias(1, buckets=2, max_distance=9, key=jax.random.key(0))
    row = np.asarray(call(bias, 1, 8, 7))[0, 0]
    near, far = np.asarray(bias.table.weight)[:, 0]
    np.testing.assert_allclose(row, [far] * 7 + [near], rtol=1e-6)
