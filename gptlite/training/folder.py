"""A run's folder: what is in it, written and read.

    config.json        every knob
    tokenizer.json     the tokenizer, whole
    own/               copies of the files that blocks from outside the package came from
    metrics.jsonl      one object a line
    best.safetensors   weights at the best evaluation
    last.safetensors   weights at the last checkpoint
    checkpoints/       what going on needs: see checkpoint.py
    nonfinite.json     where training diverged: the batch
    loss.png           the curves
    result.json        at the end: what came of it

Plain data throughout: loading a run never executes anything from it.
"""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from filelock import SoftFileLock, Timeout

from gptlite.config import Config, UserError, load_config, plain, save_config
from gptlite.files import json_to_bytes, sync, write_atomically
from gptlite.own import OWN_FOLDER, changed_sources, own_options, own_sources
from gptlite.runs import check_free
from gptlite.text.tokenizer import Tokenizer, decode
from gptlite.training.checkpoint import (
    MANIFEST,
    Checkpoint,
    Checkpoints,
    Record,
    list_steps,
    read_checkpoint,
)
from gptlite.training.loop import DivergenceError, Progress
from gptlite.training.weights import named_arrays, weights_step, weights_to_bytes


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
        # Beside the folder, for it must outlive it; and the same however the folder is named.
        place = path.resolve()
        self._lock = SoftFileLock(place.parent / f".{place.name}.lock", timeout=0)
        self._checkpoints: Checkpoints | None = None
        self._corpus_sha256 = ""
        self._own: list[str] = []
        self._metrics = hashlib.sha256()
        self._metrics_bytes = 0
        self._saved: int | None = None
        self._save_seconds, self._saved_at = 0.0, 0.0

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
                write_atomically(new / "tokenizer.json", json_to_bytes(tokenizer.to_json()))
                for name, source in own_sources(config.model).items():
                    (new / OWN_FOLDER).mkdir(exist_ok=True)
                    write_atomically(new / OWN_FOLDER / name, source)
                if self.path.exists():
                    self.path.rename(old)
                new.rename(self.path)
            finally:
                for left in (new, old):
                    shutil.rmtree(left, ignore_errors=True)
        self._begin(config, corpus_sha256)

    def find_checkpoint(self, steps: int) -> Checkpoint:
        """The newest checkpoint that is whole, and its metrics with it; changes nothing.

        **Raises:** `UserError` if there is none, it leaves nothing to do of the run's `steps`,
        another process trains the run, or there is a link in the folder, which could lead out of
        it.
        """
        self.lock()
        for folder, folders, files in os.walk(self.path):
            for entry in (Path(folder, name) for name in (*folders, *files)):
                if entry.is_symlink():
                    raise UserError(
                        f"{entry} is a link. A run with links in it is not gone on with."
                    )
        checkpoint = self._newest()
        self._check_metrics(checkpoint)
        record = checkpoint.record
        step = record.position.step
        # A run may have been stopped between its last save and its result.
        finished = record.last.get("step") == step and "val_loss" in record.last
        if step > steps or (
            step == steps and (not finished or (self.path / "result.json").exists())
        ):
            raise UserError(
                f"The run {self.path} has done {step} steps; to extend it, give "
                f"--training.steps above that, got {steps}."
            )
        if record.devices != _devices():
            self._say(
                f"This run was on {record.devices} and goes on with {_devices()}: sums are added "
                "up in another order from here."
            )
        return checkpoint

    def _newest(self) -> Checkpoint:
        folder = self.path / "checkpoints"
        whole = [step for step in list_steps(folder) if (folder / str(step) / MANIFEST).exists()]
        for step in whole:
            try:
                return read_checkpoint(folder / str(step))
            except UserError as error:
                self._say(f"{error} Looking for an older checkpoint.")
        what = "that is undamaged." if whole else "yet. Begin the run again, with --overwrite."
        raise UserError(f"There is no checkpoint in {self.path} {what}")

    def go_on(self, checkpoint: Checkpoint, config: Config) -> None:
        """Bring the folder back to where `checkpoint` was written."""
        record = checkpoint.record
        for changed in changed_sources(self.path / OWN_FOLDER, config.model):
            self._say(f"{changed} is not as it was when the run began.")
        with self._writing():
            for step in list_steps(checkpoint.path.parent):
                path = checkpoint.path.parent / str(step)
                if step > record.position.step and (path / MANIFEST).exists():
                    path.rename(_unused(path.with_name(f"damaged-{step}")))
                elif not (path / MANIFEST).exists():
                    shutil.rmtree(path)
            for left in checkpoint.path.parent.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(left)
            for left in (*self.path.glob(".*.part"), self.path / "result.json"):
                left.unlink(missing_ok=True)
            metrics = self.path / "metrics.jsonl"
            if metrics.exists():
                content = metrics.read_bytes()[: record.metrics_bytes]
                if metrics.stat().st_size != len(content):
                    write_atomically(metrics, content)
                self._metrics.update(content)
                self._metrics_bytes = len(content)
            if plain(load_config(self.path / "config.json")) != plain(config):
                save_config(config, self.path / "config.json")
            self.best, self.last = record.best, record.last
            self._restore_best(checkpoint.path.parent)
        self._saved = record.position.step
        self._begin(config, record.corpus_sha256)

    def _restore_best(self, checkpoints: Path) -> None:
        """See to it that `best.safetensors` is that of `best`."""
        path = self.path / "best.safetensors"
        if self.best is None or weights_step(path) == self.best["step"]:
            return
        step = self.best["step"]
        try:
            arrays = read_checkpoint(checkpoints / str(step)).arrays()
        except UserError as error:
            self._say(f"{error} The best weights so far, of step {step}, are lost.")
            self.best = None
            return
        weights = {n.removeprefix("model."): a for n, a in arrays.items() if n.startswith("model.")}
        write_atomically(path, weights_to_bytes(weights, step))

    def log(self, progress: Progress) -> None:
        """Add a line to `metrics.jsonl`."""
        assert self._checkpoints is not None
        self._checkpoints.check()
        self.last = progress.record()
        line = (json.dumps(self.last, allow_nan=False) + "\n").encode("ascii")
        with self._writing(), (self.path / "metrics.jsonl").open("ab") as file:
            file.write(line)
        self._metrics.update(line)
        self._metrics_bytes += len(line)
        if progress.val_loss is None:
            return
        if self.best is None or progress.val_loss < self.best["val_loss"]:
            self.best = {"step": progress.step, "val_loss": progress.val_loss}

    def save(self, progress: Progress) -> None:
        """Start to save a checkpoint and the weights, unless those of this step are saved."""
        assert self._checkpoints is not None
        if progress.step == self._saved:
            return
        step, best = progress.step, self.best["step"] if self.best else None
        record = Record(
            position=progress.position,
            best=self.best,
            last=self.last,
            metrics_bytes=self._metrics_bytes,
            metrics_sha256=self._metrics.hexdigest(),
            corpus_sha256=self._corpus_sha256,
            devices=_devices(),
        )
        weights = named_arrays(progress.state.model)
        with self._writing():
            if self._metrics_bytes:
                sync(self.path / "metrics.jsonl")  # which the checkpoint relies on

        def save_weights() -> None:
            content = weights_to_bytes(weights, step)
            for name in ("last", "best") if step == best else ("last",):
                write_atomically(self.path / f"{name}.safetensors", content)

        self._checkpoints.save(progress.state, record, then=save_weights)
        self._saved, self._saved_at = step, time.monotonic()

    @property
    def steps_done(self) -> int:
        """At the last checkpoint."""
        return self._saved or 0

    def save_is_due(self) -> bool:
        """Whether `training.save_seconds` have gone by since the last time."""
        return time.monotonic() - self._saved_at >= self._save_seconds

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
                advice = "" if error.windows is None else f" {self.way_back(skip)}"
                raise UserError(f"{error}{advice}") from error
            raise UserError(f"{error} {self.way_back()}") from error

    def way_back(self, options: Sequence[str] = ()) -> str:
        """A sentence on how to go on."""
        for step in list_steps(self.path / "checkpoints"):
            if (self.path / "checkpoints" / str(step) / MANIFEST).is_file():
                words = ["python", "train.py", "--resume", str(self.path), *self._own, *options]
                return f"To go on from step {step}:\n    {shlex.join(words)}"
        return "Nothing has been saved yet."

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`."""
        with self._writing():
            write_atomically(self.path / "result.json", json.dumps(result, indent=2) + "\n")

    def _save_diverged(self, diverged: DivergenceError, tokenizer: Tokenizer) -> None:
        """Write `nonfinite.json`."""
        report = dict(diverged.report)
        if diverged.windows is not None:
            report["text"] = [decode(tokenizer, window) for window in diverged.windows]
            report["ids"] = diverged.windows.tolist()
        # NaN and infinity are what this file is about, and JSON has no such numbers.
        report = {k: str(v) if isinstance(v, float) else v for k, v in report.items()}
        with self._writing():
            write_atomically(self.path / "nonfinite.json", json.dumps(report, indent=2) + "\n")

    def _begin(self, config: Config, corpus_sha256: str) -> None:
        self._corpus_sha256 = corpus_sha256
        self._own = own_options(config.model)
        self._checkpoints = Checkpoints(self.path / "checkpoints", config.training.keep)
        self._save_seconds, self._saved_at = config.training.save_seconds, time.monotonic()

    def _check_metrics(self, checkpoint: Checkpoint) -> None:
        path, record = self.path / "metrics.jsonl", checkpoint.record
        try:
            content = path.read_bytes()[: record.metrics_bytes]
        except FileNotFoundError:
            if record.metrics_bytes:
                self._say(f"{path} is missing, and begins anew.")
            return
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
        if hashlib.sha256(content).hexdigest() != record.metrics_sha256:
            raise UserError(
                f"{path} is damaged or was edited in its first {record.metrics_bytes} bytes (to "
                f"step {record.position.step}). Put it back as it was, or delete it to begin anew."
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"The run folder {self.path} cannot be written: {error}.") from error


def _unused(path: Path) -> Path:
    while path.exists():
        path = path.with_name(path.name + "-again")
    return path


def _devices() -> str:
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
