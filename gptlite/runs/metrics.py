"""The lines of `metrics.jsonl`: written while a run is trained, read then or later. They may be a
stranger's."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import msgspec

from gptlite.config import Config
from gptlite.machine.files import open_regular, sync
from gptlite.machine.processes import is_main_process
from gptlite.machine.records import Natural, Number
from gptlite.runs.checkpoints import Record
from gptlite.runs.folder import RunFolder
from gptlite.runs.stored import Evaluated, best_step
from gptlite.training.fit import Progress

FILE = "metrics.jsonl"
# Bytes of a line.
MAX_LINE = 2**12
# Lines in a row that are none of metrics, or after the step that is wanted.
MAX_USELESS = 10_000


class Metrics(msgspec.Struct, gc=False):
    """A line about a step. Losses are in nats per token."""

    step: Natural
    train_loss: Number | None
    """None where every update was skipped."""
    val_loss: Number | msgspec.UnsetType = msgspec.UNSET
    """Set where the model was evaluated."""


_DECODER = msgspec.json.Decoder(Metrics)


def parsed(line: bytes) -> Metrics | None:
    """None if it is no whole line of metrics."""
    try:
        # As a string, because msgspec does not check that the fields it skips are UTF-8.
        return _DECODER.decode(line.decode()) if line.endswith(b"\n") else None
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return None


def lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """The lines of metrics up to a step, in their order. After very many useless lines the rest is
    not read: a file of zeros has no end.

    **Raises:** `OSError` if there is no such file.
    """
    last = useless = 0
    with open_regular(path) as file:
        while useless < MAX_USELESS and (line := file.readline(MAX_LINE)):
            record = parsed(line)
            useless += 1
            if record is not None and last < record.step <= step:
                last, useless = record.step, 0
                yield line


def last_step(run: Path) -> int:
    """The step of the last whole line; 0 if there is none."""
    try:
        with open_regular(run / FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
            lines = file.read(MAX_LINE).splitlines(keepends=True)
    except OSError:
        return 0
    records = filter(None, map(parsed, reversed(lines)))
    return next((record.step for record in records), 0)


class MetricsLog:
    """Writes the metrics of a run that is trained."""

    def __init__(
        self, folder: RunFolder, config: Config, began: float, record: Record | None = None
    ):
        """`began`: when this process did, by `time.perf_counter`. `record`: of the checkpoint from
        which the run is resumed."""
        self._folder, self._config = folder, config
        self._began = began - (0.0 if record is None else record.seconds)
        self.last: dict[str, Any] = {} if record is None else record.last
        """The last line."""
        self.best = best_step(folder.path)
        """The best evaluation."""

    @property
    def seconds(self) -> float:
        """Since this process began, and in those that trained the run before."""
        return time.perf_counter() - self._began

    def add(self, progress: Progress, val_loss: float | None) -> None:
        """Add a line.

        **Raises:** `UserError` if it cannot be written.
        """
        training, model = self._config.training, self._config.model
        per_step = training.batch_size * model.context_length
        self.last = {
            "step": progress.step,
            "tokens": progress.step * per_step,
            "train_loss": progress.train_loss,
            "learning_rate": progress.learning_rate,
            "grad_norm": progress.grad_norm,
            "tokens_per_second": progress.steps_per_second * per_step,
            "step_seconds": progress.position.step_seconds,
            "seconds": self.seconds,
        }
        if val_loss is not None:
            self.last["val_loss"] = val_loss
            if self.best is None or val_loss <= self.best.val_loss:
                self.best = Evaluated(progress.step, val_loss)
        if training.on_nonfinite == "skip":
            self.last["skipped"] = progress.position.skipped
        if memory := jax.local_devices()[0].memory_stats():  # none of a CPU
            self.last["peak_device_bytes"] = memory["peak_bytes_in_use"]
        if not is_main_process():
            return
        line = json.dumps(self.last, allow_nan=False) + "\n"
        path = self._folder.path / FILE
        with self._folder.writing(), path.open("a", encoding="ascii") as file:
            file.write(line)

    def sync(self) -> None:
        """Force what is written to the disk, in the first process."""
        path = self._folder.path / FILE
        if is_main_process() and path.exists():
            with self._folder.writing():
                sync(path)

    def lines(self) -> list[Metrics]:
        """The whole lines of the file."""
        with open_regular(self._folder.path / FILE) as file:
            return list(filter(None, map(parsed, file)))
