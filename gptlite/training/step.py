"""The optimizer step: everything between a batch and new parameters, compiled as one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from gptlite.config import OptimizerConfig, TrainingConfig, UserError
from gptlite.sharding import (
    check_rows,
    constrain,
    keep_placed,
    place,
    place_batches,
    place_seeds,
)
from gptlite.training.loss import window_losses
from gptlite.training.optimizer import make_optimizer, make_schedule

T = TypeVar("T")

# `losses(model, batch, label_smoothing=, key=)`: in nats, any shape, of which the mean is taken.
Losses = Callable[..., Float[Array, "..."]]
# `counts(batch)`: False where a loss is not to count, as for padding.
Counts = Callable[[PyTree], Bool[Array, "..."]]


class TrainState(eqx.Module):
    """All that changes while training. (Of several seeds: every array with an axis of them.)"""

    model: Any
    optimizer_state: Any
    step: Int[Array, "*seeds"]


class StepMetrics(eqx.Module):
    """What each step of a dispatch reports. (Of several seeds: with an axis of them first.)"""

    loss: Float[Array, "*steps"]
    grad_norm: Float[Array, "*steps"]
    finite: Bool[Array, "*steps"]
    """Whether loss and gradient were; with `on_nonfinite` skip, whether the update was made."""


class TrainSteps:
    """The update, compiled: `train_steps(state, batches, count)` does `count` steps.

    The count is data, not shape: however many steps are wanted, there is one program.
    """

    def __init__(
        self,
        model: eqx.Module,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        mesh: Mesh,
        *,
        losses: Losses = window_losses,
        counts: Counts | None = None,
        seeds: Sequence[int] | None = None,
    ):
        """**Arguments:**

        - `model`: one as those that will be trained, or `eqx.filter_eval_shape` of one, with a
          `config`, a `ModelConfig`.
        - `losses(model, batch, label_smoothing=, key=)`: in nats, any shape. The mean is taken,
          over the whole batch, whatever the number of devices and of parts.
        - `counts(batch)`: of the same shape, False where a loss is not to count. By default all do.
        - `seeds`: one for each of several models that are trained side by side, on a `seeds_mesh`.
          By default a single model with `training.seed`.

        **Raises:** `UserError` if the devices of `mesh` cannot share a batch, or the optimizer does
        not fit the model.
        """
        check_rows(mesh, training.batch_size // training.accumulation)
        self.mesh, self.training = mesh, training
        self._optimizer = make_optimizer(optimizer, training.steps, model)
        self._schedule = make_schedule(optimizer, training.steps)
        self._peak = optimizer.learning_rate
        alone = seeds is None
        self.seeds = None if seeds is None else len(seeds)
        self.vocab_size: int | None = None
        """Of a model that learns from windows of ids: no id may be larger."""
        if losses is window_losses:
            self.vocab_size = getattr(model, "vocab_size", None)
        # Seeds are data: a new one compiles nothing.
        self._seeds = np.asarray(training.seed if seeds is None else seeds, np.int32)
        if not alone:
            self._seeds = place_seeds(jnp.asarray(self._seeds), mesh)

        @eqx.filter_jit(donate="all-except-first")
        def run(data: tuple, state: TrainState) -> tuple[TrainState, StepMetrics]:
            arrays, static = eqx.partition(state, eqx.is_array)

            def steps(arrays, batches, count, seed):
                state = eqx.combine(arrays, static)
                state, metrics = _run_steps(
                    training, self._optimizer, state, batches, count, seed, losses, counts
                )
                return eqx.filter(state, eqx.is_array), metrics

            if not alone:
                steps = jax.vmap(steps, in_axes=(0, 1, None, 0))
            arrays, metrics = steps(arrays, *data)
            return eqx.combine(arrays, static), metrics

        self._run = run

    def init(self, model: Any) -> TrainState:
        """The state before the first step, of a copy of `model` (or of models, stacked)."""
        # A copy, because the update reuses the memory of its state, and the model is the caller's.
        model = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)
        init, put = lambda params: keep_placed(self._optimizer.init(params)), place
        if self._seeds.ndim:
            init, put = eqx.filter_vmap(self._optimizer.init), place_seeds
        model = put(model, self.mesh)
        with jax.set_mesh(self.mesh):
            optimizer_state = eqx.filter_jit(init)(eqx.filter(model, eqx.is_inexact_array))
        return put(
            TrainState(model, optimizer_state, jnp.zeros(self._seeds.shape, jnp.int32)), self.mesh
        )

    def __call__(
        self, state: TrainState, batches: PyTree[Shaped[np.ndarray, "steps ..."]], count: int
    ) -> tuple[TrainState, StepMetrics]:
        """The state after the first `count` of `batches`, `[steps, batch, ...]` (of several seeds,
        `[steps, seeds, batch, ...]`). Reuses the memory of `state`."""
        with jax.set_mesh(self.mesh):
            data = (place_batches(batches, self.mesh), jnp.asarray(count), self._seeds)
            return self._run(data, state)

    def compiled(
        self, state: TrainState, batches: PyTree[Shaped[np.ndarray, "steps ..."]]
    ) -> jax.stages.Compiled:
        """The program that a call runs, for a look at it."""
        with jax.set_mesh(self.mesh):
            data = (place_batches(batches, self.mesh), jnp.asarray(0), self._seeds)
            run: Any = self._run
            return run.lower(data, state).compile().compiled

    def learning_rate(self, step: int) -> float:
        """That of the update after `step` others (with muon: of the matrices)."""
        return self._peak * float(self._schedule(step))


def _run_steps(
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batches: PyTree[Shaped[Array, "steps batch ..."]],
    count: Int[Array, ""],
    seed: Int[Array, ""],
    losses: Losses,
    counts: Counts | None,
) -> tuple[TrainState, StepMetrics]:
    arrays, static = eqx.partition(state, eqx.is_array)

    def body(i, carry):
        arrays, metrics = carry
        batch = jax.tree.map(lambda batch: batch[i], batches)
        state = eqx.combine(arrays, static)
        state, new = _step(config, optimizer, state, batch, seed, losses, counts)
        metrics = jax.tree.map(lambda seen, now: seen.at[i].set(now), metrics, new)
        return eqx.filter(keep_placed(state), eqx.is_array), metrics

    blank = jnp.zeros(len(jax.tree.leaves(batches)[0]))
    metrics = StepMetrics(blank, blank, blank == 0)
    arrays, metrics = lax.fori_loop(0, count, body, (arrays, metrics))
    return keep_placed(eqx.combine(arrays, static)), metrics


def _step(
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: PyTree[Shaped[Array, "batch ..."]],
    seed: Int[Array, ""],
    losses: Losses,
    counts: Counts | None,
) -> tuple[TrainState, StepMetrics]:
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    loss, grads = loss_and_grads(state.model, batch, config, losses, counts, key=key)
    grads = keep_placed(grads)
    updates, optimizer_state = optimizer.update(
        grads, state.optimizer_state, eqx.filter(state.model, eqx.is_inexact_array)
    )
    model = eqx.apply_updates(state.model, keep_placed(updates))
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if config.on_nonfinite == "skip":
        finite &= jnp.isfinite(optax.tree.norm(updates))
        model, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old) if eqx.is_array(new) else new,
            (model, optimizer_state),
            (state.model, state.optimizer_state),
        )
    state = TrainState(model, optimizer_state, state.step + 1)
    return state, StepMetrics(loss, grad_norm, finite)


def loss_and_grads(
    model: Any,
    batch: PyTree[Shaped[Array, "batch ..."]],
    config: TrainingConfig,
    losses: Losses = window_losses,
    counts: Counts | None = None,
    *,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """The mean loss of a batch and its gradient, in `config.accumulation` equal parts.

    The mean is over all losses that count; of none, it is 0.
    """
    parts = config.accumulation
    counted = jnp.ones(()) if counts is None else jnp.maximum(jnp.sum(counts(batch)), 1)

    @eqx.filter_value_and_grad
    def loss_of(model, batch, key):
        model = cast(model, jnp.dtype(config.compute_dtype))
        drops = max(model.config.dropout, model.config.attention_dropout) > 0
        key = key if drops else None
        found = losses(model, batch, label_smoothing=config.label_smoothing, key=key)
        if counts is None:
            return jnp.mean(found)
        if counts(batch).shape != found.shape:
            raise UserError(
                f"counts must have the shape of the losses, {list(found.shape)}, got "
                f"{list(counts(batch).shape)}."
            )
        # Divided by what counts in all parts, so that no part weighs more than another's losses.
        return jnp.sum(jnp.where(counts(batch), found, 0)) * parts / counted

    key = jax.random.key(config.seed) if key is None else key
    if parts == 1:
        return loss_of(model, batch, key)

    def split(x):
        # Row i of part j is row `i * parts + j`, so that each device keeps its rows.
        x = jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
        return constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    def add_part(total, part):
        return jax.tree.map(jnp.add, total, loss_of(model, *part)), None

    keys = jax.random.split(key, parts)
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array)))
    total, _ = lax.scan(add_part, zero, (jax.tree.map(split, batch), keys))
    return jax.tree.map(lambda x: x / parts, total)


def cast(model: T, dtype: Any) -> T:
    """`model` (any pytree) with its parameters in `dtype`; gradients through the cast keep the old
    dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
