"""Writing `metrics.jsonl` while a run is trained."""

import json
import time
from typing import Any

import jax

from gptlite.config import Config
from gptlite.machine.files import open_regular, sync
from gptlite.machine.processes import is_main_process
from gptlite.runs.checkpoints import Record
from gptlite.runs.folder import RunFolder
from gptlite.runs.metrics import FILE, Metrics, parsed
from gptlite.runs.stored import Evaluated, best_step
from gptlite.training.fit import Progress


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
