"""The optimizer step: everything between a batch of ids and new parameters, compiled as one."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from gptlite.config import TrainingConfig
from gptlite.models.gpt import GPT
from gptlite.training.loss import window_losses

T = TypeVar("T")


class TrainState(eqx.Module):
    """All that changes while training, and all that going on with a run needs."""

    model: GPT
    optimizer_state: Any
    step: Int[Array, ""]


class StepMetrics(eqx.Module):
    """What each step of a dispatch reports."""

    loss: Float[Array, "*steps"]
    grad_norm: Float[Array, "*steps"]
    finite: Bool[Array, "*steps"]
    """Whether loss and gradient were; with `on_nonfinite` skip, whether the update was made."""


TrainSteps = Callable[[TrainState, Array, int], tuple[TrainState, StepMetrics]]


def init_state(model: GPT, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(
        model=model,
        optimizer_state=optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
        step=jnp.zeros((), jnp.int32),
    )


def make_train_steps(
    config: TrainingConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainSteps:
    """`train_steps(state, batches, count)`: `count` steps on the first `count` of the batches
    `[steps, batch, seq_and_next]`, in one compiled call that reuses the old state's memory.

    The count is data, not shape: however many steps are wanted, there is one program. Each device
    of the mesh runs it on its own rows of every batch and a copy of the state; all they exchange
    is the mean of their gradients (and Muon's share of work).
    """

    @eqx.filter_jit(donate="all")
    def train_steps(
        state: TrainState,
        batches: Int[Array, "steps batch seq_and_next"],
        count: Int[Array, ""],
        seed: Int[Array, ""],
    ) -> tuple[TrainState, StepMetrics]:
        arrays, static = eqx.partition(state, eqx.is_array)

        def on_device(arrays, batches, count, seed):
            state = eqx.combine(arrays, static)
            state, metrics = run_steps(config, optimizer, state, batches, count, seed)
            return eqx.filter(state, eqx.is_array), metrics

        everywhere = PartitionSpec()
        arrays, metrics = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(everywhere, PartitionSpec(None, "data"), everywhere, everywhere),
            out_specs=everywhere,
            # What leaves is the same everywhere by construction; JAX cannot see that of all_gather.
            check_vma=False,
        )(arrays, batches, count, seed)
        return eqx.combine(arrays, static), metrics

    # The seed, too, is data: a new one compiles nothing.
    return lambda state, batches, count: train_steps(
        state, batches, jnp.asarray(count), jnp.asarray(config.seed)
    )


def run_steps(
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batches: Int[Array, "steps batch seq_and_next"],
    count: Int[Array, ""],
    seed: Int[Array, ""],
) -> tuple[TrainState, StepMetrics]:
    """What each device does in `train_steps`. To be called in a `shard_map` with an axis `data`."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def body(i, carry):
        arrays, metrics = carry
        state, new = _step(config, optimizer, eqx.combine(arrays, static), batches[i], seed)
        metrics = jax.tree.map(lambda seen, now: seen.at[i].set(now), metrics, new)
        return eqx.filter(state, eqx.is_array), metrics

    blank = jnp.zeros(batches.shape[0])
    metrics = StepMetrics(blank, blank, blank == 0)
    arrays, metrics = lax.fori_loop(0, count, body, (arrays, metrics))
    return eqx.combine(arrays, static), metrics


def _step(
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Int[Array, "batch seq_and_next"],
    seed: Int[Array, ""],
) -> tuple[TrainState, StepMetrics]:
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    key = jax.random.fold_in(key, lax.axis_index("data"))
    loss, grads = lax.pmean(loss_and_grads(state.model, batch, config, key=key), "data")
    updates, optimizer_state = optimizer.update(
        grads, state.optimizer_state, eqx.filter(state.model, eqx.is_inexact_array)
    )
    model = eqx.apply_updates(state.model, updates)
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
    model: GPT,
    batch: Int[Array, "batch seq_and_next"],
    config: TrainingConfig,
    *,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """The mean loss of a batch and its gradient, in `config.accumulation` equal parts."""

    @eqx.filter_value_and_grad
    def loss_of(model, windows, key):
        model = cast(model, jnp.dtype(config.compute_dtype))
        drops = max(model.config.dropout, model.config.attention_dropout) > 0
        losses = window_losses(
            model, windows, label_smoothing=config.label_smoothing, key=key if drops else None
        )
        return jnp.mean(losses)

    key = jax.random.key(config.seed) if key is None else key
    if config.accumulation == 1:
        return loss_of(model, batch, key)

    def add_part(total, part):
        return jax.tree.map(jnp.add, total, loss_of(model, *part)), None

    parts = batch.reshape(config.accumulation, -1, batch.shape[-1])
    keys = jax.random.split(key, config.accumulation)
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array)))
    total, _ = lax.scan(add_part, zero, (parts, keys))
    return jax.tree.map(lambda x: x / config.accumulation, total)


def cast(model: T, dtype: Any) -> T:
    """`model` (any pytree) with its parameters in `dtype`; gradients through the cast keep the old
    dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
