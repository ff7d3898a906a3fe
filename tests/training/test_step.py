import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY, VOCAB, tiny_model

from gptlite.config import OptimizerConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.estimate.step import rows_at_once
from gptlite.machine.mesh import make_mesh
from gptlite.machine.pytrees import path_name
from gptlite.models.gpt import GPT
from gptlite.nn.kernels import head as head_module, rows as rows_module
from gptlite.training.loss import window_losses
from gptlite.training.step import TrainSteps

TRAINING = TrainingConfig(steps=10, batch_size=4, log_every=5, compute_dtype="float32")
SHAPE = (5, 4, TINY.context_length + 1)
BATCHES = np.random.default_rng(5).integers(VOCAB, size=SHAPE).astype(np.int32)


def trees_close(a, b, rtol=1e-5):
    """Equal to `rtol` of each array's largest number."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(np.asarray(x)).max())


def steps_of(model, optimizer=None, training=TRAINING, **options) -> TrainSteps:
    optimizer = OptimizerConfig() if optimizer is None else optimizer
    return TrainSteps(model, optimizer, training, make_mesh(), **options)


def grads_of(model, batch, training=TRAINING, **options):
    mesh = make_mesh(devices=jax.devices()[:1])
    optimizer = options.pop("optimizer", OptimizerConfig())
    steps = TrainSteps(model, optimizer, training, mesh, **options)
    return eqx.filter_jit(steps.loss_and_grads)(model, batch, jax.random.key(0))


def test_dropout_shares_no_key_with_the_model_and_the_samples():
    """train.py draws the model and the samples from the two keys of `split(key(seed))`."""

    def losses(model, batch, *, label_smoothing, key):
        return jnp.sum(model.norm.weight) * 0 + jax.random.uniform(key)

    steps = steps_of(tiny_model(), OptimizerConfig(name="adamw"), loss_fn=losses)
    _, metrics = steps(steps.init(tiny_model()), BATCHES, 5)
    drawn = {float(jax.random.uniform(key)) for key in jax.random.split(jax.random.key(0))}
    assert len({*np.asarray(metrics.loss).tolist(), *drawn}) == 7


@pytest.fixture(scope="module")
def long() -> dict:
    """Of each way to compute once more what the gradient needs: the loss and the gradient of a
    model whose activations outweigh its parameters, and the temporary memory in bytes."""
    batch = np.random.default_rng(1).integers(VOCAB, size=(4, 129)).astype(np.int32)
    mesh = make_mesh(devices=jax.devices()[:1])
    training = dataclasses.replace(TRAINING, accumulation=1)
    shape = {"n_layers": 4, "d_model": 32, "context_length": 128, "dropout": 0.1, "stack": "scan"}
    found = {}
    for name in ("none", "attention", "block", "chunks"):
        changes = {"remat": "none" if name == "chunks" else name}
        model = tiny_model(**shape, **changes)
        steps = TrainSteps(model, OptimizerConfig(), training, mesh)
        with pytest.MonkeyPatch.context() as patch:
            if name == "chunks":
                patch.setattr(head_module, "MAX_LOGITS", 4 * 50 * VOCAB)  # 43 positions of 128
            function: Any = eqx.filter_jit(steps.loss_and_grads)
            compiled = function.lower(model, batch, jax.random.key(0)).compile()
        memory = compiled.compiled.memory_analysis().temp_size_in_bytes
        found[name] = compiled(model, batch, jax.random.key(0)), memory
    return found


@pytest.mark.parametrize("name", ["attention", "block", "chunks"])
def test_what_is_computed_once_more_is_the_same(long, name):
    """With dropout. Sums are added up in another order."""
    trees_close(long[name][0], long["none"][0])


def test_computing_once_more_takes_less_memory(long):
    assert long["attention"][1] < 0.9 * long["none"][1]
    assert long["block"][1] < 0.5 * long["none"][1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_accumulation_gives_the_whole_batchs_gradient(dropout):
    model = tiny_model(dropout=dropout)
    whole = grads_of(model, BATCHES[0], TRAINING)
    parts = grads_of(model, BATCHES[0], dataclasses.replace(TRAINING, accumulation=2))
    trees_close(whole, parts)


@pytest.mark.parametrize(
    ("rows", "tokens", "parts"), [(32, 257, 8), (4, 257, 1), (6, 65, 1), (7, 1025, 7)]
)
def test_a_cpu_computes_in_parts_of_a_thousand_tokens(rows, tokens, parts, monkeypatch):
    """Each of its devices. Another platform computes all rows at once, and so may a config."""
    model, seen = tiny_model(context_length=tokens - 1), []

    def losses(model, windows, **options):
        seen.append(len(windows))
        return window_losses(model, windows, **options)

    def check(devices, parts, accumulation=None):
        mesh = make_mesh(devices=jax.devices()[:devices])
        training = dataclasses.replace(
            TRAINING, batch_size=devices * rows, accumulation=accumulation
        )
        steps = TrainSteps(model, OptimizerConfig(), training, mesh, loss_fn=losses)
        assert rows_at_once(steps, tokens) == rows // parts
        with jax.set_mesh(mesh):
            batch, key = jnp.zeros((devices * rows, tokens), jnp.int32), jax.random.key(0)
            eqx.filter_eval_shape(steps.loss_and_grads, model, batch, key)
        assert seen.pop() == rows // parts

    for devices in (1, 2):
        check(devices, parts)
        check(devices, 1, accumulation=1)
    monkeypatch.setattr(rows_module, "targets_cpu", lambda: False)
    check(1, 1)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_devices_exchange_one_array_or_many_with_the_same_result(is_cpu, monkeypatch):
    """With dropout. Devices that are no CPU exchange each gradient by itself."""
    monkeypatch.setattr(rows_module, "targets_cpu", lambda: is_cpu)
    model = tiny_model(dropout=0.1)
    steps = steps_of(model)
    assert steps.mesh.size > 1
    with jax.set_mesh(steps.mesh):
        found = eqx.filter_jit(steps.loss_and_grads)(model, BATCHES[0], jax.random.key(0))
    trees_close(grads_of(model, BATCHES[0]), found)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_mean_is_over_what_counts_whatever_the_parts(parts):
    """A row with nothing that counts among them; and a batch of nothing but such rows."""
    model = tiny_model()
    real = np.arange(TINY.context_length) < np.array([[12], [0], [5], [1]])
    batch = {"windows": jnp.asarray(BATCHES[0]), "real": real}

    def losses(model, batch, **options):
        return window_losses(model, batch["windows"], **options)

    def by_hand(model):
        return jnp.sum(jnp.where(real, window_losses(model, jnp.asarray(BATCHES[0]))[0], 0)) / 18

    training = dataclasses.replace(TRAINING, accumulation=parts)
    options = {"loss_fn": losses, "loss_mask": lambda batch: batch["real"]}
    found = grads_of(model, batch, training, **options)
    trees_close(eqx.filter_jit(eqx.filter_value_and_grad(by_hand))(model), found)
    nothing = batch | {"real": np.zeros_like(real)}
    loss, grads = grads_of(model, nothing, training, **options)
    assert float(loss) == 0
    assert all(not np.any(grad) for grad in jax.tree.leaves(grads))


def test_counts_of_another_shape_are_refused():
    """They would broadcast, and make another mean."""
    with pytest.raises(UserError, match=r"shape of the losses, \[4, 12\], got \[4, 1\]"):
        grads_of(tiny_model(), jnp.asarray(BATCHES[0]), loss_mask=lambda batch: batch[:, :1] >= 0)


def test_parameters_of_low_precision_are_not_trained_but_may_be_frozen():
    model = eqx.tree_at(lambda model: model.norm.weight, tiny_model(), replace_fn=as_bfloat16)
    with pytest.raises(UserError, match=r"must be in float32, got bfloat16 for norm\.weight\. "):
        grads_of(model, BATCHES[0])
    trained = jax.tree.map(lambda x: eqx.is_inexact_array(x) and x.dtype == np.float32, model)
    grads_of(model, BATCHES[0], trainable=trained)


def as_bfloat16(x):
    return x.astype(jnp.bfloat16)


def test_a_mixture_is_not_trained_without_its_balance_loss():
    def losses(model, batch, **options):
        return window_losses(model, batch, **options)[0]

    with pytest.raises(UserError, match="mixture of experts, so loss_fn"):
        grads_of(tiny_model(mlp="moe"), BATCHES[0], loss_fn=losses)
    grads_of(tiny_model(), BATCHES[0], loss_fn=losses)


def test_parts_do_not_change_the_balance_loss():
    model = tiny_model(mlp="moe:balance_loss=1.0")
    whole = grads_of(model, BATCHES[0], TRAINING)
    parts = grads_of(model, BATCHES[0], dataclasses.replace(TRAINING, accumulation=4))
    trees_close(whole, parts)
    free = tiny_model(mlp="moe:balance_loss=0.0")
    without = grads_of(free, BATCHES[0], TRAINING)
    router, other = (found[1].stack.blocks.mlp.router.weight for found in (whole, without))
    assert np.abs(router - other).max() > 0.01 * np.abs(router).max()


def test_dropout_drops_other_activations_in_every_row():
    """Equal rows; with the same masks they would have the same losses."""
    model = tiny_model(dropout=0.5)
    batch = np.repeat(BATCHES[0, :1], 4, axis=0)
    key = jax.random.key(0)
    losses, _ = eqx.filter_jit(window_losses)(model, jnp.asarray(batch), key=key)
    assert len(set(losses.mean(axis=1).tolist())) == 4


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
            return jnp.mean(window_losses(eqx.combine(params, static), batch)[0])

        grads = jax.jit(jax.grad(loss))(params)
        random = np.random.default_rng(0)

        def moved(direction, by):
            return loss(jax.tree.map(lambda p, d: np.asarray(p) + by * d, params, direction))

        for _ in range(3):
            direction = jax.tree.map(lambda x: random.normal(size=x.shape), params)
            step = 1e-7
            numeric = (float(moved(direction, step)) - float(moved(direction, -step))) / (2 * step)
            analytic = sum(
                np.vdot(g, d)
                for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True)
            )
            # Rounding leaves 1e-16 / 1e-7; truncation is smaller. A larger step would cross ReLU's
            # kinks.
            np.testing.assert_allclose(analytic, numeric, rtol=1e-4)


def test_steps_in_one_dispatch_are_steps_one_by_one():
    model = tiny_model()
    train_steps = steps_of(model)
    together, metrics = train_steps(train_steps.init(model), BATCHES, 5)
    apart, losses = train_steps.init(model), []
    for i in range(5):
        apart, one = train_steps(apart, np.roll(BATCHES, -i, axis=0), 1)
        losses.append(float(one.loss[0]))
    assert int(together.step) == int(apart.step) == 5
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-6)
    trees_close(eqx.filter(together, eqx.is_array), eqx.filter(apart, eqx.is_array), 1e-6)


def test_a_dispatch_of_no_steps_changes_nothing():
    model = tiny_model()
    train_steps = steps_of(model)
    state, _ = train_steps(train_steps.init(model), BATCHES, 0)
    assert int(state.step) == 0
    trees_close(eqx.filter(state.model, eqx.is_array), eqx.filter(model, eqx.is_array), 0.0)


def test_one_program_serves_all_dispatches_of_runs_of_all_lengths(caplog):
    """Also for parameters of JAX's weak types, as `jnp.full(d, 1.0)` makes them."""
    model = eqx.tree_at(lambda m: m.norm.weight, tiny_model(), jnp.full(TINY.d_model, 1.0))
    assert model.norm.weight.weak_type
    train_steps = steps_of(model)
    state = train_steps.init(model)
    with jax.log_compiles():
        for count, train_steps.steps in ((0, 10), (5, 10), (2, 300)):
            state, _ = train_steps(state, BATCHES, count)
    compiled = [line for line in caplog.messages if "Finished XLA compilation of jit(run)" in line]
    assert len(compiled) == 1


