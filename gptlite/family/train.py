"""Training of any model, on any batches, in one call."""

import signal
import sys
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from gptlite.config import OptimizerConfig, TrainingConfig
from gptlite.errors import require
from gptlite.machine.mesh import make_mesh
from gptlite.machine.progress import log, progress_bar
from gptlite.machine.pytrees import Trainable, is_parameter
from gptlite.machine.stop import Stop
from gptlite.training.fit import fit
from gptlite.training.step import LossFn, LossMask, TrainSteps

M = TypeVar("M", bound=eqx.Module)


def train(
    model: M,
    loss_fn: LossFn,
    batch_fn: Callable[[int], PyTree],
    optimizer: OptimizerConfig,
    training: TrainingConfig,
    *,
    loss_mask: LossMask | None = None,
    trainable: Trainable = is_parameter,
    evaluate: Callable[[M], str] = lambda model: "",
) -> M:
    """A copy of `model`, trained for `training.steps` steps. Progress is shown.

    All devices share every batch (`gptlite.set_up_jax(2)`, at the start of a program, makes two
    devices of a CPU). Nothing is saved. After a stop signal the step is finished; then Ctrl-C
    raises `KeyboardInterrupt`, and another signal exits. These fields of `training` are for
    `gptlite train` only: `cpu_devices`, `sample_tokens`, `save_seconds`, `keep`.

    **Arguments:**

    - `model`: what the copy begins with.
    - `optimizer`, `training`: how it is trained.
    - `loss_fn(model, batch, label_smoothing=, key=)`: losses in nats, of any shape, whose mean is
      minimised; `loss_mask(batch)`: False where one does not count; `trainable`: which parameters
      are trained, as a filter for `eqx.partition`. `TrainSteps` says more.
    - `batch_fn(step)`: NumPy arrays, in any pytree, that begin with an axis of
      `training.batch_size`. Training can be repeated only if the same step always gets the same
      batch. Called on a thread.
    - `evaluate(model)`: called every `training.eval_every` steps and at the end. Its result is
      printed. The model is valid only during the call.

    **Raises:** `UserError` if `training.freeze` or `model.lora` comes without `trainable`, the
    devices cannot share a batch, the optimizer does not fit the model, or a batch has the wrong
    size or shapes; `DivergenceError` at a loss or gradient that is not finite.
    """
    lora = getattr(getattr(model, "config", None), "lora", None)
    require(
        lora is None or trainable is not is_parameter,
        f"Of a model with model.lora, {lora!r}, adapters alone are trained: give trainable, as "
        "gptlite.trainable makes it.",
    )
    train_steps = TrainSteps(
        model,
        optimizer,
        training,
        make_mesh(),
        loss_fn=loss_fn,
        loss_mask=loss_mask,
        trainable=trainable,
    )

    def local_batch(step: int) -> PyTree:
        if len(train_steps.rows) == training.batch_size:
            return batch_fn(step)
        return jax.tree.map(lambda x: x[train_steps.rows], batch_fn(step))

    stop = Stop()
    with stop, progress_bar("training", training.steps, unit="step") as bar:
        for progress in fit(train_steps.init(model), train_steps, local_batch):
            model = progress.model
            loss = "none" if progress.train_loss is None else f"{progress.train_loss:.4f}"
            bar.set_postfix_str(f"loss {loss}", refresh=False)
            bar.update(progress.step - bar.n)
            if progress.evaluation_due:
                line = f"step {progress.step}/{training.steps}  loss {loss}  {evaluate(model)}"
                log(line.rstrip())
            if stop.requested:
                break
    if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if stop.requested:
        sys.exit(stop.exit_code)
    return model
