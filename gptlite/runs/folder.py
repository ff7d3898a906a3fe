"""A run's folder: what is in it, written and read.

    config.json        every knob
    tokenizer.json     the tokenizer, whole
    custom/            copies of the files that custom blocks came from
    metrics.jsonl      one object a line
    best.safetensors   weights at the best evaluation
    last.safetensors   weights at the last checkpoint
    checkpoints/       what going on needs: see checkpoints.py
    nonfinite.json     where training diverged: the batch
    loss.png           the curves
    result.json        at the end: what came of it

Plain data throughout: loading a run never executes anything from it.
"""

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from filelock import SoftFileLock, Timeout

from gptlite.config import Config, UserError
from gptlite.custom import custom_options
from gptlite.files import sync, write_atomically, write_json
from gptlite.runs.checkpoints import Checkpoints, Record, list_steps
from gptlite.runs.find import check_free
from gptlite.runs.saved_config import load_config, save_config
from gptlite.runs.sources import changed_sources, save_sources
from gptlite.runs.weights import named_arrays, weights_step, weights_to_bytes
from gptlite.text.tokenizer import Tokenizer, decode
from gptlite.training.fit import DivergenceError, Progress
from gptlite.training.step import TrainState


@dataclass(frozen=True)
class Checkpoint:
    """From where a run is resumed."""

    state: TrainState
    record: Record
    best: dict[str, Any] | None
    """`step` and `val_loss` of the best evaluation of which there are weights."""
    best_weights: dict[str, np.ndarray] | None
    """Those weights; None if they are in the folder already."""
    damaged: Sequence[int]
    """Steps of checkpoints that cannot be used."""