def test_an_update_is_that_of_optax_with_its_schedule():
    """The share of the peak is a factor of the whole update, with its weight decay."""
    optimizer = OptimizerConfig(
        name="adamw", schedule="linear", warmup_fraction=0.2, weight_decay=0.1, beta2=0.99
    )
    train_steps = steps_of(tiny_model(), optimizer)
    state, _ = train_steps(train_steps.init(tiny_model()), BATCHES, 5)
    rise = optax.linear_schedule(0.02 / 3, 0.02, 2)
    schedule = optax.join_schedules([rise, optax.linear_schedule(0.02, 0.0, 8)], [2])
    reference = optax.adamw(
        schedule,
        b2=0.99,
        weight_decay=0.1,
        mask=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "norm" not in path_name(path), params
        ),
    )
    model = tiny_model()
    adam = reference.init(eqx.filter(model, eqx.is_array))
    for batch in BATCHES:
        grads = eqx.filter_jit(train_steps.loss_and_grads)(model, batch, jax.random.key(0))[1]
        updates, adam = reference.update(grads, adam, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
    trees_close(eqx.filter(state.model, eqx.is_array), eqx.filter(model, eqx.is_array), 1e-4)


def test_bfloat16_keeps_parameters_and_gradients_in_float32():
    model = tiny_model()
    loss, grads = grads_of(model, BATCHES[0], TRAINING)
    half_loss, half_grads = grads_of(
        model, BATCHES[0], dataclasses.replace(TRAINING, compute_dtype="bfloat16")
    )
    np.testing.assert_allclose(half_loss, loss, rtol=0.02)
    for full, half in zip(jax.tree.leaves(grads), jax.tree.leaves(half_grads), strict=True):
        assert half.dtype == jnp.float32
        cosine = np.vdot(full, half) / np.linalg.norm(full) / np.linalg.norm(half)
        assert float(cosine) > 0.98


class Image(eqx.Module):
    """Not written for several number formats: a convolution has no bfloat16 of float32."""

    layer: eqx.nn.Conv1d

    def __call__(self, x):
        return jax.vmap(self.layer)(x).mean((1, 2))


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_a_module_of_another_kind_is_trained_in_float32(monkeypatch, has_bfloat16):
    monkeypatch.setattr("gptlite.machine.runtime._has_bfloat16", lambda: has_bfloat16)
    training = dataclasses.replace(TRAINING, compute_dtype="auto")
    model, adamw = Image(eqx.nn.Conv1d(1, 2, 3, key=jax.random.key(0))), OptimizerConfig("adamw")
    images = np.random.default_rng(0).normal(size=(4, 1, 8)).astype(np.float32)

    def squares(model, batch, *, label_smoothing, key):
        return model(batch) ** 2

    loss, _ = grads_of(model, images, training, loss_fn=squares, optimizer=adamw)
    np.testing.assert_allclose(loss, np.mean(np.asarray(model(images)) ** 2), rtol=1e-6)
    wanted = "bfloat16" if has_bfloat16 else "float32"
    assert steps_of(tiny_model(), training=training).training.compute_dtype == wanted


def test_a_model_overfits_one_batch():
    model = eqx.filter_jit(GPT)(TINY, VOCAB, key=jax.random.key(0))
    config = OptimizerConfig(name="muon", learning_rate=0.02, schedule="linear")
    training = dataclasses.replace(TRAINING, steps=300, batch_size=2)
    train_steps = steps_of(model, config, training)
    state = train_steps.init(model)
    batches = np.broadcast_to(BATCHES[:1, :2], (50, 2, TINY.context_length + 1))
    losses = []
    for _ in range(6):
        state, metrics = train_steps(state, batches, 50)
        losses.append(float(metrics.loss[-1]))
    # ln 13 at the start; random text leaves nothing to predict but by heart. The first token of a
    # row tells which row it is.
    assert losses[-1] < 0.02, losses
