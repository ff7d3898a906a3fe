"""The runs that there are, and how far they are. Training that goes on is not disturbed."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gptlite.config import Config
from gptlite.errors import UserError
from gptlite.machine.files import folders_with, is_locked
from gptlite.machine.records import read_record
from gptlite.presets import PRESETS
from gptlite.runs.find import CHECKPOINTS, list_steps
from gptlite.runs.metrics import FILE as METRICS, last_step
from gptlite.runs.saved_config import load_config
from gptlite.runs.stored import best_step, newest_summary

State = Literal["running", "stopped", "done", "diverged"]
# The batch at which a run has diverged, the last time.
DIVERGED = "nonfinite.json"
# The files that a row of the list is read from.
FILES = (
    "config.json",
    METRICS,
    CHECKPOINTS,
    "result.json",
    DIVERGED,
)


@dataclass(frozen=True)
class Overview:
    """A run in a list of runs. A field that cannot be read is None."""

    name: str
    began: float
    """In seconds since 1970, as `changed`."""
    changed: float
    configured: float
    """When its config was written."""
    state: State
    preset: str | None
    """The one whose model it has."""
    parameters: int | None
    step: int
    """That of the last line of its metrics or, without any, of its newest checkpoint."""
    steps: int
    best_loss: float | None
    """The best validation loss so far, in nats per token."""


def list_runs(folder: Path) -> list[Overview]:
    """The runs in a folder, the newest first."""
    overviews = map(_overview, folders_with(folder, "config.json"))
    return sorted((run for run in overviews if run is not None), key=lambda run: -run.began)


def _overview(path: Path) -> Overview | None:
    stamps = tuple(_stamp(path / name) for name in FILES)
    overview = _read(path, stamps)
    if overview is None:
        return None
    real = path.resolve()  # as the run's own lock
    running = is_locked(real.with_name(f".{real.name}.lock"))
    return dataclasses.replace(overview, state="running") if running else overview


def _stamp(path: Path) -> tuple[float, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


@lru_cache(maxsize=4096)
def _read(path: Path, stamps: tuple[tuple[float, int], ...]) -> Overview | None:
    """The overview of a run whose files have these stamps."""
    try:
        config = load_config(path / "config.json")
    except UserError:
        return None
    result = _json(path / "result.json")
    best, newest = best_step(path), newest_summary(path)
    step = last_step(path)
    no_metrics = step == 0  # nor a result, if the run was trained in Python
    if no_metrics and newest is not None:
        step = list_steps(path)[0]
    state: State = "stopped"
    if (result is not None or no_metrics) and step >= config.training.steps:
        state = "done"
    elif (path / DIVERGED).exists():
        at = (_json(path / DIVERGED) or {}).get("step")
        went_on = type(at) is int and at < step  # it was resumed
        state = "stopped" if went_on else "diverged"
    return Overview(
        name=path.name,
        began=_stamp(path / "tokenizer.json")[0],  # never written again
        changed=max(stamp for stamp, _ in stamps),
        configured=_stamp(path / "config.json")[0],
        state=state,
        preset=_preset(config),
        parameters=None if newest is None else newest.parameters,
        step=step,
        steps=config.training.steps,
        best_loss=None if best is None else best.val_loss,
    )


def _preset(config: Config) -> str | None:
    return next((name for name, (_, c) in PRESETS.items() if c.model == config.model), None)


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return read_record(path, dict[str, Any])
    except (OSError, ValueError):
        return None
