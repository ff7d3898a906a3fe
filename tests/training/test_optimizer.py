import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_model

from gptlite.config import OptimizerConfig
from gptlite.errors import UserError
from gptlite.training.optimizer import make_optimizer, peak_share, schedule_points

PLAIN = OptimizerConfig(warmup_fraction=0.1, decay_fraction=0.4, final_fraction=0.25)


def normal(params, seed=0):
    """Gradients of `params`, drawn."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), params)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_in_bfloat16_costs_its_rounding_and_halves_the_memory(name):
    """The means are computed in float32 and rounded between steps, by 2⁻⁹ at most."""
    params = eqx.filter(tiny_model(n_layers=2), eqx.is_inexact_array)

    def gradient(step):
        return normal(params, step)

    found, states = [], []
    for dtype in ("float32", "bfloat16"):
        config = OptimizerConfig(name=name, state_dtype=dtype)
        optimizer = make_optimizer(config, params)
        state = jax.jit(optimizer.init)(params)
        for step in range(3):
            updates, state = jax.jit(optimizer.update)(gradient(step), state, params)
            found.append(updates)
        states.append([x for x in jax.tree.leaves(state) if eqx.is_inexact_array(x)])
    for x, y in zip(*map(jax.tree.leaves, found[::3]), strict=True):
        np.testing.assert_array_equal(x, y)  # nothing is kept before the first step
    for x, y in zip(*map(jax.tree.leaves, found[2::3]), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(x)
    assert {x.dtype for x in states[0]} == {jnp.dtype("float32")}
    assert {x.dtype for x in states[1]} == {jnp.dtype("bfloat16")}
    with pytest.raises(UserError, match=r"beta2 must be at most 0\.99, got 0\.999"):
        OptimizerConfig(name=name, state_dtype="bfloat16", beta2=0.999)


def shares(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Those of the steps from the first to the one after the last."""
    points = schedule_points(config, steps)
    return np.array([float(peak_share(config, step, points)) for step in range(steps + 1)])


def curve(schedule: str, **changes) -> np.ndarray:
    return shares(dataclasses.replace(PLAIN, schedule=schedule, **changes), 100)


def test_noam_matches_the_paper():
    """Vaswani et al., 2017, eq. 3, for steps counted from 1, over its value at the peak."""
    config = dataclasses.replace(PLAIN, schedule="noam", warmup_fraction=0.09)
    warmup, step = 10, np.arange(1, 101)
    paper = np.minimum(step**-0.5, step * warmup**-1.5)
    ours = shares(config, 100)[:100]
    np.testing.assert_allclose(ours, paper / paper.max(), rtol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_schedules_rise_to_the_peak_and_end_where_they_should(schedule):
    factors = curve(schedule)
    np.testing.assert_allclose(factors[:11], np.linspace(1 / 11, 1, 11), rtol=1e-5)
    assert np.all(np.diff(factors[10:]) <= 1e-6)
    np.testing.assert_allclose(factors[99], 1.0 if schedule == "constant" else 0.25, rtol=1e-5)
    to_zero = curve(schedule, final_fraction=0.0)
    if schedule != "constant":
        assert to_zero[99] > 0
        np.testing.assert_allclose(to_zero[100], 0.0, atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_of_a_few_steps_is_at_the_final_fraction(schedule):
    config = OptimizerConfig(schedule=schedule, final_fraction=0.1)
    factors = shares(config, 10)[:10]
    assert factors[0] == 1.0
    np.testing.assert_allclose(factors[-1], 0.1, rtol=1e-5)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.2])
def test_a_decay_of_a_step_ends_at_the_final_fraction(fraction):
    config = OptimizerConfig(schedule="wsd", decay_fraction=fraction, final_fraction=0.1)
    rates = shares(config, 100)[:100]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[78] == pytest.approx(1.0)


def test_schedules_between_warm_up_and_end():
    np.testing.assert_allclose(curve("linear")[55], 1 - 0.75 * 45 / 89, rtol=1e-5)
    cosine = 0.25 + 0.75 * (1 + np.cos(np.pi * np.array([22, 45]) / 89)) / 2
    np.testing.assert_allclose(curve("cosine")[[32, 55]], cosine, rtol=1e-5)
    np.testing.assert_allclose(curve("wsd")[[10, 60, 86]], [1, 1, 1 - 0.75 * 26 / 39], rtol=1e-5)


def test_without_warm_up_the_first_step_is_at_the_peak():
    np.testing.assert_allclose(curve("wsd", warmup_fraction=0.0)[:60], 1.0)


