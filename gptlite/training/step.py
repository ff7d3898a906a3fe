"""The optimizer step: everything between a batch of ids and new parameters, compiled as one."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, Shaped

from gptlite.config import TrainingConfig
from gptlite.training.loss import window_losses

T = TypeVar("T")


class TrainState(eqx.Module):
    """All that changes while training, and all that going on with a run needs."""

    model: Any
    optimizer_state: Any
    step: Int[Array, ""]


class StepMetrics(eqx.Module):
    """What each step of a dispatch reports."""

    loss: Float[Array, "*steps"]
    grad_norm: Float[Array, "*steps"]
    finite: Bool[Array, "*steps"]
    """Whether loss and gradient were; with `on_nonfinite` skip, whether the update was made."""


TrainSteps = Callable[[TrainState, PyTree, int], tuple[TrainState, StepMetrics]]

# `losses(model, batch, label_smoothing=, key=)`: in nats, any shape, of which the mean is taken.
Losses = Callable[..., Float[Array, "..."]]


def init_state(model: eqx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(
        model=model,
        optimizer_state=optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
        step=jnp.zeros((), jnp.int32),
    )


def make_train_steps(
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    losses: Losses = window_losses,
) -> TrainSteps:
    """`train_steps(state, batches, count)`: `count` steps on the first `count` of the batches, in
    one compiled call that reuses the old state's memory.

    Batches are `[steps, batch, seq_and_next]`, or what `losses` wants: arrays that all begin with
    the axes `steps batch`. A step's loss is the mean over devices of the mean over their rows.

    The count is data, not shape: however many steps are wanted, there is one program. Each device
    of the mesh runs it on its own rows of every batch and a copy of the state; all they exchange
    is the mean of their gradients (and Muon's share of work).
    """

    @eqx.filter_jit(donate="all")
    def train_steps(
        state: TrainState,
        batches: PyTree[Shaped[Array, "steps batch ..."]],
        count: Int[Array, ""],
        seed: Int[Array, ""],
    ) -> tuple[TrainState, StepMetrics]:
        arrays, static = eqx.partition(state, eqx.is_array)

        def on_device(arrays, batches, count, seed):
            state = eqx.combine(arrays, static)
            state, metrics = run_steps(config, optimizer, state, batches, count, seed, losses)
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
    batches: PyTree[Shaped[Array, "steps batch ..."]],
    count: Int[Array, ""],
    seed: Int[Array, ""],
    losses: Losses = window_losses,
) -> tuple[TrainState, StepMetrics]:
    """What each device does in `train_steps`. To be called in a `shard_map` with an axis `data`."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def body(i, carry):
        arrays, metrics = carry
        batch = jax.tree.map(lambda batch: batch[i], batches)
        state, new = _step(config, optimizer, eqx.combine(arrays, static), batch, seed, losses)
        metrics = jax.tree.map(lambda seen, now: seen.at[i].set(now), metrics, new)
        return eqx.filter(state, eqx.is_array), metrics

    blank = jnp.zeros(len(jax.tree.leaves(batches)[0]))
    metrics = StepMetrics(blank, blank, blank == 0)
    arrays, metrics = lax.fori_loop(0, count, body, (arrays, metrics))
    return eqx.combine(arrays, static), metrics


def _step(
    config: TrainingConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: PyTree[Shaped[Array, "batch ..."]],
    seed: Int[Array, ""],
    losses: Losses,
) -> tuple[TrainState, StepMetrics]:
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    key = jax.random.fold_in(key, lax.axis_index("data"))
    found = loss_and_grads(state.model, batch, config, losses, key=key)
    loss, grads = lax.pmean(found, "data")
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
    model: Any,
    batch: PyTree[Shaped[Array, "batch ..."]],
    config: TrainingConfig,
    losses: Losses = window_losses,
    *,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, ""], PyTree]:
    """The mean loss of a batch and its gradient, in `config.accumulation` equal parts."""

    @eqx.filter_value_and_grad
    def loss_of(model, batch, key):
        model = cast(model, jnp.dtype(config.compute_dtype))
        drops = max(model.config.dropout, model.config.attention_dropout) > 0
        key = key if drops else None
        return jnp.mean(losses(model, batch, label_smoothing=config.label_smoothing, key=key))

    key = jax.random.key(config.seed) if key is None else key
    if config.accumulation == 1:
        return loss_of(model, batch, key)

    def add_part(total, part):
        return jax.tree.map(jnp.add, total, loss_of(model, *part)), None

    parts = jax.tree.map(lambda x: x.reshape(config.accumulation, -1, *x.shape[1:]), batch)
    keys = jax.random.split(key, config.accumulation)
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array)))
    total, _ = lax.scan(add_part, zero, (parts, keys))
    return jax.tree.map(lambda x: x / config.accumulation, total)


def cast(model: T, dtype: Any) -> T:
    """`model` (any pytree) with its parameters in `dtype`; gradients through the cast keep the old
    dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
