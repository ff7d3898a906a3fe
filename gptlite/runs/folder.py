"""A run's folder, as training writes it.

    config.json        the config
    tokenizer.json     the whole tokenizer
    custom/            copies of the files with custom blocks
    metrics.jsonl      one JSON object a line
    best.safetensors   weights at the best evaluation
    last.safetensors   weights at the last checkpoint
    frozen.safetensors those that stay as they are, if there are any
    checkpoints/       what `--resume` needs: see checkpoints.py
    damaged/           checkpoints that could not be used
    nonfinite.json     where training diverged, with the batch
    loss.png           the loss curves
    result.json        the result, at the end
    tensorboard/       with `--log.to tensorboard`: its event files
    tracked.json       with `--log.to`: what the run is called there

All files are plain data: nothing in a run is executed when it is loaded.
"""

import contextlib
import json
import math
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import numpy as np
from filelock import AcquireReturnProxy

from gptlite.config import Config
from gptlite.custom import custom_arguments
from gptlite.errors import UserError, require
from gptlite.machine.files import (
    lock,
    open_regular,
    remove,
    sha256_of,
    sync,
    write_atomically,
    write_json,
)
from gptlite.machine.mesh import mesh_shape
from gptlite.machine.processes import (
    broadcast_from_main,
    is_main_process,
    process_count,
    wait_for_main,
)
from gptlite.machine.progress import log
from gptlite.machine.pytrees import size_of
from gptlite.runs import metrics
from gptlite.runs.checkpoints import Checkpoint, Checkpoints, Record, list_steps
from gptlite.runs.find import check_free
from gptlite.runs.frozen import frozen_in
from gptlite.runs.saved_config import (
    changed_sources,
    corpus_arguments,
    load_config,
    save_config,
    save_sources,
)
from gptlite.runs.weights import (
    FROZEN,
    Evaluated,
    gather_to_main,
    named_leaves,
    read_arrays,
    read_evaluated,
    save_weights,
)
from gptlite.text.tokenizer import Tokenizer
from gptlite.training.fit import DivergenceError, Progress
from gptlite.training.step import TrainState

# How long a file may take to be seen on another host. (NFS keeps what it has seen for a minute.)
SEEN_SECONDS = 90.0
# `is_locked` takes the lock briefly: wait that long before refusing.
LOCK_SECONDS = 1.0


