"""Linear, norms, positions, MLPs, stack: each against its formula or a second implementation."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from hypothesis import given, strategies as st
from jax.scipy.special import erf

from gptlite.errors import UserError
from gptlite.machine.pytrees import cast
from gptlite.models.build import make_part
from gptlite.nn import (
    MLP,
    Attention,
    Block,
    DyT,
    Embedding,
    GatedMLP,
    Heads,
    LayerNorm,
    Learned,
    Linear,
    MoE,
    NoPositions,
    ParallelBlock,
    PostNorm,
    PreNorm,
    RMSNorm,
    Rotary,
    RotaryOptions,
    SandwichNorm,
    Sinusoidal,
    Stack,
)
from gptlite.nn.kernels.transposed import TransposedLinear
from gptlite.nn.mlp import ACTIVATIONS

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 5, 8))


# Compiled as one program: operation by operation takes longer.
call = eqx.filter_jit(lambda module, *arguments: module(*arguments))


@eqx.filter_jit
def each_token(layer, x):
    return jax.vmap(jax.vmap(layer))(x)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_matches_equinox(bias):
    ours = Linear(8, 3, std=1.0, bias=bias, key=KEY)
    if bias:
        ours = eqx.tree_at(lambda layer: layer.bias, ours, jnp.arange(3.0))
    theirs = eqx.nn.Linear(8, 3, use_bias=bias, key=KEY)
    theirs = eqx.tree_at(lambda layer: layer.weight, theirs, ours.weight)
    if bias:
        theirs = eqx.tree_at(lambda layer: layer.bias, theirs, ours.bias)
    out = call(ours, X)
    np.testing.assert_allclose(out, each_token(theirs, X), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(call(ours, X[0, 0]), out[0, 0], rtol=1e-5, atol=1e-5)
    transposed = TransposedLinear(ours)
    np.testing.assert_array_equal(transposed.weight, ours.weight)
    np.testing.assert_allclose(call(transposed, X), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RMSNorm(8), eqx.nn.RMSNorm(8, eps=1e-6, use_bias=False)),
        (RMSNorm(8, use_weight=False), eqx.nn.RMSNorm(8, 1e-6, False, False)),
        (LayerNorm(8), eqx.nn.LayerNorm(8)),
        (LayerNorm(8, bias=False), eqx.nn.LayerNorm(8, use_bias=False)),
    ],
)
def test_norms_and_their_gradients_match_equinox(ours, theirs):
    """The gradients are by hand here, and by JAX there. In float64; in bfloat16, to the rounding of
    the input, the weights and the result."""

    def gradients(layer, x, weights, dtype, apply):
        leaves, structure = jax.tree.flatten(eqx.filter(layer, eqx.is_inexact_array))
        drawn = [
            jax.random.normal(jax.random.key(i), (8,), jnp.float32) for i in range(len(leaves))
        ]
        layer = eqx.combine(jax.tree.unflatten(structure, drawn), layer)

        def total(arguments):
            layer, x = cast(arguments, dtype)
            return jnp.sum(weights * apply(layer, x))

        found = eqx.filter_jit(eqx.filter_value_and_grad(total))((layer, x))
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]

    x, weights = 3 + X, jax.random.normal(jax.random.key(2), X.shape)
    with jax.enable_x64(True):
        exact = gradients(theirs, x, weights, jnp.float64, each_token)
        found = gradients(ours, x, weights, jnp.float64, lambda layer, x: layer(x))
    for y, expected in zip(found, exact, strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)
    rounded = gradients(ours, x, weights, jnp.bfloat16, lambda layer, x: layer(x))
    for y, expected in zip(rounded[1:], exact[1:], strict=True):
        assert np.linalg.norm(y - expected) < 0.03 * np.linalg.norm(expected)


def test_the_gradient_of_learned_positions_is_a_sum_over_sequences():
    layer, weights = Learned(9, 8, std=1.0, key=KEY), jax.random.normal(KEY, X.shape)
    total = eqx.filter_grad(lambda layer: jnp.sum(weights * layer(X, 2)))
    gradient = eqx.filter_jit(total)(layer)
    expected = np.zeros((9, 8), np.float32)
    expected[2:7] = np.asarray(weights).sum(0)
    np.testing.assert_allclose(gradient.weight, expected, rtol=1e-6, atol=1e-6)


def test_linear_draws_the_standard_deviation_asked_for():
    weight = Linear(200, 300, std=0.3, key=KEY).weight
    np.testing.assert_allclose(weight.std(), 0.3, rtol=0.02)
    assert not Linear(4, 4, std=0.0, key=KEY).weight.any()


def test_embedding_takes_rows():
    table = Embedding(6, 3, std=1.0, key=KEY)
    row = np.asarray(table.weight)[2]
    np.testing.assert_array_equal(call(table, jnp.array([[5, 0], [2, 2]]))[1, 0], row)
    np.testing.assert_array_equal(call(table, jnp.array([-1, 2])), [[0, 0, 0], row])


def test_the_gradient_of_an_embedding_is_added_up_in_float32():
    table = cast(Embedding(2, 3, key=KEY), jnp.bfloat16)
    total = eqx.filter_grad(lambda table: jnp.sum(table(jnp.zeros(1000, int))))
    grads = eqx.filter_jit(total)(table)
    assert grads.weight.dtype == jnp.bfloat16
    # In bfloat16, 256 + 1 is 256.
    np.testing.assert_array_equal(grads.weight, [[1000] * 3, [0] * 3])


def test_rms_norm_matches_equinox():
    ours, theirs = RMSNorm(8), eqx.nn.RMSNorm(8, eps=1e-6, use_bias=False)
    gain = jnp.arange(8.0)
    ours = eqx.tree_at(lambda n: n.weight, ours, gain)
    theirs = eqx.tree_at(lambda n: n.weight, theirs, gain)
    np.testing.assert_allclose(call(ours, X), each_token(theirs, X), rtol=1e-5, atol=1e-6)
    bare = np.asarray(call(RMSNorm(8, use_weight=False), X))
    np.testing.assert_allclose(np.mean(bare**2, -1), 1.0, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_matches_equinox(bias):
    ours, theirs = LayerNorm(8, bias=bias), eqx.nn.LayerNorm(8, use_bias=bias)
    ours = eqx.tree_at(lambda n: n.weight, ours, jnp.arange(8.0))
    theirs = eqx.tree_at(lambda n: n.weight, theirs, jnp.arange(8.0))
    if bias:
        ours = eqx.tree_at(lambda n: n.bias, ours, jnp.arange(8.0))
        theirs = eqx.tree_at(lambda n: n.bias, theirs, jnp.arange(8.0))
    np.testing.assert_allclose(call(ours, X), each_token(theirs, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [RMSNorm(8), LayerNorm(8)])
def test_norms_keep_half_precision_from_overflowing(norm):
    large = jnp.full((8,), 300.0, jnp.float16).at[0].set(-300.0)
    out, wide = call(norm, large), call(norm, large.astype(jnp.float32))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(np.float32(out), wide, rtol=2e-3)


VECTORS = {d: jax.random.normal(KEY, (2, 1, 1, d)) for d in (2, 8, 16)}


@jax.jit
def rotated_product(q, k, at, distance):
    return jnp.vdot(Rotary()(q, at + distance), Rotary()(k, at))


@given(
    start=st.integers(0, 500),
    distance=st.integers(0, 20),
    d=st.sampled_from(list(VECTORS)),
)
def test_rotary_products_depend_on_distance_alone(start, distance, d):
    found, wanted = (rotated_product(*VECTORS[d], at, distance) for at in (start, 0))
    # Angles up to 520 radians in float32 are right to 3e-5.
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_rotary_keeps_lengths_and_leaves_position_0():
    out = np.asarray(call(Rotary(), X))
    np.testing.assert_allclose(np.linalg.norm(out, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(out[:, 0], X[:, 0])


def test_rotary_turns_a_share_of_the_channels():
    """As if the others were not there."""
    wanted = call(Rotary(), X[..., :4])
    got = call(Rotary(RotaryOptions(share=4.1 / X.shape[-1])), X)
    np.testing.assert_allclose(got[..., :4], wanted, rtol=1e-6)
    np.testing.assert_array_equal(got[..., 4:], X[..., 4:])
    config = dataclasses.replace(TINY, positions="rotary:share=0.2")  # of 8
    with pytest.raises(UserError, match=r"0\.2, of the width of a head, 8, .* channels, got 1\."):
        make_part("positions", config, jax.random.key(0))


def test_rotary_turns_pairs_by_theta_and_llama_3s_scaling():
    """With 32 tokens of context before: pairs with wavelengths of more than 32 / 1 and less than
    32 / 4 tokens, and one between them."""
    d, theta, factor, low, high, context = 8, 50.0, 4.0, 1.0, 4.0, 32
    x = np.random.default_rng(0).normal(size=(1, 20, d))
    options = RotaryOptions(
        theta=theta,
        factor=factor,
        low_frequency=low,
        high_frequency=high,
        original_context=context,
    )
    layer = Rotary(options)
    out = np.asarray(call(layer, jnp.asarray(x, jnp.float32)))
    kinds = []
    for pair in range(d // 2):
        frequency = theta ** (-2 * pair / d)
        wavelength = 2 * np.pi / frequency
        if wavelength > context / low:
            turned, kind = frequency / factor, "slow"
        elif wavelength < context / high:
            turned, kind = frequency, "fast"
        else:
            smooth = (context / wavelength - low) / (high - low)
            turned, kind = (1 - smooth) * frequency / factor + smooth * frequency, "between"
        kinds.append(kind)
        wanted = (x[..., pair] + 1j * x[..., pair + d // 2]) * np.exp(1j * turned * np.arange(20))
        np.testing.assert_allclose(out[..., pair], wanted.real, atol=1e-5)
        np.testing.assert_allclose(out[..., pair + d // 2], wanted.imag, atol=1e-5)
    assert set(kinds) == {"slow", "between", "fast"}


def test_sinusoidal_is_the_papers_table():
    table = np.asarray(Sinusoidal()(jnp.zeros((5, 8)), 3))
    for t in range(5):
        for i in range(4):
            angle = (t + 3) / 10000 ** (2 * i / 8)
            np.testing.assert_allclose(table[t, 2 * i], np.sin(angle), atol=1e-6)
            np.testing.assert_allclose(table[t, 2 * i + 1], np.cos(angle), atol=1e-6)


@pytest.mark.parametrize(
    "positions",
    [Rotary(), Sinusoidal(), NoPositions(), Learned(9, 8, std=1.0, key=KEY)],
    ids=lambda p: type(p).__name__,
)
def test_a_start_continues_where_a_longer_sequence_would(positions):
    x = jax.random.normal(KEY, (3, 9, 8))
    whole = np.asarray(call(positions, x))
    out = call(positions, x[:, 4:], jnp.asarray(4))
    np.testing.assert_allclose(out, whole[:, 4:], atol=1e-6)
    # Each row at a start of its own. (For rotary positions, the axis before is that of heads.)
    starts, x = np.array([0, 4, 2]), np.asarray(x)
    rows = np.stack([x[row, start : start + 5] for row, start in enumerate(starts)])
    heads = (slice(None), None) if isinstance(positions, Rotary) else ()
    out = call(positions, jnp.asarray(rows[heads]), jnp.asarray(starts))
    out = np.asarray(out).reshape(rows.shape)
    for row, start in enumerate(starts):
        np.testing.assert_allclose(out[row], whole[row, start : start + 5], atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name):
    x = np.linspace(-4, 4, 50)
    expected = {
        "gelu": x * (1 + np.asarray(erf(x / np.sqrt(2)))) / 2,
        "silu": x / (1 + np.exp(-x)),
        "relu": np.maximum(x, 0),
        "relu2": np.maximum(x, 0) ** 2,
        "tanh": np.tanh(x),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "identity": x,
    }[name]
    # GELU is the tanh approximation, 5e-4 from the exact one.
    tolerance = 1e-3 if name == "gelu" else 1e-5
    np.testing.assert_allclose(jax.jit(ACTIVATIONS[name])(jnp.asarray(x)), expected, atol=tolerance)


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "sigmoid"])
def test_in_bfloat16_an_activation_and_its_gradient_are_rounded_once(name):
    """Computed in bfloat16, intermediate results would be rounded, too."""
    x = jnp.linspace(-5, 5, 99).astype(jnp.bfloat16)

    def value_and_gradient(x):
        value, backward = jax.vjp(ACTIVATIONS[name], x)
        return value, *backward(jnp.ones_like(value))

    with jax.enable_x64(True):
        exact = jax.jit(value_and_gradient)(jnp.float64(x))
    for found, wanted in zip(jax.jit(value_and_gradient)(x), exact, strict=True):
        assert found.dtype == jnp.bfloat16
        # Half a unit in the last place. And where the result cancels: float32's tanh is right to a
        # few times 6e-8, of which GELU's derivative makes up to seven times as much.
        np.testing.assert_allclose(jnp.float32(found), wanted, rtol=2.0**-8, atol=4e-6)


def test_mlp_and_gated_mlp_are_their_formulas():
    x = np.asarray(X, np.float64)
    mlp = MLP(8, 12, activation=ACTIVATIONS["relu2"], std=0.5, down_std=0.5, bias=True, key=KEY)
    up = np.maximum(x @ np.asarray(mlp.up.weight).T, 0) ** 2
    np.testing.assert_allclose(
        call(mlp, X), up @ np.asarray(mlp.down.weight).T, rtol=1e-4, atol=1e-4
    )
    glu = GatedMLP(8, 12, std=0.5, down_std=0.5, key=KEY)
    gate = x @ np.asarray(glu.gate.weight).T
    mixed = gate / (1 + np.exp(-gate)) * (x @ np.asarray(glu.up.weight).T)
    np.testing.assert_allclose(
        call(glu, X), mixed @ np.asarray(glu.down.weight).T, rtol=1e-4, atol=1e-4
    )


def test_dyt_is_its_formula():
    dyt = DyT(8)
    gains = (jnp.asarray(0.7), jnp.arange(8.0), jnp.ones(8))
    dyt = eqx.tree_at(lambda n: (n.alpha, n.weight, n.bias), dyt, gains)
    expected = np.tanh(0.7 * np.asarray(X)) * np.arange(8) + 1
    np.testing.assert_allclose(call(dyt, X), expected, rtol=1e-5, atol=1e-5)


def moe(**options) -> MoE:
    options = {"n_experts": 4, "experts_per_token": 2, "std": 0.5, "down_std": 0.5} | options
    return MoE(8, 6, key=KEY, **options)


def router_probabilities(module, x):
    logits = np.asarray(x, np.float64) @ np.asarray(module.router.weight).T
    odds = np.exp(logits)
    return odds / odds.sum(-1, keepdims=True)


def test_a_token_has_no_more_experts_than_there_are():
    with pytest.raises(ValueError, match="experts_per_token must be at least 1 and at most 4, got"):
        moe(experts_per_token=5)


def test_learned_positions_end_with_the_context():
    layer = Learned(9, 8, std=1.0, key=KEY)
    with pytest.raises(ValueError, match="end at context_length 9, got a sequence up to 10"):
        layer(jnp.zeros((5, 8)), start=5)


def test_moe_matches_a_loop_over_tokens():
    module = moe()
    out = np.asarray(call(module, X))
    for place in np.ndindex(2, 5):
        x = np.asarray(X[place], np.float64)
        probability = router_probabilities(module, x)
        expected = np.zeros(8)
        for expert in np.argsort(-probability)[:2]:
            rows = slice(6 * expert, 6 * expert + 6)
            hidden = np.maximum(np.asarray(module.up.weight)[rows] @ x, 0) ** 2
            expected += probability[expert] * (np.asarray(module.down.weight)[:, rows] @ hidden)
        np.testing.assert_allclose(out[place], expected, rtol=1e-4, atol=1e-5)


def test_the_balance_loss_is_its_formula():
    module = moe(balance_loss=0.1)
    wanted = []
    for x, length in zip(X, (5, 3), strict=True):
        probability = router_probabilities(module, x[:length])
        picked = np.argsort(-probability, axis=-1)[:, :2]
        share = np.bincount(picked.ravel(), minlength=4) / picked.size
        wanted.append(0.1 * 4 * np.sum(share * probability.mean(0)))
    aux_loss = eqx.filter_jit(MoE.aux_loss)
    found = aux_loss(module, X, jnp.array([5, 3]))
    np.testing.assert_allclose(found, np.mean(wanted), rtol=1e-5)
    np.testing.assert_allclose(aux_loss(module, X[0]), wanted[0], rtol=1e-5)
    # A sequence without a token adds zero to the mean.
    empty = aux_loss(module, X, jnp.array([5, 0]))
    np.testing.assert_allclose(empty, wanted[0] / 2, rtol=1e-5)


def test_blocks_are_their_formulas():
    norms = [LayerNorm(8) for _ in range(4)]
    norms = [eqx.tree_at(lambda n: n.weight, n, i + jnp.ones(8)) for i, n in enumerate(norms)]
    a, b, c, d = norms
    mlp = MLP(8, 12, std=0.5, down_std=0.5, key=KEY)
    attention = Attention(Heads(8, 2, std=0.5, output_std=0.5, key=KEY))

    def att(x):
        return attention(x)[0]

    def block(first, second):
        return Block(attention, first, mlp, second)(X)[0]

    def pairs():
        y = X + att(a(X))
        yield block(PreNorm(a), PreNorm(b)), y + mlp(b(y))
        y = a(X + att(X))
        yield block(PostNorm(a), PostNorm(b)), b(y + mlp(y))
        y = X + c(att(a(X)))
        yield block(SandwichNorm(a, c), SandwichNorm(b, d)), y + d(mlp(b(y)))
        yield ParallelBlock(attention, mlp, a)(X)[0], X + att(a(X)) + mlp(a(X))

    # Each found and wanted; in one program.
    for found, wanted in jax.jit(lambda: list(pairs()))():
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


class Affine(eqx.Module):
    """The smallest thing with a block's call."""

    linear: Linear

    def __call__(self, x, cache, context, *, key):
        noise = 0.0 if key is None else jax.random.normal(key, x.shape)
        return x + self.linear(x) + noise, cache, jnp.sum(self.linear.weight)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_stack_is_its_blocks_one_after_the_other(scan, key):
    stack = Stack(lambda k, layer: Affine(Linear(8, 8, std=0.3, key=k)), 3, scan=scan, key=KEY)
    assert stack.blocks.linear.weight.shape == (3, 8, 8)
    x, keys = X, [None] * 3 if key is None else jax.random.split(key, 3)
    weights = np.asarray(stack.blocks.linear.weight)
    for weight, layer_key in zip(weights, keys, strict=True):
        noise = 0.0 if layer_key is None else np.asarray(jax.random.normal(layer_key, x.shape))
        x = np.asarray(x) + x @ weight.T + noise
    out, caches, aux_loss = stack(X, key=key)
    assert caches is None
    np.testing.assert_allclose(aux_loss, weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=1e-5)
