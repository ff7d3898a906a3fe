"""Saving checkpoints, which Orbax does while training continues.

Orbax renames a checkpoint to its step only when it is complete, deletes those that need not be
kept, and removes what a killed process left.
"""

import contextlib
import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gptlite.config import Config
from gptlite.errors import require
from gptlite.machine.files import sync
from gptlite.machine.processes import RESUME, publish
from gptlite.runs.checkpoints import Record, describe_devices, digest, survey
from gptlite.runs.find import CHECKPOINTS
from gptlite.runs.folder import RunFolder
from gptlite.runs.frozen import frozen_in, frozen_sha256
from gptlite.runs.metrics_log import MetricsLog
from gptlite.runs.stored import MODEL, as_user_error, key_of, reason_of
from gptlite.runs.weights import named_leaves
from gptlite.training.fit import Progress
from gptlite.training.step import TrainState


class Saver:
    """Saves a run that is trained. A context manager: its exit ends Orbax's threads."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        corpus_sha256: str,
        parameters: int,
        record: Record | None = None,
    ):
        """`parameters`: numbers in the model. `record`: of the checkpoint from which the run is
        resumed."""
        self.step = 0 if record is None else record.position.step
        """The step of the last checkpoint."""
        self._folder, self._config = folder, config
        self._corpus_sha256, self._parameters = corpus_sha256, parameters
        self._frozen_sha256 = frozen_sha256(folder.path, config)
        self._saved_at = time.monotonic()
        self._checkpoints: Checkpoints | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def is_due(self) -> bool:
        """Whether the last checkpoint is `training.save_seconds` old."""
        return time.monotonic() - self._saved_at >= self._config.training.save_seconds

    def save(self, progress: Progress, metrics: MetricsLog) -> None:
        """Start to save a checkpoint, unless there is one of this step.

        **Raises:** `UserError` as `Checkpoints.save` does.
        """
        if progress.step == self.step:
            return
        if self._checkpoints is None:
            folder = self._folder.path / CHECKPOINTS
            self._checkpoints = Checkpoints(folder, self._config.training.keep)
        metrics.sync()  # the checkpoint relies on it
        record = Record(
            position=progress.position,
            seconds=metrics.seconds,
            last=metrics.last,
            corpus_sha256=self._corpus_sha256,
            frozen_sha256=self._frozen_sha256,
            parameters=self._parameters,
            devices=describe_devices(self._config.mesh),
        )
        best = None if metrics.best is None else metrics.best.step
        self._checkpoints.save(progress.state, record, best, frozen_in(self._config))
        self.step, self._saved_at = progress.step, time.monotonic()

    def check(self) -> None:
        """**Raises:** `UserError` if something started could not be written."""
        if self._checkpoints is not None:
            self._checkpoints.check()

    def wait(self) -> None:
        """Wait until everything started is written.

        **Raises:** `UserError` if it could not be written.
        """
        if self._checkpoints is not None:
            self._checkpoints.wait()


class Checkpoints:
    """The checkpoints of a run, as they are written."""

    def __init__(self, folder: Path, keep: int):
        """`keep`: how many of the newest are kept."""
        # Imported here: the import takes time, which the first training step need not wait for.
        import orbax.checkpoint as ocp

        _silence_orbax()
        self._ocp, self._folder, self._best = ocp, folder, _Best()
        policies = [ocp.checkpoint_managers.LatestN(keep), self._best]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,
        )
        # What is read from a stranger must not be packed: see stored.py.
        state = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        save = state.async_save

        async def async_save(directory: Any, *args: Any, **kwargs: Any) -> Any:
            return [_Writing(x, folder) for x in await save(directory, *args, **kwargs) or ()]

        state.async_save = async_save  # a subclass would need argument classes of its own
        record = ocp.JsonCheckpointHandler()
        save_record = record.async_save

        async def async_save_record(directory: Any, *args: Any, **kwargs: Any) -> Any:
            futures = await save_record(directory, *args, **kwargs) or ()
            return [_Synced(x, Path(directory)) for x in futures]

        record.async_save = async_save_record
        handlers = {"state": state, "record": record}
        with as_user_error(folder, "opened"):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_handlers=handlers
            )

    def save(
        self,
        state: TrainState,
        record: Record,
        best: int | None = None,
        is_frozen: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Start to write the checkpoint of `record.position.step`, without the parameters that are
        frozen. `state` may change as soon as this returns. `best`: the step whose checkpoint is
        kept besides the newest.

        **Raises:** `UserError` if a number in `state` is NaN, or this checkpoint or the one before
        could not be written.
        """
        ocp, step = self._ocp, record.position.step
        path = self._folder / str(step)
        arrays = {
            name: array
            for name, array in named_leaves(state).items()
            if not (name.startswith(MODEL) and is_frozen(name.removeprefix(MODEL)))
        }
        sums = survey(arrays)
        for name, (is_nan, *_) in sums.items():
            # Infinity is no mistake: a custom block may have a mask of -inf.
            require(not is_nan, f"The checkpoint {path} is not written: {name} is NaN.")
        fields = msgspec.to_builtins(record)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave({key_of(name): x for name, x in arrays.items()}),
            record=ocp.args.JsonSave({**fields, "digest": digest(arrays, sums, fields)}),
        )
        self.wait()
        self._best.step = best
        with as_user_error(path, "written"):
            if not self._manager.save(step, args=items):
                raise ValueError(f"there is a checkpoint of step {self._manager.latest_step()}")

    def wait(self) -> None:
        """Wait until everything started is written.

        **Raises:** `UserError` if it could not be written.
        """
        with as_user_error(self._folder, "written"):
            self._manager.wait_until_finished()

    def check(self) -> None:
        """**Raises:** `UserError` if something started could not be written."""
        with as_user_error(self._folder, "written"):
            self._manager.check_for_errors()

    def close(self) -> None:
        """End Orbax's threads. Errors there are not raised: `wait` raises them."""
        with contextlib.suppress(Exception):
            self._manager.close()


class _Best:
    """Orbax's policy that one step is preserved."""

    def __init__(self):
        self.step: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """As Orbax asks it."""
        del context
        return [checkpoint.step == self.step for checkpoint in checkpoints]


class _Writing:
    """Arrays that are being written. If one of several processes fails, Orbax waits for the others,
    and they for it: so the error is published at once."""

    def __init__(self, future: Any, folder: Path):
        self._future, self._folder = future, folder

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end, as Orbax's futures do."""
        try:
            return self._future.result(timeout)
        except Exception as error:
            publish(
                f"A checkpoint in {self._folder} cannot be written: {reason_of(error)}. {RESUME}"
            )
            raise


class _Synced:
    """A record that is being written. Without this, a power cut may leave an empty one, when older
    checkpoints are deleted already. (TensorStore syncs arrays.)"""

    def __init__(self, future: Any, folder: Path):
        self._future, self._folder = future, folder

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end, as Orbax's futures do."""
        result = self._future.result(timeout)
        for file in self._folder.glob("*"):
            sync(file)
        return result


@functools.cache
def _silence_orbax() -> None:
    """Stop Orbax from logging, in the whole process. It logs every phase of every save, and errors
    that it raises as well. When several operations fail together, it raises the error of one and
    closes its event loop; Python reports the others, and those not yet started, when it collects
    them."""
    from absl import logging as absl_logging

    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        message = str(unraisable.exc_value)
        if "Event loop is closed" not in message and "TensorStore details" not in message:
            before(unraisable)

    sys.unraisablehook = hook