class RunFolder:
    """Writes a run. A context manager: its exit ends the checkpoint threads and releases the lock.

    Every method raises `UserError` where the folder cannot be written.
    """

    def __init__(self, path: Path, options: Sequence[str] = ()):
        """`options`: of the command, to be given again when the run is resumed."""
        self.path = path
        self._options = options
        self.best: Evaluated | None = None
        """The best evaluation."""
        self.last: dict[str, Any] = {}
        """The last line of metrics."""
        self._lock: AcquireReturnProxy | None = None
        self._checkpoints: Checkpoints | None = None
        self._config = Config()
        self._corpus_sha256 = self._frozen = ""
        self._weights: list[tuple[str, dict[str, np.ndarray], Evaluated]] = []
        self._saved: int | None = None
        self._saved_at = self._began_at = time.monotonic()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._lock is not None:
            self._lock.lock.release()

    def lock(self) -> None:
        """Lock the run.

        **Raises:** `UserError` if another process trains it.
        """
        # Next to the run folder, because `--overwrite` replaces the folder. Resolved, so that all
        # spellings of the path share one lock.
        if self._lock is not None or not is_main_process():
            return
        busy = f"The run {self.path} is being trained by another process: wait for it, or stop it."
        with self._writing():
            path = self.path.resolve()
            self._lock = lock(path.with_name(f".{path.name}.lock"), busy, LOCK_SECONDS)

    def create(
        self,
        config: Config,
        tokenizer: Tokenizer,
        corpus_sha256: str,
        *,
        overwrite: bool,
        frozen: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        """Make the folder, in the first process. `frozen`: the parameters that stay as they are.

        **Raises:** `UserError` if there is something at `path` (with `overwrite`: something that
        is not a run), or it cannot be written.
        """
        if is_main_process():
            self._create(config, tokenizer, frozen, overwrite=overwrite)
        self._check_shared()
        self._start(config, corpus_sha256, seconds=0.0)

    def _create(
        self,
        config: Config,
        tokenizer: Tokenizer,
        frozen: Mapping[str, np.ndarray],
        *,
        overwrite: bool,
    ) -> None:
        check_free(self.path, overwrite=overwrite)
        self.lock()
        check_free(self.path, overwrite=overwrite)  # another process may have created it since
        # Written under another name and renamed when complete.
        new, old = (self.path.with_name(f".{self.path.name}.{what}") for what in ("new", "old"))
        with self._writing():
            try:
                for leftover in (new, old):
                    remove(leftover)
                new.mkdir()
                save_config(config, new / "config.json")
                write_json(new / "tokenizer.json", tokenizer.to_json())
                save_sources(new, config.model)
                if frozen:
                    save_weights(new / FROZEN, dict(frozen), Evaluated(0))
                if self.path.exists():
                    self.path.rename(old)
                new.rename(self.path)
            finally:
                for leftover in (new, old):
                    remove(leftover)

    def _check_shared(self) -> None:
        """Waits until all processes see the folder, as the first one has left it.

        **Raises:** `UserError` if one of them does not.
        """
        if process_count() == 1:
            return
        mark = self.path / f".{broadcast_from_main('mark', secrets.token_hex(8))}.part"
        with self._writing():
            if is_main_process():
                mark.touch()
            wait_for_main("the run folder")
            end = time.monotonic() + SEEN_SECONDS
            while not mark.exists():
                if time.monotonic() > end:
                    raise UserError(
                        f"The run folder {self.path.absolute()} is not shared by all processes: "
                        "process 0 has written it, and this process does not see it. Start all of "
                        "them in a folder of one disk that all hosts have."
                    )
                time.sleep(0.2)
            wait_for_main("all processes")
            if is_main_process():
                mark.unlink(missing_ok=True)

    def open(self) -> None:
        """Lock a run that is to be resumed. Changes nothing in it.

        **Raises:** `UserError` if another process trains the run, it has no checkpoint, or there is
        anything but folders and regular files in it: a link could lead out of it.
        """
        self.lock()

        def fail(error: OSError) -> NoReturn:
            raise UserError(f"The run {self.path} cannot be read: {error}.") from error

        for folder, folders, files in os.walk(self.path, onerror=fail):
            for entry in (Path(folder, name) for name in (*folders, *files)):
                mode = entry.lstat().st_mode
                require(
                    stat.S_ISREG(mode) or stat.S_ISDIR(mode),
                    f"{entry} is a link or no regular file. A run with such files is not resumed.",
                )
        if not list_steps(self.path / "checkpoints"):
            raise UserError(
                f"There is no checkpoint in {self.path} yet. Start the run again, with --overwrite."
            )

    def find_checkpoint(
        self, abstract_state: TrainState, config: Config, corpus_sha256: str
    ) -> Checkpoint:
        """The newest checkpoint that is not damaged, with its arrays sharded over devices as those
        of `abstract_state` are. Changes nothing.

        **Raises:** `UserError` if there is none, the run was trained on another corpus, or none of
        the steps in `config` is left to do.
        """
        checkpoint = self._newest(abstract_state, self._read_frozen(abstract_state, config))
        record = checkpoint.record
        require(
            record.frozen_sha256 == self._frozen_sha256(config),
            f"{self.path / FROZEN} is damaged: its checksum is not that of the checkpoint.",
        )
        step, steps = record.position.step, config.training.steps
        if corpus_sha256 != record.corpus_sha256:
            raise UserError(
                "The corpus is not the text that this run was trained on: its sha256 is "
                f"{corpus_sha256}, and was {record.corpus_sha256}."
            )
        # A run may have been stopped between its last checkpoint and its result.
        evaluated = record.last.get("step") == step and "val_loss" in record.last
        only_result_missing = evaluated and not (self.path / "result.json").exists()
        if step > steps or (step == steps and not only_result_missing):
            raise UserError(
                f"The run {self.path} has done {step} steps; to extend it, give "
                f"--training.steps above that, got {steps}."
            )
        if record.devices != _devices(config):
            log(
                f"This run was trained on {record.devices} and continues on {_devices(config)}: "
                "from here, sums are added up in another order."
            )
        return checkpoint

    def _read_frozen(self, abstract_state: TrainState, config: Config) -> dict[str, jax.Array]:
        is_frozen = frozen_in(config)
        leaves = named_leaves(abstract_state.model)
        wanted = {name: leaf for name, leaf in leaves.items() if is_frozen(name)}
        arrays = read_arrays(self.path / FROZEN, wanted) if wanted else {}
        return {x: jax.device_put(array, wanted[x].sharding) for x, array in arrays.items()}

    def _frozen_sha256(self, config: Config) -> str:
        is_any = config.model.lora is not None or config.training.freeze
        return sha256_of(self.path / FROZEN) if is_any else ""

    def _newest(self, abstract_state: TrainState, frozen: Mapping[str, jax.Array]) -> Checkpoint:
        folder = self.path / "checkpoints"
        # TensorStore reads whole files, of whatever size, and ends the process if they do not fit.
        most = size_of(abstract_state) + 2**20
        for file in folder.rglob("*"):
            if (size := file.lstat().st_size) > most:
                raise UserError(
                    f"{file} is no file of a checkpoint of this run: it has {size:,} bytes, and at "
                    f"most {most:,} are expected."
                )
        checkpoints = Checkpoints(folder)
        with contextlib.closing(checkpoints):
            for step in list_steps(folder):
                try:
                    return checkpoints.restore(step, abstract_state, frozen)
                except UserError as error:
                    log(f"{error} Looking for an older checkpoint.")
        raise UserError(f"No checkpoint in {self.path} can be used.")

    def resume(self, record: Record, config: Config) -> None:
        """Bring the folder back to the state in which the checkpoint with `record` was written."""
        step = record.position.step
        if is_main_process():
            self._bring_back(step, config)
        self._check_shared()
        # The best weights may be newer than the checkpoint. Training then repeats that step.
        self.best = read_evaluated(self.path / "best.safetensors")
        if self.best is None and step >= config.training.eval_every:
            log("The best weights so far are lost: best.safetensors is missing or damaged.")
        self.last, self._saved = record.last, step
        self._start(config, record.corpus_sha256, seconds=record.seconds)

    def _bring_back(self, step: int, config: Config) -> None:
        folder = self.path / "checkpoints"
        for changed in changed_sources(self.path, config.model):
            log(f"{changed} has changed since the run began.")
        with self._writing():
            for damaged in list_steps(folder):
                if damaged > step:
                    self._move_damaged(folder / str(damaged))
            for leftover in (*self.path.glob(".*.part"), self.path / "result.json"):
                leftover.unlink(missing_ok=True)
            self._truncate_metrics(step)
            if load_config(self.path / "config.json") != config:
                save_config(config, self.path / "config.json")
            save_sources(self.path, config.model)  # of a file that has another name now

    def _move_damaged(self, checkpoint: Path) -> None:
        """Move a damaged checkpoint, on which Orbax fails, to `damaged/`."""
        target = self.path / "damaged" / checkpoint.name
        while target.exists():
            target = target.with_name(target.name + "-again")
        target.parent.mkdir(exist_ok=True)
        checkpoint.rename(target)

    def _truncate_metrics(self, step: int) -> None:
        """Remove from `metrics.jsonl` the lines after `step`, and what is no line of metrics. The
        file is always a new one, because the old one may have other names, outside of the run."""
        path = self.path / metrics.FILE
        if path.exists():
            write_atomically(path, metrics.lines_up_to(path, step))
        else:
            log(f"{path} is missing. A new one is started.")

    def log_metrics(self, progress: Progress, val_loss: float | None) -> None:
        """Add a line to `metrics.jsonl`."""
        if self._checkpoints is not None:
            self._checkpoints.check()
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
        with self._writing(), (self.path / metrics.FILE).open("a", encoding="ascii") as file:
            file.write(line)

    def save(self, progress: Progress) -> None:
        """Start to save a checkpoint and the weights, unless those of this step are saved."""
        step = progress.step
        if step == self._saved:
            return
        if self._checkpoints is None:
            folder, keep = self.path / "checkpoints", self._config.training.keep
            self._checkpoints = Checkpoints(folder, keep, self._save_weights)
        self._checkpoints.wait()  # `_save_weights` is done with the weights before
        is_frozen = frozen_in(self._config)
        weights = gather_to_main(progress.state.model, lambda name: not is_frozen(name))
        if is_main_process():
            self._weights = [("last", weights, Evaluated(step))]
            if self.best is not None and self.best.step == step:
                self._weights.append(("best", weights, self.best))
        with self._writing():
            if is_main_process() and (self.path / metrics.FILE).exists():
                sync(self.path / metrics.FILE)  # the checkpoint relies on it
        record = Record(
            position=progress.position,
            seconds=self.seconds,
            last=self.last,
            corpus_sha256=self._corpus_sha256,
            frozen_sha256=self._frozen,
            devices=_devices(self._config),
        )
        self._checkpoints.save(progress.state, record, is_frozen)
        self._saved, self._saved_at = step, time.monotonic()

    def _save_weights(self) -> None:
        """Called before a checkpoint is complete: so the best weights are never older than the best
        evaluation up to a checkpoint."""
        for name, weights, evaluated in self._weights:
            save_weights(self.path / f"{name}.safetensors", weights, evaluated)
        self._weights = []

    @property
    def seconds(self) -> float:
        """Since this object was made, and in the processes that trained the run before."""
        return time.monotonic() - self._began_at

    @property
    def steps_done(self) -> int:
        """The step of the last checkpoint."""
        return self._saved or 0

    def save_is_due(self) -> bool:
        """Whether the last checkpoint is `training.save_seconds` old."""
        return time.monotonic() - self._saved_at >= self._config.training.save_seconds

    @contextlib.contextmanager
    def training_errors(self, tokenizer: Tokenizer) -> Iterator[None]:
        """Wraps the training loop: waits at its end until everything is saved, and adds the command
        to resume to an error. A batch that made training diverge is saved as `nonfinite.json`."""
        try:
            yield
            if self._checkpoints is not None:
                self._checkpoints.wait()
        except UserError as error:
            # A save in progress may still succeed, if all processes wait for it.
            together = process_count() == 1 or isinstance(error, DivergenceError)
            with contextlib.suppress(UserError):
                if self._checkpoints is not None and together:
                    self._checkpoints.wait()
            if not (self.path / "config.json").exists():
                raise UserError(
                    f"The run folder {self.path} was deleted while it was trained."
                ) from error
            hint = self.resume_hint()
            if isinstance(error, DivergenceError):
                if is_main_process():
                    self._save_diverged(error, tokenizer)
                wait_for_main("nonfinite.json")  # an error of another process would end it
                # Resumed with the same settings, it would diverge again.
                skip = ["--training.on-nonfinite", "skip"]
                hint = "" if error.batch is None else self.resume_hint(skip)
            raise UserError(f"{error} {hint}".rstrip()) from error

    def resume_hint(self, options: Sequence[str] = ()) -> str:
        """A sentence that gives the command to resume the run."""
        steps = list_steps(self.path / "checkpoints")
        if not steps:
            return "Nothing has been saved yet."
        where = ", in every process" if process_count() > 1 else ""
        named = (*corpus_arguments(self._config.data), *custom_arguments(self._config.model))
        words = ["python", "train.py", "--resume", str(self.path), *named, *self._options, *options]
        return f"To resume from step {steps[0]}{where}:\n    {shlex.join(words)}"

    def curves(self) -> list[metrics.Metrics]:
        """The whole lines of `metrics.jsonl`."""
        with open_regular(self.path / metrics.FILE) as file:
            return list(filter(None, map(metrics.parsed, file)))

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`."""
        if is_main_process():
            with self._writing():
                write_json(self.path / "result.json", result)

    def _save_diverged(self, diverged: DivergenceError, tokenizer: Tokenizer) -> None:
        """Write `nonfinite.json`."""
        # JSON has no NaN and no infinity.
        report = {
            name: value if math.isfinite(value) else str(value)
            for name, value in diverged.report.items()
        }
        if diverged.batch is not None:
            report["text"] = [tokenizer.decode(window) for window in diverged.batch]
            report["ids"] = diverged.batch.tolist()
        with self._writing():
            write_json(self.path / "nonfinite.json", report)

    def _start(self, config: Config, corpus_sha256: str, seconds: float) -> None:
        self._config, self._corpus_sha256 = config, corpus_sha256
        self._frozen = self._frozen_sha256(config)
        self._saved_at = time.monotonic()
        self._began_at -= seconds

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"The run folder {self.path} cannot be written: {error}.") from error


def _devices(config: Config) -> str:
    count = jax.device_count()
    _, fsdp, tensor = mesh_shape(config.mesh, count)
    cut = f" (fsdp {fsdp}, tensor {tensor})" if fsdp * tensor > 1 else ""
    return f"{count} x {jax.devices()[0].device_kind}{cut}"