class RunFolder:
    """Writes a run; as a context manager, so that its end is waited for and its lock given back.

    Every method raises `UserError` where the folder cannot be written.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = print):
        """`say` hears of what was found amiss and mended."""
        self.path = path
        self.best: dict[str, Any] | None = None
        """`step` and `val_loss` of the best evaluation."""
        self.last: dict[str, Any] = {}
        """The last line of metrics."""
        self._say = say
        # Next to the folder, because `--overwrite` replaces the folder. Resolved, so that all
        # spellings of the path share one lock.
        place = path.resolve()
        self._lock = SoftFileLock(place.parent / f".{place.name}.lock", timeout=0)
        self._checkpoints: Checkpoints | None = None
        self._config = Config()
        self._corpus_sha256 = ""
        self._weights: dict[str, tuple[dict[str, np.ndarray], int]] = {}
        self._saved: int | None = None
        self._saved_at = self._began_at = time.monotonic()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._lock.release()

    def lock(self) -> None:
        """**Raises:** `UserError`, with its process id, if another process trains this run."""
        with self._writing():
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                holder = self._lock.pid
                self._lock.acquire()
            except Timeout:
                holder = self._lock.pid
                who = f"process {holder}" if holder else "a process that left no name"
                raise UserError(
                    f"The run {self.path} is being trained by {who}: wait for it, or stop it. (If "
                    "it is gone, and was on another machine or lost its power, delete "
                    f"{self._lock.lock_file}.)"
                ) from None
        if holder is not None:
            self._say(f"took over the lock of process {holder}, which is gone")

    def create(
        self, config: Config, tokenizer: Tokenizer, corpus_sha256: str, *, overwrite: bool
    ) -> None:
        """Make the folder.

        **Raises:** `UserError` if there is something at `path` (with `overwrite`: something that
        is not a run), or it cannot be written.
        """
        check_free(self.path, overwrite=overwrite)
        self.lock()
        check_free(self.path, overwrite=overwrite)  # another process may have been quicker
        # Made beside its place, so that there is never half of it.
        new, old = (self.path.with_name(f".{self.path.name}.{what}") for what in ("new", "old"))
        with self._writing():
            try:
                for left in (new, old):
                    shutil.rmtree(left, ignore_errors=True)
                new.mkdir()
                save_config(config, new / "config.json")
                write_json(new / "tokenizer.json", tokenizer.to_json())
                save_sources(new, config.model)
                if self.path.exists():
                    self.path.rename(old)
                new.rename(self.path)
            finally:
                for left in (new, old):
                    shutil.rmtree(left, ignore_errors=True)
        self._begin(config, corpus_sha256, seconds=0.0)

    def open(self) -> None:
        """Lock a run that is to be resumed; changes nothing.

        **Raises:** `UserError` if another process trains the run, there is no checkpoint, or there
        is a link in the folder, which could lead out of it.
        """
        self.lock()
        for folder, folders, files in os.walk(self.path):
            for entry in (Path(folder, name) for name in (*folders, *files)):
                if entry.is_symlink():
                    raise UserError(f"{entry} is a link. A run with links in it is not resumed.")
        if not list_steps(self.path / "checkpoints"):
            raise UserError(
                f"There is no checkpoint in {self.path} yet. Begin the run again, with --overwrite."
            )

    def find_checkpoint(
        self, skeleton: TrainState, config: Config, corpus_sha256: str
    ) -> Checkpoint:
        """The newest checkpoint that is undamaged; changes nothing. Its arrays are spread as those
        of `skeleton` are.

        **Raises:** `UserError` if there is none, the run was trained on another corpus, or nothing
        is left to do of the steps in `config`.
        """
        checkpoints, steps = Checkpoints(self.path / "checkpoints"), config.training.steps
        state, record = self._newest(checkpoints, skeleton)
        step = record.position.step
        if corpus_sha256 != record.corpus_sha256:
            raise UserError(
                "The corpus is not the text that this run was trained on: its sha256 is "
                f"{corpus_sha256}, and was {record.corpus_sha256}."
            )
        # A run may have been stopped between its last save and its result.
        finished = record.last.get("step") == step and "val_loss" in record.last
        if step > steps or (
            step == steps and (not finished or (self.path / "result.json").exists())
        ):
            raise UserError(
                f"The run {self.path} has done {step} steps; to extend it, give "
                f"--training.steps above that, got {steps}."
            )
        if record.devices != _devices(config):
            self._say(
                f"This run was on {record.devices} and goes on with {_devices(config)}: sums are "
                "added up in another order from here."
            )
        damaged = {other for other in checkpoints.steps if other > step}
        for other in checkpoints.steps:
            try:
                checkpoints.val_loss(other)
            except UserError as error:
                self._say(str(error))
                damaged.add(other)
        best, best_weights = record.best, None
        if best is not None:
            at = best["step"]
            try:
                of_best = state if at == step else checkpoints.restore(at, skeleton)[0]
                best_weights = named_arrays(of_best.model)
            except UserError as error:
                self._say(str(error))
                damaged |= {at} & set(checkpoints.steps)
                if weights_step(self.path / "best.safetensors") != at:
                    self._say("The best weights so far are lost.")
                    best = None
        checkpoints.close()
        return Checkpoint(state, record, best, best_weights, sorted(damaged))

    def _newest(self, checkpoints: Checkpoints, skeleton: TrainState) -> tuple[TrainState, Record]:
        for step in checkpoints.steps:
            try:
                return checkpoints.restore(step, skeleton)
            except UserError as error:
                self._say(f"{error} Looking for an older checkpoint.")
        raise UserError(f"There is no checkpoint in {self.path} that is undamaged.")

    def resume(self, checkpoint: Checkpoint, config: Config) -> None:
        """Bring the folder back to where `checkpoint` was written."""
        record, folder = checkpoint.record, self.path / "checkpoints"
        step = record.position.step
        for changed in changed_sources(self.path, config.model):
            self._say(f"{changed} has changed since the run began.")
        with self._writing():
            for damaged in checkpoint.damaged:
                self._set_aside(folder / str(damaged))
            for left in (*self.path.glob(".*.part"), self.path / "result.json"):
                left.unlink(missing_ok=True)
            self._take_back_lines(step)
            if load_config(self.path / "config.json") != config:
                save_config(config, self.path / "config.json")
            if checkpoint.best_weights is not None:
                assert checkpoint.best is not None
                best = weights_to_bytes(checkpoint.best_weights, checkpoint.best["step"])
                path = self.path / "best.safetensors"
                if not path.is_file() or path.read_bytes() != best:
                    write_atomically(path, best)
        self.best = checkpoint.best
        self.last, self._saved = record.last, step
        self._begin(config, record.corpus_sha256, seconds=record.seconds)

    def _set_aside(self, checkpoint: Path) -> None:
        """Move a damaged checkpoint out of Orbax's way, and keep it."""
        aside = self.path / "damaged" / checkpoint.name
        while aside.exists():
            aside = aside.with_name(aside.name + "-again")
        aside.parent.mkdir(exist_ok=True)
        checkpoint.rename(aside)

    def _take_back_lines(self, step: int) -> None:
        """Leave out of `metrics.jsonl` what came after `step`, and what is no line of metrics."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            self._say(f"{path} is missing, and begins anew.")
            return
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if 0 < _step_of(line) <= step]
        if kept != lines:
            write_atomically(path, b"".join(kept))

    def log(self, progress: Progress, val_loss: float | None) -> None:
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
            # Of equals the latest, as Orbax takes it.
            if self.best is None or val_loss <= self.best["val_loss"]:
                self.best = {"step": progress.step, "val_loss": val_loss}
        if training.on_nonfinite == "skip":
            self.last["skipped"] = progress.position.skipped
        line = json.dumps(self.last, allow_nan=False) + "\n"
        with self._writing(), (self.path / "metrics.jsonl").open("a", encoding="ascii") as file:
            file.write(line)

    def save(self, progress: Progress) -> None:
        """Start to save a checkpoint and the weights, unless those of this step are saved."""
        step = progress.step
        if step == self._saved:
            return
        record = Record(
            position=progress.position,
            seconds=self.seconds,
            best=self.best,
            last=self.last,
            corpus_sha256=self._corpus_sha256,
            devices=_devices(self._config),
        )
        if self._checkpoints is None:
            folder, keep = self.path / "checkpoints", self._config.training.keep
            self._checkpoints = Checkpoints(folder, keep, self._save_weights)
        self._checkpoints.wait()
        is_best = self.best is not None and self.best["step"] == step
        weights = named_arrays(progress.state.model)
        self._weights = dict.fromkeys(("last", "best") if is_best else ("last",), (weights, step))
        with self._writing():
            if (self.path / "metrics.jsonl").exists():
                sync(self.path / "metrics.jsonl")  # which the checkpoint relies on
        evaluated = self.last.get("step") == step
        self._checkpoints.save(
            progress.state, record, self.last.get("val_loss") if evaluated else None
        )
        self._saved, self._saved_at = step, time.monotonic()

    def _save_weights(self) -> None:
        for name, (weights, step) in self._weights.items():
            write_atomically(self.path / f"{name}.safetensors", weights_to_bytes(weights, step))
        self._weights = {}

    @property
    def seconds(self) -> float:
        """Since this was made, with the seconds of the processes before that trained the run."""
        return time.monotonic() - self._began_at

    @property
    def steps_done(self) -> int:
        """At the last checkpoint."""
        return self._saved or 0

    def save_is_due(self) -> bool:
        """Whether `training.save_seconds` have gone by since the last time."""
        return time.monotonic() - self._saved_at >= self._config.training.save_seconds

    @contextlib.contextmanager
    def being_trained(self, tokenizer: Tokenizer) -> Iterator[None]:
        """Around the loop: waits at its end until all is saved, and says what to do after an
        error. A batch that is to blame for one is saved as `nonfinite.json`."""
        try:
            yield
            if self._checkpoints is not None:
                self._checkpoints.wait()
        except UserError as error:
            with contextlib.suppress(UserError):  # a save under way may end well
                if self._checkpoints is not None:
                    self._checkpoints.wait()
            if not (self.path / "config.json").exists():
                raise UserError(
                    f"The run folder {self.path} was deleted while it was trained."
                ) from error
            if isinstance(error, DivergenceError):
                self._save_diverged(error, tokenizer)
                # To go on as it was would end in the same way.
                skip = ["--training.on-nonfinite", "skip"]
                advice = "" if error.batch is None else f" {self.resume_hint(skip)}"
                raise UserError(f"{error}{advice}") from error
            raise UserError(f"{error} {self.resume_hint()}") from error

    def resume_hint(self, options: Sequence[str] = ()) -> str:
        """A sentence on how to go on."""
        steps = list_steps(self.path / "checkpoints")
        if not steps:
            return "Nothing has been saved yet."
        custom = custom_options(self._config.model)
        words = ["python", "train.py", "--resume", str(self.path), *custom, *options]
        return f"To go on from step {steps[0]}:\n    {shlex.join(words)}"

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`."""
        with self._writing():
            write_json(self.path / "result.json", result)

    def _save_diverged(self, diverged: DivergenceError, tokenizer: Tokenizer) -> None:
        """Write `nonfinite.json`."""
        report = dict(diverged.report)
        if diverged.batch is not None:
            report["text"] = [decode(tokenizer, window) for window in diverged.batch]
            report["ids"] = diverged.batch.tolist()
        # NaN and infinity are what this file is about, and JSON has no such numbers.
        report = {k: str(v) if isinstance(v, float) else v for k, v in report.items()}
        with self._writing():
            write_json(self.path / "nonfinite.json", report)

    def _begin(self, config: Config, corpus_sha256: str, seconds: float) -> None:
        self._config, self._corpus_sha256 = config, corpus_sha256
        self._saved_at = time.monotonic()
        self._began_at -= seconds

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"The run folder {self.path} cannot be written: {error}.") from error


def _step_of(line: bytes) -> int:
    """The step of a line of metrics; 0 if it is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if isinstance(step, int) and line.endswith(b"\n") else 0


def _devices(config: Config) -> str:
    mesh = config.mesh
    cut = f" (fsdp {mesh.fsdp}, tensor {mesh.tensor})" if mesh.fsdp * mesh.tensor > 1 else ""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}{cut}"
