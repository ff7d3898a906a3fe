import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VOCAB, tiny_model
from jax.sharding import AxisType

from gptlite.config import OptimizerConfig, TrainingConfig
from gptlite.models.gpt import GPT
from gptlite.training.loop import data_mesh
from gptlite.training.loss import window_losses
from gptlite.training.optimizer import make_optimizer
from gptlite.training.step import init_state, loss_and_grads, make_train_steps

TRAINING = TrainingConfig(steps=10, batch_size=4, steps_per_dispatch=5, compute_dtype="float32")
BATCHES = jax.random.randint(jax.random.key(5), (5, 4, TINY.context_length + 1), 0, VOCAB)
grads_of = eqx.filter_jit(loss_and_grads)


def trees_close(a, b, rtol=1e-5):
    """Equal to `rtol` of each array's largest number."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * float(jnp.abs(x).max()))


def copied(tree):
    return jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, tree)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_accumulation_gives_the_whole_batchs_gradient(dropout):
    model = tiny_model(dropout=dropout)
    whole = grads_of(model, BATCHES[0], TRAINING)
    parts = grads_of(model, BATCHES[0], dataclasses.replace(TRAINING, accumulation=2))
    if dropout == 0.0:
        trees_close(whole, parts)
    else:  # other masks, the same size
        assert 0.5 < float(parts[0] / whole[0]) < 2.0


def test_each_device_drops_activations_of_its_own():
    """Two devices see the same rows. With the same masks they would give what one gives."""
    model = tiny_model(dropout=0.5)
    batch = jnp.concatenate([BATCHES[:1, :2]] * 2, axis=1)
    optimizer = make_optimizer(OptimizerConfig(), 10, model)

    def loss(mesh, batch):
        steps = make_train_steps(TRAINING, optimizer, mesh)
        return float(steps(init_state(copied(model), optimizer), batch.copy(), 1)[1].loss[0])

    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    assert loss(one, batch[:, :2]) != pytest.approx(loss(data_mesh(4), batch), rel=1e-3)


def test_gradients_of_the_loss_agree_with_finite_differences_in_float64():
    with jax.enable_x64(True):
        model = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x), jnp.float64) if eqx.is_inexact_array(x) else x,
            tiny_model(),
        )
        batch = jnp.asarray(np.asarray(BATCHES[0, :2]))
        params, static = eqx.partition(model, eqx.is_inexact_array)

        @jax.jit
        def loss(params):
            return jnp.mean(window_losses(eqx.combine(params, static), batch))

        grads = jax.jit(jax.grad(loss))(params)
        random = np.random.default_rng(0)

        def moved(direction, by):
            return loss(jax.tree.map(lambda p, d: p + by * d, params, direction))

        for _ in range(3):
            direction = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape)), params)
            step = 1e-7
            numeric = (moved(direction, step) - moved(direction, -step)) / (2 * step)
            analytic = sum(
                jnp.vdot(g, d)
                for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
            )
            # Rounding leaves 1e-16 / 1e-7; truncation is smaller. A larger step would cross ReLU's
            # kinks.
            np.testing.assert_allclose(analytic, numeric, rtol=1e-4)


def test_steps_in_one_dispatch_are_steps_one_by_one():
    model = tiny_model()
    optimizer = make_optimizer(OptimizerConfig(), 10, model)
    train_steps = make_train_steps(TRAINING, optimizer, data_mesh(4))
    together, metrics = train_steps(init_state(copied(model), optimizer), BATCHES.copy(), 5)
    apart, losses = init_state(copied(model), optimizer), []
    for i in range(5):
        apart, one = train_steps(apart, jnp.roll(BATCHES, -i, axis=0), 1)
        losses.append(float(one.loss[0]))
    assert int(together.step) == int(apart.step) == 5
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-6)
    trees_close(eqx.filter(together, eqx.is_array), eqx.filter(apart, eqx.is_array), 1e-6)


def test_a_dispatch_of_no_steps_changes_nothing():
    model = tiny_model()
    optimizer = make_optimizer(OptimizerConfig(), 10, model)
    state, _ = make_train_steps(TRAINING, optimizer, data_mesh(4))(
        init_state(copied(model), optimizer), BATCHES.copy(), 0
    )
    assert int(state.step) == 0
    trees_close(eqx.filter(state.model, eqx.is_array), eqx.filter(model, eqx.is_array), 0.0)


def test_bfloat16_keeps_parameters_and_gradients_in_float32():
    model = tiny_model()
    loss, grads = grads_of(model, BATCHES[0], TRAINING)
    half_loss, half_grads = grads_of(
        model, BATCHES[0], dataclasses.replace(TRAINING, compute_dtype="bfloat16")
    )
    np.testing.assert_allclose(half_loss, loss, rtol=0.02)
    for full, half in zip(jax.tree.leaves(grads), jax.tree.leaves(half_grads), strict=True):
        assert half.dtype == jnp.float32
        cosine = jnp.vdot(full, half) / jnp.linalg.norm(full) / jnp.linalg.norm(half)
        assert float(cosine) > 0.98


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_model_overfits_one_batch(name):
    model = eqx.filter_jit(GPT)(TINY, VOCAB, key=jax.random.key(0))
    config = OptimizerConfig(name=name, learning_rate=0.02, schedule="linear")
    optimizer = make_optimizer(config, 300, model)
    train_steps = make_train_steps(TRAINING, optimizer, data_mesh(4))
    state = init_state(model, optimizer)
    batches = jnp.broadcast_to(BATCHES[:1, :2], (50, 2, TINY.context_length + 1))
    losses = []
    for _ in range(6):
        state, metrics = train_steps(state, batches.copy(), 50)
        losses.append(float(metrics.loss[-1]))
    # ln 13 at the start; random text leaves nothing to predict but by heart. The first token of a
    # row tells which row it is.
    assert losses[-1] < 0.02, losses
