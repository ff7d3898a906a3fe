"""The loop: dispatches of steps, evaluations in between."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gptlite.config import Config, UserError
from gptlite.models.gpt import GPT
from gptlite.text.batches import Batches, Split
from gptlite.training.evaluate import Evaluation
from gptlite.training.optimizer import make_optimizer, make_schedule
from gptlite.training.step import StepMetrics, TrainState, init_state, make_train_steps


@dataclass(frozen=True)
class Progress:
    """After a dispatch. `state` lives until the next one is asked for, which reuses its memory."""

    state: TrainState
    """On every device."""
    step: int
    """Steps done."""
    tokens: int
    """Tokens trained on."""
    train_loss: float
    """Mean over the steps of this dispatch, in nats a token."""
    val_loss: float | None
    """Nats a token over the whole validation text, where it was due."""
    learning_rate: float
    """That of the last step (with muon: of the matrices)."""
    grad_norm: float
    """Global norm of the last step's gradient, before clipping."""
    tokens_per_second: float
    """Of this dispatch."""
    step_seconds: float
    """Spent on steps so far, without compilation and evaluations."""
    seconds: float
    """Since the loop was entered, compilation and evaluations included."""

    @property
    def model(self) -> GPT:
        """The model, on one device of this process; lives as long as `state`."""
        return jax.tree.map(
            lambda x: x.addressable_data(0) if eqx.is_array(x) else x, self.state.model
        )

    def record(self) -> dict[str, Any]:
        """The line for `metrics.jsonl`: all but the state, and `val_loss` only where evaluated."""
        fields = {name: value for name, value in vars(self).items() if name != "state"}
        return {name: value for name, value in fields.items() if value is not None}


def fit(config: Config, model: GPT, split: Split) -> Iterator[Progress]:
    """Train a copy of `model` as `config` says, in an iterator that yields after every dispatch.

    The batch is spread over all of JAX's devices, each of which holds all parameters.

    **Raises:** `UserError`, at once if the text is too short, is not in the model's vocabulary or
    the devices cannot share a batch; later if the loss stops being a number.
    """
    training = config.training
    context = config.model.context_length
    largest = int(max(split.train.max(initial=0), split.validation.max(initial=0)))
    if largest >= model.vocab_size:
        raise UserError(
            f"The text has a token {largest}, and the model's vocabulary ends at "
            f"{model.vocab_size - 1}: they belong to different tokenizers."
        )
    batches = Batches(split.train, training.batch_size, context, training.seed)
    mesh = data_mesh(training.batch_size // training.accumulation)
    evaluate = Evaluation(split.validation, context, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_row = NamedSharding(mesh, PartitionSpec(None, "data"))

    optimizer = make_optimizer(config.optimizer, training.steps, model, axis_name="data")
    schedule = make_schedule(config.optimizer, training.steps)
    train_steps = make_train_steps(training, optimizer, mesh)
    per_dispatch = min(training.steps_per_dispatch, training.steps)
    tokens_per_step = training.batch_size * context

    def dispatch(state: TrainState, step: int, count: int) -> tuple[TrainState, StepMetrics]:
        windows = np.zeros((per_dispatch, training.batch_size, context + 1), np.int32)
        for i in range(count):
            windows[i] = batches(step + i)
        return train_steps(state, jax.device_put(windows, by_row), count)

    def loop() -> Iterator[Progress]:
        start = time.perf_counter()
        # A copy, because a dispatch reuses the memory of its state, and the model is the caller's.
        copy = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)
        state = eqx.filter_shard(init_state(copy, optimizer), everywhere)
        # No steps: compiles, so that the speeds below are those of steps.
        state, _ = dispatch(state, 0, 0)
        step, step_seconds = 0, 0.0
        while step < training.steps:
            until_look = training.eval_every - step % training.eval_every
            count = min(per_dispatch, until_look, training.steps - step)
            began = time.perf_counter()
            state, metrics = dispatch(state, step, count)
            losses = np.asarray(metrics.loss)[:count]
            took = time.perf_counter() - began
            step_seconds += took
            _check_finite(losses, step, config)
            step += count
            look = step % training.eval_every == 0 or step == training.steps
            val_loss = evaluate(state.model) if look else None
            if val_loss is not None:
                _check_finite(np.array([val_loss]), step - 1, config)
            yield Progress(
                state=state,
                step=step,
                tokens=step * tokens_per_step,
                train_loss=float(losses.mean()),
                val_loss=val_loss,
                learning_rate=config.optimizer.learning_rate * float(schedule(step - 1)),
                grad_norm=float(metrics.grad_norm[count - 1]),
                tokens_per_second=count * tokens_per_step / took,
                step_seconds=step_seconds,
                seconds=time.perf_counter() - start,
            )

    return loop()


def data_mesh(rows: int) -> Mesh:
    """All devices in a row, along the axis `data`.

    **Raises:** `UserError` if they cannot share `rows` evenly.
    """
    devices = jax.device_count()
    if rows % devices:
        raise UserError(
            f"training.batch_size / training.accumulation must be a multiple of the {devices} "
            f"devices that share it, got {rows}."
        )
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))


def _check_finite(losses: np.ndarray, step: int, config: Config) -> None:
    if math.isfinite(losses.sum()):
        return
    bad = int(np.argmin(np.isfinite(losses)))
    raise UserError(
        f"The loss became {losses[bad]} at step {step + bad + 1}: training has diverged. Try a "
        f"--optimizer.learning-rate below {config.optimizer.learning_rate:g}, or "
        "--optimizer.clip-norm 1."
    )
