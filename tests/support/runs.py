"""Runs as training leaves them."""

import contextlib
from pathlib import Path

import numpy as np

from gptlite.config import OptimizerConfig, TrainingConfig
from gptlite.machine.mesh import make_mesh
from gptlite.models.gpt import GPT
from gptlite.runs.checkpoints import Record
from gptlite.runs.find import CHECKPOINTS, checkpoint_of
from gptlite.runs.saving import Checkpoints
from gptlite.runs.stored import MODEL, best_step
from gptlite.training.fit import Position
from gptlite.training.step import TrainSteps
from support.kill_loop import arrays


def save_checkpoint(
    run: Path,
    model: GPT,
    step: int = 7,
    val_loss: float | None = 1.5,
    parameters: int = 1000,
) -> None:
    """A checkpoint of a model that has been trained for some steps, and evaluated unless `val_loss`
    is None. `parameters`: as it says."""
    steps = TrainSteps(model, OptimizerConfig(name="adamw"), TrainingConfig(), make_mesh())
    last = {"step": step, "tokens": step, "step_seconds": 1.0}
    last |= {} if val_loss is None else {"val_loss": val_loss}
    record = Record(last, parameters, Position(step), 1.0, "", "", "1 x cpu")
    with contextlib.closing(Checkpoints(run / CHECKPOINTS, 3)) as checkpoints:
        checkpoints.save(steps.init(model), record)
        checkpoints.wait()


def weights(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """The model's arrays in the checkpoint of a step, by default the best one, read by Orbax."""
    if step is None:
        best = best_step(run)
        assert best is not None
        step = best.step
    state = arrays(checkpoint_of(run, step) / "state")
    return {x.removeprefix(MODEL): a for x, a in state.items() if x.startswith(MODEL)}
