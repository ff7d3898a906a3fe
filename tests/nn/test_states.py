"""Layers with a state: each is its paper's formula, token by token, and that of `transformers`."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import needs

from gptlite.errors import UserError
from gptlite.nn import Context
from gptlite.nn.variants.states import STATES
from gptlite.research.check_block import SMALL, check_block
from gptlite.research.laws import LAWS

CONFIG = dataclasses.replace(SMALL, n_kv_heads=None)
HEADS, D = CONFIG.n_heads, CONFIG.d_head


def block_of(name: str, dtype: Any = jnp.float64, **options: Any) -> Any:
    """With all parameters at random, so that each has an effect."""
    block = STATES[name](CONFIG, **options, key=jax.random.key(0))
    leaves, structure = jax.tree.flatten(block)
    random = np.random.default_rng(1)
    leaves = [jnp.asarray(random.normal(size=leaf.shape) / 3, dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def heads(x):
    return x.reshape(len(x), HEADS, -1)


def convolved(p, u):
    """Of each token, and those before it."""
    bias = 0 if p.conv.bias is None else p.conv.bias
    terms = [
        bias + sum(w * u[t - i] for i, w in enumerate(p.conv.weights) if t >= i)
        for t in range(len(u))
    ]
    return silu(np.stack(terms))


def qkv(p, x):
    return [x @ getattr(p, name).weight.T for name in ("query", "key", "value")]


def rms(y, weight):
    return y / np.sqrt(np.mean(y**2, -1, keepdims=True) + 1e-6) * weight


def length_one(x):
    return x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6)


def run(q, k, v, decay, delta=None):
    """`S = a S + k vᵀ`, or with a delta rule, `S = a S`, then `S = S + b k (v - Sᵀ k)ᵀ`."""
    y = np.zeros(v.shape)
    for h in range(HEADS):
        state = np.zeros((q.shape[-1], v.shape[-1]))
        for t in range(len(q)):
            state = decay[t, h][:, None] * state
            new = v[t, h] if delta is None else delta[t, h] * (v[t, h] - state.T @ k[t, h])
            state = state + np.outer(k[t, h], new)
            y[t, h] = state.T @ q[t, h]
    return y


def linear(p, x):
    q, k, v = (heads(a) for a in qkv(p, x))
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    y = np.zeros(v.shape)
    for t, h in np.ndindex(len(x), HEADS):
        shares = np.array([q[t, h] @ k[i, h] for i in range(t + 1)])
        y[t, h] = shares @ v[: t + 1, h] / (shares.sum() + 1e-6)
    return y.reshape(len(x), -1)


def retention(p, x):
    q, k, v = (heads(a) for a in qkv(p, x))
    half = D // 2
    pairs = 10_000.0 ** (-np.arange(half) / half)
    y = np.zeros(v.shape)
    for t, h in np.ndindex(len(x), HEADS):
        for i in range(t + 1):
            angle = (t - i) * pairs  # rotated by the distance of both
            a, b = k[i, h, :half], k[i, h, half:]
            c, d = q[t, h, :half], q[t, h, half:]
            score = np.sum((c * a + d * b) * np.cos(angle) + (c * b - d * a) * np.sin(angle))
            y[t, h] += score / D**0.5 * (1 - 2.0 ** (-5 - h)) ** (t - i) * v[i, h]
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
    return y.reshape(len(x), -1) * silu(x @ p.gate.weight.T)


def gla(p, x):
    q, k, v = (heads(a) for a in qkv(p, x))
    gate = x @ p.decay.down.weight.T @ p.decay.up.weight.T + p.decay.up.bias
    y = run(q / D**0.5, k, v, heads(sigmoid(gate) ** (1 / 16)))
    return rms(y, p.norm.weight).reshape(len(x), -1) * silu(x @ p.gate.weight.T)


def delta(p, x, decay):
    u = convolved(p, np.concatenate(qkv(p, x), -1))
    q, k, v = (heads(a) for a in np.split(u, 3, axis=-1))
    strength = sigmoid(x @ p.strength.weight.T) * (2 if p.negative else 1)
    y = run(length_one(q) / D**0.5, length_one(k), v, decay, strength)
    return rms(y, p.norm.weight).reshape(len(x), -1)


def deltanet(p, x):
    return delta(p, x, np.ones((len(x), HEADS, 1)))


def gated_deltanet(p, x):
    step = softplus(x @ p.decay.weight.T + p.decay_bias)
    y = delta(p, x, np.exp(-np.exp(p.log_rate) * step)[..., None])
    return y * silu(x @ p.gate.weight.T)


def kda(p, x):
    step = softplus(x @ p.decay.down.weight.T @ p.decay.up.weight.T + p.decay_bias)
    y = delta(p, x, np.exp(-np.exp(p.log_rate)[:, None] * heads(step)))
    return y * sigmoid(x @ p.gate.down.weight.T @ p.gate.up.weight.T)


def mamba2(p, x):
    u = convolved(p, np.concatenate(qkv(p, x), -1))
    q, k, v = np.split(u, [p.d_key, 2 * p.d_key], axis=-1)
    v = v.reshape(len(x), p.n_heads, -1)
    step = softplus(x @ p.step.weight.T + p.step_bias)
    y = np.zeros(v.shape)
    for h in range(p.n_heads):
        state = np.zeros((p.d_key, p.d_value))
        for t in range(len(x)):
            state = np.exp(-np.exp(p.log_rate[h]) * step[t, h]) * state
            state += step[t, h] * np.outer(k[t], v[t, h])
            y[t, h] = state.T @ q[t] + p.skip[h] * v[t, h]
    y = y.reshape(len(x), -1) * silu(x @ p.gate.weight.T)
    return rms(y, p.norm.weight)


def rwkv7(p, x):
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    mixed = {part: x + (before - x) * share for part, share in p.shares.items()}

    def low_rank(part, activation=lambda a: a):
        layer = getattr(p, part)
        y = activation(mixed[part] @ layer.down.weight.T) @ layer.up.weight.T
        return y if layer.up.bias is None else y + layer.up.bias

    r, k, v = (mixed[part] @ getattr(p, part).weight.T for part in ("query", "key", "value"))
    w = np.exp(-np.exp(-0.5) * sigmoid(low_rank("decay", np.tanh)))
    a, g = sigmoid(low_rank("rate")), low_rank("gate", sigmoid)
    kappa = length_one(heads(k * p.direction))
    k = k * (1 + (a - 1) * p.key_rate)
    r, k, v, w, a, rho = (heads(part) for part in (r, k, v, w, a, np.tile(p.bonus, (len(x), 1))))
    y = np.zeros(v.shape)
    for h in range(HEADS):
        s = np.zeros((D, D))  # values in rows, as in the paper
        for t in range(len(x)):
            turn = np.diag(w[t, h]) - np.outer(kappa[t, h], a[t, h] * kappa[t, h])
            s = s @ turn + np.outer(v[t, h], k[t, h])
            read = s @ r[t, h]
            read = (read - read.mean()) / np.sqrt(read.var() + 1e-5 * D)
            place = slice(h * D, (h + 1) * D)
            y[t, h] = read * p.norm_weight[place] + p.norm_bias[place]
            y[t, h] += np.sum(r[t, h] * rho[t, h] * k[t, h]) * v[t, h]
    return y.reshape(len(x), -1) * g


FORMULAS = (linear, retention, gla, mamba2, deltanet, gated_deltanet, kda, rwkv7)
REFERENCES = {formula.__name__: formula for formula in FORMULAS}


NEGATIVE = [(name, {"negative": True}) for name in ("deltanet", "gated_deltanet", "kda")]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in STATES), *NEGATIVE])
def test_a_layer_is_its_formula_token_by_token(name, options):
    with jax.enable_x64(True):
        block = block_of(name, **options)
        x = np.random.default_rng(0).normal(size=(2, 3, 45, CONFIG.d_model))
        y, _ = block(jnp.asarray(x))
        in_numpy = jax.tree.map(np.asarray, block)
        for row in np.ndindex(2, 3):
            wanted = REFERENCES[name](in_numpy, x[row]) @ in_numpy.output.weight.T
            # Angles of positions are in float32, as they are in attention.
            atol = 1e-6 if name == "retention" else 1e-11
            np.testing.assert_allclose(y[row], wanted, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("width", [1, 5])
def test_heads_may_have_an_odd_width_or_a_single_channel(width):
    config = dataclasses.replace(CONFIG, attention="rwkv7", head_size=width)
    assert config.d_head == width
    with pytest.raises(UserError, match=rf"must be even, got {width}"):
        dataclasses.replace(config, attention_every="2:full")
    with pytest.raises(UserError, match=rf"retention rotates pairs .* must be even, got {width}"):
        STATES["retention"](config, key=jax.random.key(0))
    with pytest.raises(UserError, match=r"multiple of n_key_heads \(.* key_heads\), got 4 and 3"):
        STATES["gated_deltanet"](config, heads=4, key_heads=3, key=jax.random.key(0))


# The laws that a state can break. The others hold by what all of them share.
OF_STATES = ("build", "causal", "cached", "padding", "lengths", "documents", "extremes")


@pytest.mark.parametrize("name", ["linear", "gla", "mamba2", "kda", "rwkv7"])
def test_a_layer_holds_the_laws(name):
    config = dataclasses.replace(SMALL, separate_documents=True)
    checks = OF_STATES if name in ("kda", "rwkv7") else tuple(LAWS)
    report = check_block(STATES[name], config=config, checks=checks)
    assert set(report.checks) >= set(OF_STATES)


def from_torch(module: Any) -> dict[str, Any]:
    return {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}


def by_head(weight, parts):
    """Rows of `parts` matrices that alternate by head."""
    rows = np.asarray(weight).reshape(HEADS, parts, -1, weight.shape[-1])
    return [jnp.asarray(rows[:, i].reshape(-1, weight.shape[-1])) for i in range(parts)]


def compare_with(module: Any, block: Any, places: Any) -> None:
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape) / 3)
    block = eqx.tree_at(places[0], block, places[1](from_torch(module)))
    x = np.random.default_rng(0).normal(size=(2, 75, CONFIG.d_model)).astype(np.float32)
    with torch.no_grad():
        wanted = module(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(block(jnp.asarray(x))[0], wanted, rtol=1e-3, atol=1e-4)
    # In generation: a prompt, and token by token.
    cache = block.init_cache((2,), 75, jnp.float32)
    step, parts = eqx.filter_jit(block), []
    for start, end in [(0, 70), *((t, t + 1) for t in range(70, 75))]:
        y, cache = step(jnp.asarray(x[:, start:end]), cache, Context(start=jnp.asarray(start)))
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), wanted, rtol=1e-3, atol=1e-4)


SHAPE: dict[str, Any] = {
    "hidden_size": CONFIG.d_model,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 10,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}


OF_GATED: dict[str, Any] = {"linear_num_value_heads": HEADS, "linear_num_key_heads": HEADS}
OF_GATED |= {"linear_key_head_dim": D, "linear_value_head_dim": D}


def places_of_gated(b):
    matrices = [b.query, b.key, b.value, b.gate, b.strength, b.decay]
    rest = [b.log_rate, b.decay_bias, b.norm.weight, b.output.weight]
    return [*(layer.weight for layer in matrices), b.conv.weights, *rest]


@needs("torch", "transformers")
def test_gated_deltanet_is_qwen3_nexts():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(**(SHAPE | OF_GATED), layer_types=["linear_attention"])

    def values(p):
        query, key, value, gate = by_head(p["in_proj_qkvz.weight"], 4)
        strength, decay = by_head(p["in_proj_ba.weight"], 2)
        conv = tuple(p["conv1d.weight"][:, 0, ::-1].T)
        rest = [p[name] for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")]
        return [query, key, value, gate, strength, decay, conv, *rest]

    block = block_of("gated_deltanet", jnp.float32)
    compare_with(Qwen3NextGatedDeltaNet(config, 0), block, (places_of_gated, values))


@needs("torch", "transformers")
@pytest.mark.parametrize("negative", [False, True])
def test_gated_deltanet_is_olmo_hybrids(negative):
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    fields = SHAPE | OF_GATED | {"linear_allow_neg_eigval": negative}
    fields |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = OlmoHybridConfig(**fields)
    module: Any = OlmoHybridGatedDeltaNet(config, 0)
    module.o_norm.variance_epsilon = 1e-6  # in place of its 1e-5, which no config sets

    def values(p):
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        conv = tuple(p["conv1d.weight"][:, 0, ::-1].T)
        rest = [p[name] for name in ("A_log", "dt_bias", "o_norm.weight", "o_proj.weight")]
        return [*(p[f"{name}.weight"] for name in names), conv, *rest]

    block = block_of("gated_deltanet", jnp.float32, negative=negative)
    compare_with(module, block, (places_of_gated, values))


@needs("torch", "transformers")
def test_kda_is_kimi_linears():
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    sizes: dict[str, Any] = {"linear_num_heads": HEADS, "linear_head_dim": D}
    config = KimiLinearConfig(**(SHAPE | sizes), layer_types=["linear_attention"])

    def values(p):
        names = ["q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"]
        names += ["forget_gate.f_a_proj", "forget_gate.f_b_proj", "o_norm"]
        conv = tuple(p["conv1d.weight"][:, 0, ::-1].T)
        rates = p["forget_gate.A_log"].reshape(-1), p["forget_gate.dt_bias"]
        return [*(p[f"{name}.weight"] for name in names), conv, *rates]

    def places(b):
        matrices = [b.query, b.key, b.value, b.strength, b.gate.down, b.gate.up, b.output]
        matrices += [b.decay.down, b.decay.up, b.norm]
        return [*(layer.weight for layer in matrices), b.conv.weights, b.log_rate, b.decay_bias]

    block = block_of("kda", jnp.float32)
    compare_with(KimiLinearDeltaAttention(config, 0), block, (places, values))


@needs("torch", "transformers")
def test_mamba2_is_that_of_transformers():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes: dict[str, Any] = {"num_heads": 2 * HEADS, "head_dim": D, "state_size": 64, "expand": 2}
    sizes |= {"hidden_size": CONFIG.d_model, "conv_kernel": 4, "n_groups": 1, "chunk_size": 16}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 10, "layer_norm_epsilon": 1e-6}
    module = Mamba2Mixer(Mamba2Config(**sizes), 0)
    d = 2 * CONFIG.d_model

    def values(p):
        cuts = np.cumsum([d, d, 64, 64])
        gate, value, key, query, step = jnp.split(p["in_proj.weight"], cuts)
        order = np.r_[d + 64 : d + 128, d : d + 64, :d]  # there, values come first
        conv = tuple(p["conv1d.weight"][order, 0, ::-1].T)
        rest = [p[name] for name in ("dt_bias", "A_log", "D", "norm.weight", "out_proj.weight")]
        return [query, key, value, gate, step, conv, p["conv1d.bias"][order], *rest]

    def places(b):
        matrices = [b.query, b.key, b.value, b.gate, b.step]
        rest = [b.step_bias, b.log_rate, b.skip, b.norm.weight, b.output.weight]
        return [*(layer.weight for layer in matrices), b.conv.weights, b.conv.bias, *rest]

    compare_with(module, block_of("mamba2", jnp.float32), (places, values))
