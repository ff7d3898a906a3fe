"""The loop: dispatches of steps, evaluations in between."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gptlite.config import Config, TrainingConfig, UserError
from gptlite.models.gpt import GPT
from gptlite.text.batches import Batches, Windows
from gptlite.text.tokens import Split
from gptlite.training.checkpoint import Checkpoint, Position
from gptlite.training.evaluate import Evaluation
from gptlite.training.feed import make_feed
from gptlite.training.optimizer import make_optimizer, make_schedule
from gptlite.training.step import StepMetrics, TrainState, init_state, make_train_steps

# A stop is asked for between dispatches, and nobody likes to wait for it: where the steps of a line
# of metrics take longer than this, they are dispatched in parts.
SECONDS_PER_DISPATCH = 2.0


@dataclass(frozen=True)
class Progress:
    """After steps. `state` lives until the next one is asked for, which reuses its memory."""

    state: TrainState
    """On every device."""
    position: Position
    """What going on from here needs, beside the state."""
    step: int
    """Steps done."""
    tokens: int
    """Tokens trained on."""
    train_loss: float | None
    """Mean over the steps since the last line of metrics, in nats a token; None if all of them
    were skipped."""
    val_loss: float | None
    """Nats a token over the validation text, where it was due."""
    learning_rate: float
    """That of the last step (with muon: of the matrices)."""
    grad_norm: float | None
    """Global norm of the last step's gradient, before clipping; None if it is not finite."""
    skipped: int | None
    """Updates skipped so far; None where they are not."""
    tokens_per_second: float
    """Of the last dispatch."""
    step_seconds: float
    """Spent on steps so far, without compilation and evaluations."""
    seconds: float
    """Since the loop was entered, compilation and evaluations included."""
    ends_line: bool
    """Whether a line of metrics ends here. If not, it is a pause that was asked for."""

    @property
    def model(self) -> GPT:
        """The model, on one device of this process; lives as long as `state`."""
        return jax.tree.map(
            lambda x: x.addressable_data(0) if eqx.is_array(x) else x, self.state.model
        )

    def record(self) -> dict[str, Any]:
        """The line for `metrics.jsonl`: plain numbers, and `val_loss` and `skipped` only where
        there are such."""
        left_out = ["state", "position", "ends_line"]
        left_out += [name for name in ("val_loss", "skipped") if getattr(self, name) is None]
        return {name: value for name, value in vars(self).items() if name not in left_out}


class DivergenceError(UserError):
    """A loss or gradient that is not finite, and where it was."""

    def __init__(self, report: dict[str, Any], windows: Windows | None):
        """`report`: `step`, `loss`, `grad_norm`, `learning_rate`. `windows`: the batch, where one
        is to blame."""
        self.report, self.windows = report, windows
        what = ", ".join(f"{name} {value:g}" for name, value in report.items() if name != "step")
        super().__init__(
            f"Training has diverged at step {report['step']}: {what}. Try a lower "
            "--optimizer.learning-rate, or --optimizer.clip-norm 1"
            + (
                "."
                if windows is None
                else "; or, if only a few batches are to blame, --training.on-nonfinite skip."
            )
        )