def test_a_run_of_one_step_has_a_learning_rate():
    for schedule in ("cosine", "linear", "constant", "wsd"):
        config = dataclasses.replace(PLAIN, schedule=schedule)
        assert 0 < shares(config, 1)[0] <= 1


def named(model):
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_inexact_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def one_update(config, grads_of=lambda params: jax.tree.map(jnp.zeros_like, params)):
    model = tiny_model(n_layers=2, norm="layer", bias=True, positions="learned")
    params = eqx.filter(model, eqx.is_inexact_array)
    optimizer = make_optimizer(config, params)
    state = jax.jit(optimizer.init)(params)
    updates, _ = jax.jit(optimizer.update)(grads_of(params), state, params)
    return named(params), named(updates)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_falls_on_matrices_only(name):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.1,
        adam_learning_rate=0.1,
        weight_decay=0.5,
        schedule="constant",
        warmup_fraction=0.0,
    )
    params, updates = one_update(config)
    decayed = {name for name, update in updates.items() if np.any(update)}
    matrices = {key for key in params if key.endswith(".weight") and "norm" not in key}
    assert decayed == matrices
    for key in decayed:
        np.testing.assert_allclose(updates[key], -0.1 * 0.5 * params[key], rtol=1e-5)


def test_muon_orthogonalises_each_layers_matrices_and_leaves_the_rest_to_adam():
    config = OptimizerConfig(
        learning_rate=0.1, adam_learning_rate=0.003, schedule="constant", warmup_fraction=0.0
    )
    params, updates = one_update(config, normal)
    for key, update in updates.items():
        if key.startswith("stack.") and params[key].ndim == 3:
            n_layers, d_out, d_in = update.shape
            writes = key.endswith((".output.weight", ".mlp.down.weight"))
            rate = 0.1 * (3 / n_layers if writes else 1.0)
            for layer in np.asarray(update) / rate / (max(d_out, d_in) / min(d_out, d_in)) ** 0.5:
                singular = np.linalg.svd(layer, compute_uv=False)
                # Newton-Schulz's five quintic steps bring singular values to 0.7 to 1.2 for a
                # random matrix (all but its very smallest).
                assert 0.3 < np.median(singular) < 1.25
                assert singular.max() < 1.35
        else:
            # Adam's first step is the sign of the gradient.
            rate = 0.003 * (128 / 16 if key == "head.weight" else 1.0)
            np.testing.assert_allclose(np.abs(update), rate, rtol=1e-3)


def test_adamw_has_one_rate_for_all_shapes():
    config = OptimizerConfig(
        name="adamw", learning_rate=0.003, schedule="constant", warmup_fraction=0.0
    )
    for update in one_update(config, normal)[1].values():
        np.testing.assert_allclose(np.abs(update), 0.003, rtol=1e-3)


def test_clipping_scales_the_whole_gradient():
    base = OptimizerConfig(
        name="adamw", learning_rate=0.1, schedule="constant", warmup_fraction=0.0
    )

    def ones(params):
        return jax.tree.map(jnp.ones_like, params)

    # After clipping to 1e-8 the gradient is of the size of Adam's epsilon, which then shows.
    _, clipped = one_update(dataclasses.replace(base, clip_norm=1e-8), ones)
    _, free = one_update(base, ones)
    assert np.abs(clipped["norm.weight"]).max() < 0.1 * np.abs(free["norm.weight"]).min()


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": -1.0},
        {"learning_rate": float("inf")},
        {"warmup_fraction": 1.5},
        {"warmup_fraction": 0.6, "decay_fraction": 0.6},
        {"beta2": 1.0},
        {"weight_decay": float("nan")},
        {"clip_norm": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(UserError, match=f"optimizer.{next(iter(changes))} must|and optimizer"):
        dataclasses.replace(PLAIN, schedule="wsd", **changes)


def test_tables_and_gains_inside_the_blocks_are_left_to_adam():
    model = tiny_model(positions="relative", mlp="moe", norm="dyt")
    config = dataclasses.replace(PLAIN, name="muon", learning_rate=0.0, adam_learning_rate=1.0)
    params = eqx.filter(model, eqx.is_inexact_array)
    optimizer = make_optimizer(config, params)
    updates, _ = jax.jit(optimizer.update)(
        jax.tree.map(jnp.ones_like, params), jax.jit(optimizer.init)(params), params
    )
    by_adam = {name for name, update in named(updates).items() if np.any(update)}
    inside = {name.removeprefix("stack.blocks.") for name in by_adam if "blocks" in name}
    assert inside == {
        "attention.score_bias.table.weight",
        *(
            f"{norm}.{gain}"
            for norm in ("attention_residual.norm", "mlp_residual.norm")
            for gain in ("alpha", "weight")
        ),
    }
