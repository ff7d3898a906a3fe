"""The optimizer step: everything between a batch and new parameters, compiled as one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from gptlite.config import OptimizerConfig, TrainingConfig
from gptlite.errors import require
from gptlite.machine.batch_reader import check_batch
from gptlite.machine.memory import require_memory
from gptlite.machine.mesh import abstract, check_rows, local_rows, place, place_batches
from gptlite.machine.pytrees import Trainable, cast, inside, is_parameter, require_float32
from gptlite.machine.runtime import chosen_dtype
from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.row_keys import row_key
from gptlite.nn.kernels.rows import default_parts, mean_by_rows, n_row_shards
from gptlite.nn.stack import Stack, unstacked
from gptlite.sharding import constrain, constrain_parameters, targets_nvidia
from gptlite.training.loss import window_losses
from gptlite.training.optimizer import make_optimizer, peak_share, schedule_points

T = TypeVar("T")

# Steps of a call, at most, and bytes of their batches, which are in memory together.
MAX_STEPS, MAX_BYTES = 1024, 2**28

# The arguments of `TrainSteps`, which describes them.
LossFn = Callable[..., Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, ""]]]
LossMask = Callable[[PyTree], Bool[Array, "..."]]


class TrainState(eqx.Module):
    """Everything that changes in training."""

    model: Any
    optimizer_state: Any
    step: Int[Array, "*models"]


class StepMetrics(eqx.Module):
    """The report of each step of a dispatch."""

    loss: Float[Array, "*steps"]
    """Without the auxiliary loss."""
    grad_norm: Float[Array, "*steps"]
    finite: Bool[Array, "*steps"]
    """Whether loss and gradient (with `on_nonfinite` skip: and update) were finite."""


class TrainSteps:
    """The compiled update: `train_steps(state, batches, count)` does `count` steps.

    One program serves any number of steps, because the count is an argument of it.
    """

    def __init__(
        self,
        model: eqx.Module,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        mesh: Mesh,
        *,
        loss_fn: LossFn = window_losses,
        loss_mask: LossMask | None = None,
        trainable: Trainable = is_parameter,
    ):
        """**Arguments:**

        - `model`: a model like those that will be trained, or `eqx.filter_eval_shape` of one.
        - `loss_fn(model, batch, label_smoothing=, key=)`: losses in nats, of any shape. Their mean
          over the whole batch is minimised. `batch` may be a device's part of it, or less: then the
          result is the same if each row's losses depend on that row alone, and the first axis of
          what `key` draws is the rows. For losses that compare rows, use one device and
          `training.accumulation` 1. Or a pair: the losses, and a second loss that is added to the
          mean (of mixtures of experts, `aux_loss`) and is not in the metrics.
        - `loss_mask(batch)`: of the same shape, False where a loss does not count. Default: all do.
        - `trainable`: which parameters are trained, as a filter for `eqx.partition`. Default: all;
          `gptlite.trainable` makes one of `training.freeze`.

        **Raises:** `UserError` if `training.freeze` comes without one, the devices of `mesh` cannot
        share a batch, the optimizer does not fit the model, or a parameter that is trained is not
        in float32.
        """
        is_told = trainable is not is_parameter or not training.freeze
        require(is_told, "training.freeze needs trainable, as gptlite.trainable makes it.")
        check_rows(mesh, training.batch_size // (training.accumulation or 1))
        # Another module may mix its parameters with numbers of a batch, which are in float32.
        has_stack = any(jax.tree.leaves(inside(model, Stack)))
        dtype: Any = chosen_dtype(training.compute_dtype, mesh.devices.flat[0], has_stack)
        self.mesh, self.training = mesh, dataclasses.replace(training, compute_dtype=dtype)
        self._loss_fn, self._loss_mask = loss_fn, loss_mask
        self.trainable = trainable
        """Which parameters are trained."""
        params = eqx.filter(model, trainable)
        require_float32(params)
        self._optimizer, self._settings = make_optimizer(optimizer, params), optimizer
        self.steps = training.steps
        """The steps of the run, which may change while it is trained."""
        self.rows = local_rows(mesh, training.batch_size)
        """Which rows of a batch this process reads: all, if it is the only one."""
        self.batch_shape: tuple[int, ...] = (len(self.rows),)
        """The first axes of a batch."""
        # Only windows of ids can be compared with a vocabulary.
        self.vocab_size = getattr(model, "vocab_size", None) if loss_fn is window_losses else None
        # cuBLAS adds a bias and the residual stream to a product's result. XLA's own products on
        # NVIDIA's GPUs, in Triton, do not: a step of GPT-2 (124 M) would write a tenth more.
        with jax.set_mesh(mesh):
            nvidia = targets_nvidia()
        self.compiler_options = {"xla_gpu_enable_triton_gemm": False} if nvidia else None

        # (`eqx.filter_jit` passes `compiler_options` to `jax.jit`. Its annotations omit it.)
        @eqx.filter_jit(  # pyright: ignore[reportCallIssue]
            donate="all-except-first", compiler_options=self.compiler_options
        )
        def run(data: tuple, state: TrainState) -> tuple[TrainState, StepMetrics]:
            return self.update(state, *data)

        self._run: Any = run

    def init(self, model: Any) -> TrainState:
        """The state before the first step, of a copy of `model`."""
        model = place(copied(model), self.mesh)
        with jax.set_mesh(self.mesh):
            optimizer_state = eqx.filter_jit(
                lambda params: constrain_parameters(self.init_optimizer(params))
            )(eqx.filter(model, self.trainable))
        return place(TrainState(model, optimizer_state, jnp.zeros((), jnp.int32)), self.mesh)

    def init_optimizer(self, params: PyTree) -> PyTree:
        """The optimizer's state for the parameters that are trained."""
        return self._optimizer.init(params)

    def abstract_state(self, model: Any) -> TrainState:
        """The shapes, dtypes and shardings of `init(model)`, where `model` may be
        `eqx.filter_eval_shape` of one. Computes nothing."""

        def init(model):
            optimizer_state = self.init_optimizer(eqx.filter(model, self.trainable))
            return TrainState(model, optimizer_state, jnp.zeros((), jnp.int32))

        return abstract(eqx.filter_eval_shape(init, model), self.mesh)

    def __call__(
        self, state: TrainState, batches: PyTree[Shaped[np.ndarray, "steps ..."]], count: int
    ) -> tuple[TrainState, StepMetrics]:
        """The state after the first `count` of `batches`, `[steps, batch, ...]`. Reuses the memory
        of `state`."""
        with jax.set_mesh(self.mesh):
            return self._run(self.place(batches, count), state)

    def place(self, batches: PyTree, count: int) -> tuple[PyTree, Array, Array, Array]:
        """The arguments of `update` besides the state, on the devices. With another seed, or for
        another number of steps, nothing is compiled anew."""
        seed = jnp.asarray(self.training.seed, jnp.int32)
        return place_batches(batches, self.mesh), *self._numbers(count), seed

    def _numbers(self, count: int) -> tuple[Array, Array]:
        return jnp.asarray(count), jnp.asarray(schedule_points(self._settings, self.steps))

    def capacity(self, batch: PyTree) -> int:
        """The most steps of a call, with batches like this one: those between two lines of metrics,
        or fewer, which take 256 MiB."""
        training, n_bytes = self.training, sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
        in_memory = max(1, MAX_BYTES // max(n_bytes, 1))
        return min(training.log_every, training.eval_every, training.steps, MAX_STEPS, in_memory)

    def compile(self, state: TrainState, batch: PyTree) -> None:
        """Compile the update for a state and batches like these, `[batch, ...]`. Changes neither;
        the first call then takes as long as others.

        **Raises:** `UserError` if the batch has the wrong shape or ids, or memory is too small.
        """
        check_batch(self, batch, int(np.max(np.asarray(state.step))))
        batches = jax.tree.map(
            lambda x: np.zeros((self.capacity(batch), *np.shape(x)), np.asarray(x).dtype), batch
        )
        with jax.set_mesh(self.mesh):
            program = self._run.lower(self.place(batches, 0), state).compile().compiled
        if (needs := program.memory_analysis()) is not None:
            devices = len(self.mesh.local_devices)
            require_memory("A training step", devices * needs.temp_size_in_bytes)

    def learning_rate(self, step: int) -> float:
        """The learning rate of update `step`, counted from 0 (with muon: of the matrices)."""
        points = schedule_points(self._settings, self.steps)
        return self._settings.learning_rate * float(peak_share(self._settings, step, points))

    def update(
        self,
        state: TrainState,
        batches: PyTree[Shaped[Array, "steps batch ..."]],
        count: Int[Array, ""],
        points: Int[Array, "3"],
        seed: Int[Array, ""],
    ) -> tuple[TrainState, StepMetrics]:
        """To be compiled: the state after the first `count` of `batches`, and the reports.
        `points`: see `schedule_points`."""
        arrays, static = eqx.partition(state, eqx.is_array)

        def body(i, carry):
            arrays, metrics = carry
            batch = jax.tree.map(lambda batch: batch[i], batches)
            state, new = self._step(eqx.combine(arrays, static), batch, points, seed)
            metrics = jax.tree.map(lambda seen, now: seen.at[i].set(now), metrics, new)
            return eqx.filter(constrain_parameters(state), eqx.is_array), metrics

        blank = jnp.zeros(len(jax.tree.leaves(batches)[0]))
        metrics = StepMetrics(blank, blank, blank.astype(bool))
        arrays, metrics = lax.fori_loop(0, count, body, (arrays, metrics))
        return constrain_parameters(eqx.combine(arrays, static)), metrics

    def _step(
        self,
        state: TrainState,
        batch: PyTree[Shaped[Array, "batch ..."]],
        points: Int[Array, "3"],
        seed: Int[Array, ""],
    ) -> tuple[TrainState, StepMetrics]:
        # The third key: `TrainingRun` draws the model and the samples from the first two. (Key i of
        # a split is `fold_in(key, i)`.)
        key = jax.random.key(seed, impl="threefry2x32")  # the kind that `row_key` takes
        key = jax.random.fold_in(jax.random.split(key, 3)[2], state.step)
        loss, grads = self.loss_and_grads(state.model, batch, key)
        grads = constrain_parameters(grads)
        params = eqx.filter(state.model, self.trainable)
        updates, optimizer_state = self._optimizer.update(grads, state.optimizer_state, params)
        share = peak_share(self._settings, state.step, points)
        updates = jax.tree.map(lambda update: share * update, updates)
        model = eqx.apply_updates(state.model, constrain_parameters(updates))
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if self.training.on_nonfinite == "skip":
            finite &= jnp.isfinite(optax.tree.norm(updates))
            model, optimizer_state = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old) if eqx.is_array(new) else new,
                (model, optimizer_state),
                (state.model, state.optimizer_state),
            )
        state = TrainState(model, optimizer_state, state.step + 1)
        return state, StepMetrics(loss, grad_norm, finite)

    def loss_and_grads(
        self, model: Any, batch: PyTree[Shaped[Array, "batch ..."]], key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], PyTree]:
        """The mean of a batch's losses that count (0 if none does), and the gradient of this mean
        and the auxiliary loss, computed in `training.accumulation` equal parts. `key`: as `row_key`
        takes it."""
        loss_mask, dtype = self._loss_mask, jnp.dtype(self.training.compute_dtype)
        # The factor of the sum of a device's losses, so that every loss has the same weight.
        weight = jnp.ones(())
        if loss_mask is not None:
            weight = n_row_shards() / jnp.maximum(jnp.sum(loss_mask(batch)), 1)
        params, rest = eqx.partition(model, self.trainable)
        # Layers are cast and unstacked, and their gradients stacked, once a step and not in each of
        # its parts.
        params, stack_grads = jax.vjp(functools.partial(unstacked, scanned=False), params)
        arrays, static = eqx.partition(unstacked(rest, scanned=False), eqx.is_array)
        shared = cast((params, arrays), dtype), weight

        def gradient(shared, batch, key):
            (params, arrays), weight = shared
            return self._gradient(params, eqx.combine(arrays, static), batch, key, weight)

        grads, loss = mean_by_rows(gradient, shared, batch, key)
        return loss, *stack_grads(grads)

    def _gradient(
        self,
        params: PyTree,
        rest: Any,
        batch: PyTree[Shaped[Array, "batch ..."]],
        key: PRNGKeyArray,
        weight: Float[Array, ""],
    ) -> tuple[PyTree, Float[Array, ""]]:
        """The gradient of `params` in at least float32, and the mean loss, of a device's rows."""
        parts = self.training.accumulation or default_parts(*_rows_and_tokens(batch))
        weight *= parts

        def objective(params, batch, key):
            mean, aux_loss = self._mean_loss(eqx.combine(params, rest), batch, key, weight)
            return mean + aux_loss, mean

        def gradient(batch, key):
            return jax.tree.map(widen, eqx.filter_grad(objective, has_aux=True)(params, batch, key))

        if parts == 1:
            return gradient(batch, key)

        def split(x):
            x = x.reshape(parts, -1, *x.shape[1:])
            return constrain(x, None, "batch", *(None,) * (x.ndim - 2))

        def add_part(total, part):
            batch, number = part
            return jax.tree.map(jnp.add, total, gradient(batch, row_key(key, number, parts))), None

        zero = jax.tree.map(lambda x: widen(jnp.zeros_like(x)), (params, jnp.zeros(())))
        total, _ = lax.scan(add_part, zero, (jax.tree.map(split, batch), jnp.arange(parts)))
        return jax.tree.map(lambda x: x / parts, total)

    def _mean_loss(
        self,
        model: Any,
        batch: PyTree[Shaped[Array, "batch ..."]],
        key: PRNGKeyArray,
        weight: Float[Array, ""],
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The mean loss and the auxiliary loss of one part of a device's rows."""
        smoothing = self.training.label_smoothing
        result = self._loss_fn(model, batch, label_smoothing=smoothing, key=key)
        if not isinstance(result, tuple):
            experts = jax.tree.leaves(model, is_leaf=lambda node: hasattr(node, "aux_loss"))
            require(
                not any(hasattr(node, "aux_loss") for node in experts),
                "The model has a mixture of experts, so loss_fn(...) must return a pair, the "
                "losses and the auxiliary loss of model.with_aux_loss(...) (of an encoder: "
                "model.hidden(...)).",
            )
            result = result, jnp.zeros(())
        losses, aux_loss = result
        if self._loss_mask is None:
            return jnp.mean(losses), aux_loss
        mask = self._loss_mask(batch)
        require(
            mask.shape == losses.shape,
            f"loss_mask must have the shape of the losses, {list(losses.shape)}, got "
            f"{list(mask.shape)}.",
        )
        return jnp.sum(jnp.where(mask, losses, 0)) * weight, aux_loss


def copied(model: T) -> T:
    """A copy of `model`, because the update reuses the memory of its state, and the model is the
    caller's. With its dtype, because a state of JAX's weak types has strong ones after a step, for
    which the program would be compiled once more."""
    return jax.tree.map(lambda x: jnp.array(x, x.dtype) if eqx.is_array(x) else x, model)


def _rows_and_tokens(batch: PyTree[Shaped[Array, "batch ..."]]) -> tuple[int, int]:
    leaves = jax.tree.leaves(batch)
    return len(leaves[0]), max(x.shape[1] if x.ndim > 1 else 1 for x in leaves)
