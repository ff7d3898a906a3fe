"""The training loop: dispatches of several steps, one after the other."""

import contextlib
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from gptlite.config import TrainingConfig
from gptlite.errors import UserError, require
from gptlite.machine.batch_reader import BatchReader
from gptlite.machine.mesh import local, place_batches, whole
from gptlite.machine.processes import max_over_processes
from gptlite.training.step import StepMetrics, TrainState, TrainSteps

# A stop is possible only between dispatches. So steps that take longer than this in total are
# dispatched in parts.
SECONDS_PER_DISPATCH = 2.0


@dataclass(frozen=True)
class Position:
    """Where training is, besides its arrays."""

    step: int = 0
    """Steps done."""
    losses: Sequence[float] = ()
    """Losses of the steps since the last line of metrics, without those of skipped updates."""
    skipped: int = 0
    """Updates that were skipped because they were not finite. With several seeds: in each dispatch,
    those of the seed that skipped the most."""
    step_seconds: float = 0.0
    """Time spent on steps, without compilation."""


@dataclass(frozen=True)
class Progress:
    """After a dispatch. `state` lives until the next one is asked for, which reuses its memory."""

    state: TrainState
    position: Position
    """Where training continues, with `state`."""
    train_loss: float | None
    """Nats per token: the mean over the steps since the last line of metrics, and over seeds; None
    if all updates were skipped."""
    grad_norm: float | None
    """Global norm of the last step's gradient, before clipping; None if it is not finite."""
    learning_rate: float
    """The learning rate of the last step (with muon: of the matrices)."""
    steps_per_second: float
    """The speed of the last dispatch."""
    log_due: bool
    """Whether a line of metrics is due: every `log_every` steps, and at evaluations."""
    evaluation_due: bool
    """Whether this step is a multiple of `eval_every`, or the last."""

    @property
    def step(self) -> int:
        """Steps done."""
        return self.position.step

    @property
    def model(self) -> Any:
        """The model, on one device unless it is sharded over several; lives as long as `state`."""
        return local(self.state.model)


class DivergenceError(UserError):
    """A loss or gradient is not finite."""

    def __init__(self, report: dict[str, Any], batch: PyTree | None):
        """`report`: `step`, `learning_rate`, and loss and gradient norm, or the validation loss.
        `batch`: the batch that caused it, if known."""
        self.report, self.batch = report, batch
        what = ", ".join(f"{name} {value:g}" for name, value in report.items() if name != "step")
        skip = "; or, if only a few batches are to blame, --training.on-nonfinite skip"
        super().__init__(
            f"Training has diverged at step {report['step']}: {what}. Train again with a lower "
            f"--optimizer.learning-rate, or --optimizer.clip-norm 1{'' if batch is None else skip}."
        )


def fit(
    state: TrainState,
    train_steps: TrainSteps,
    batch_fn: Callable[[int], PyTree],
    *,
    start: Position | None = None,
    stop_on_nonfinite: bool | None = None,
) -> Iterator[Progress]:
    """Train `state` up to `train_steps.steps`, and yield after every dispatch of steps.

    The steps are compiled before this returns, unless they already are.

    **Arguments:**

    - `state`: from `train_steps.init`, or restored. Its memory is reused.
    - `batch_fn(step)`: NumPy arrays, in any pytree, that begin with an axis of
      `training.batch_size` (of several processes, with the rows `train_steps.rows` of a batch). It
      is called ahead of the steps, on a thread. A run can be repeated only if the same step always
      gets the same batch.
    - `start`: where to continue, with a restored state.
    - `stop_on_nonfinite`: by default what `training.on_nonfinite` says.

    **Raises:** `UserError` if a batch has the wrong size, shapes, dtypes or vocabulary, or `state`
    is of another step than `start`; `DivergenceError` at a loss or gradient that is not finite.
    """
    training = train_steps.training
    start = Position() if start is None else start
    require(
        bool(np.all(np.asarray(state.step) == start.step)),
        f"The state is of step {state.step}, and training is to continue at {start.step}.",
    )
    stops = training.on_nonfinite == "stop" if stop_on_nonfinite is None else stop_on_nonfinite
    read = BatchReader(batch_fn, train_steps)
    try:
        # So that the speeds below are those of steps.
        train_steps.compile(state, read.first(start.step))
    except BaseException:
        read.close()
        raise

    def loop(state: TrainState) -> Iterator[Progress]:
        losses, per_dispatch = list(start.losses), 1
        step, skipped, step_seconds = start.step, start.skipped, start.step_seconds
        with contextlib.closing(read):
            while step < train_steps.steps:
                next_log_step = _next_log_step(step, training, train_steps.steps)
                count = min(per_dispatch, next_log_step - step)
                batches = read(step, count)
                began = time.perf_counter()
                state, metrics = train_steps(state, batches, count)
                metrics = jax.tree.map(lambda x, n=count: np.asarray(x)[..., :n], metrics)
                seconds = time.perf_counter() - began
                per_dispatch = int(SECONDS_PER_DISPATCH * count / seconds)
                per_dispatch = max(1, min(per_dispatch, read.capacity))
                (per_dispatch,) = max_over_processes(per_dispatch)  # the same in all processes
                step_seconds += seconds
                if stops and not metrics.finite.all():
                    raise _diverged(metrics, step, batches, train_steps)
                losses += metrics.loss[metrics.finite].tolist()
                skipped += int((~metrics.finite).sum(axis=-1).max())
                step += count
                log_due = step == next_log_step
                pending = () if log_due else tuple(losses)
                norm = float(metrics.grad_norm[..., -1].mean())
                yield Progress(
                    state=state,
                    position=Position(step, pending, skipped, step_seconds),
                    train_loss=float(np.mean(losses)) if losses else None,
                    grad_norm=norm if math.isfinite(norm) else None,
                    learning_rate=train_steps.learning_rate(step - 1),
                    steps_per_second=count / seconds,
                    log_due=log_due,
                    evaluation_due=step % training.eval_every == 0 or step == train_steps.steps,
                )
                if log_due:
                    losses = []

    return loop(state)


def _diverged(
    metrics: StepMetrics, step: int, batches: PyTree, train_steps: TrainSteps
) -> DivergenceError:
    """The error for the first step after `step` that is not finite."""
    bad = int(np.argmin(np.atleast_2d(np.asarray(metrics.finite)).all(axis=0)))
    report = {
        "step": step + bad + 1,
        "loss": float(metrics.loss[..., bad].mean()),
        "grad_norm": float(metrics.grad_norm[..., bad].mean()),
        "learning_rate": train_steps.learning_rate(step + bad),
    }
    at = jax.tree.map(lambda x: x[bad : bad + 1], batches)
    # Each of several processes has read its own rows.
    all_rows = jax.tree.map(whole, place_batches(at, train_steps.mesh))
    return DivergenceError(report, jax.tree.map(operator.itemgetter(0), all_rows))


def _next_log_step(step: int, training: TrainingConfig, steps: int) -> int:
    """The first step after `step` with a line of metrics, wherever the run was resumed."""
    since_evaluation = step % training.eval_every
    lines = since_evaluation // training.log_every + 1
    end = step - since_evaluation + min(lines * training.log_every, training.eval_every)
    return min(end, steps)