def fit(
    config: Config,
    model: GPT,
    split: Split,
    *,
    resume: Checkpoint | None = None,
    pause: Callable[[], bool] = lambda: False,
) -> Iterator[Progress]:
    """Train a copy of `model` as `config` says, in an iterator that yields at every line of
    metrics: every `steps_per_dispatch` steps, and at evaluations.

    The batch is spread over all of JAX's devices, each of which holds all parameters. Everything is
    compiled before this returns.

    **Arguments:**

    - `resume`: where to go on from; `model` then gives only the shapes.
    - `pause`: asked between dispatches; yields there, too, where it says so.

    **Raises:** `UserError`, at once if the text is too short, is not in the model's vocabulary or
    the devices cannot share a batch; `DivergenceError`, later, at a loss or gradient that is not
    finite.
    """
    start = time.perf_counter()
    training = config.training
    context = config.model.context_length
    if split.largest >= model.vocab_size:
        raise UserError(
            f"The text has a token {split.largest}, and the model's vocabulary ends at "
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
    per_line = training.steps_per_dispatch
    capacity = min(per_line, training.steps)
    feed = make_feed(batches, capacity, by_row)
    tokens_per_step = training.batch_size * context
    skips = training.on_nonfinite == "skip"

    def rate(step: int) -> float:
        return config.optimizer.learning_rate * float(schedule(step))

    def dispatch(state: TrainState, step: int, count: int) -> tuple[TrainState, StepMetrics]:
        return train_steps(state, feed(step, count), count)

    # A copy, because a dispatch reuses the memory of its state, and the model is the caller's.
    copy = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model)
    state = init_state(copy, optimizer)
    if resume is not None:
        state = resume.load(state)
    state = eqx.filter_shard(state, everywhere)
    # No steps: compiles, so that the speeds below are those of steps.
    state, _ = dispatch(state, 0, 0)

    def loop(state: TrainState, at: Position) -> Iterator[Progress]:
        step, losses, skipped = at.step, list(at.losses), at.skipped
        step_seconds, earlier = at.step_seconds, at.seconds
        per_dispatch = 1
        while step < training.steps:
            line_ends = _line_end(step, training)
            count = min(per_dispatch, line_ends - step)
            began = time.perf_counter()
            state, metrics = dispatch(state, step, count)
            new_losses = np.asarray(metrics.loss)[:count]
            norms = np.asarray(metrics.grad_norm)[:count]
            took = time.perf_counter() - began
            step_seconds += took
            per_dispatch = max(1, min(per_line, int(SECONDS_PER_DISPATCH * count / took)))

            finite = np.asarray(metrics.finite)[:count]
            if not skips and not finite.all():
                bad = int(np.argmin(finite))
                report = {
                    "step": step + bad + 1,
                    "loss": float(new_losses[bad]),
                    "grad_norm": float(norms[bad]),
                    "learning_rate": rate(step + bad),
                }
                raise DivergenceError(report, batches(step + bad))
            losses += new_losses[finite].tolist()
            skipped += int(count - finite.sum())
            step += count
            last_rate = rate(max(0, step - skipped - 1))  # only updates count for the schedule

            ends_line = step == line_ends
            look = step % training.eval_every == 0 or step == training.steps
            val_loss = evaluate(state.model) if look else None
            if val_loss is not None and not math.isfinite(val_loss):
                report = {"step": step, "val_loss": val_loss, "learning_rate": last_rate}
                raise DivergenceError(report, None)
            if ends_line or pause():
                seconds = earlier + time.perf_counter() - start
                pending = () if ends_line else tuple(losses)
                yield Progress(
                    state=state,
                    position=Position(step, pending, skipped, step_seconds, seconds),
                    step=step,
                    tokens=step * tokens_per_step,
                    train_loss=float(np.mean(losses)) if losses else None,
                    val_loss=val_loss,
                    learning_rate=last_rate,
                    grad_norm=float(norms[-1]) if math.isfinite(norms[-1]) else None,
                    skipped=skipped if skips else None,
                    tokens_per_second=count * tokens_per_step / took,
                    step_seconds=step_seconds,
                    seconds=seconds,
                    ends_line=ends_line,
                )
            if ends_line:
                losses = []

    return loop(state, resume.record.position if resume else Position())


def _line_end(step: int, training: TrainingConfig) -> int:
    """The step at which the line of metrics ends that the step after `step` belongs to: the same
    wherever a run was stopped and went on."""
    since_look = step % training.eval_every
    lines = since_look // training.steps_per_dispatch + 1
    ends = step - since_look + min(lines * training.steps_per_dispatch, training.eval_every)
    return min(ends, training.steps)


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
