"""Checkpoints: all that going on with a run needs, written while it goes on.

    checkpoints/STEP/                Orbax's files: every array of the training state
    checkpoints/STEP/manifest.json   size and sha256 of each of them, and what is no array

The manifest comes last and with its own checksum: a checkpoint without one does not count, and no
file of a checkpoint is parsed before its checksum has been found right.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.config import UserError
from gptlite.files import json_from_bytes, json_to_bytes, sha256_of, sync, write_atomically
from gptlite.text.corpus import Corpus, load_corpus
from gptlite.training.step import TrainState
from gptlite.training.weights import fill, named_arrays

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Position:
    """Where a run is, besides its arrays."""

    step: int = 0
    """Steps done."""
    losses: Sequence[float] = ()
    """Of the steps since the last line of metrics, those of skipped updates left out."""
    skipped: int = 0
    """Updates that were skipped, because something in them was not finite."""
    step_seconds: float = 0.0
    """Spent on steps, without compilation and evaluations."""
    seconds: float = 0.0
    """Spent in the loop, compilation and evaluations included."""


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds besides arrays."""

    position: Position
    best: dict[str, Any] | None
    """`step` and `val_loss` of the best evaluation."""
    last: dict[str, Any]
    """The last line of metrics."""
    metrics_bytes: int
    """Size of `metrics.jsonl` at that moment,"""
    metrics_sha256: str
    """and the checksum of what was in it."""
    corpus_sha256: str
    devices: str
    """How many, and of which kind."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums have been found right."""

    path: Path
    record: Record

    def load_text(self, name: str) -> Corpus:
        """The corpus `name`.

        **Raises:** `UserError` if it cannot be had or is not the text that the run was trained on.
        """
        try:
            corpus = load_corpus(name)
        except UserError as error:
            raise UserError(
                f"{error} --data.corpus may say where the run's text is now."
            ) from error
        if corpus.sha256 != self.record.corpus_sha256:
            raise UserError(
                f"The corpus {corpus.name} is not the text that this run was trained on: its "
                f"sha256 is {corpus.sha256}, and was {self.record.corpus_sha256}."
            )
        return corpus

    def load(self, skeleton: TrainState) -> TrainState:
        """`skeleton` with the arrays that were saved.

        **Raises:** `UserError` if they are not of the skeleton's names, shapes and dtypes. That is
        found out before any array is read.
        """
        import orbax.checkpoint as ocp

        wanted = {name: (x.shape, x.dtype) for name, x in named_arrays(skeleton).items()}
        with ocp.PyTreeCheckpointer() as checkpointer, _as_user_error(self.path, "read"):
            metadata = checkpointer.metadata(self.path.absolute()).item_metadata.tree
        held = {name: (tuple(x.shape), x.dtype) for name, x in metadata.items()}
        for name in sorted(wanted.keys() | held.keys()):
            if wanted.get(name) != held.get(name):
                raise UserError(
                    f"The checkpoint {self.path} is not of this config: {name} is "
                    f"{held.get(name, 'missing')} instead of {wanted.get(name, 'missing')}."
                )
        return fill(skeleton, self.arrays(), f"The arrays of {self.path}")

    def arrays(self) -> dict[str, np.ndarray]:
        """All that were saved, under their paths in the state."""
        import orbax.checkpoint as ocp

        with ocp.PyTreeCheckpointer() as checkpointer, _as_user_error(self.path, "read"):
            names = checkpointer.metadata(self.path.absolute()).item_metadata.tree
            as_arrays = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            return checkpointer.restore(
                self.path.absolute(), ocp.args.PyTreeRestore(restore_args=as_arrays)
            )


class Checkpoints:
    """Writes checkpoints of a run, one at a time, on a thread of its own."""

    def __init__(self, folder: Path, keep: int):
        """`keep`: how many of the last ones to keep. The best are kept, too."""
        self._folder, self._keep = folder, keep
        self._checkpointer: Any = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: concurrent.futures.Future[None] | None = None

    def save(self, state: TrainState, record: Record, *, then: Callable[[], None]) -> None:
        """Start to write `state` and `record` as the checkpoint of `record.position.step`.

        `state` may change as soon as this returns. When the checkpoint is whole, `then` is called
        on the thread, and checkpoints that are not to be kept are deleted.

        **Raises:** `UserError` if this checkpoint or the one before could not be written.
        """
        # Here, because it takes half a second to import, which a first step need not wait for.
        import orbax.checkpoint as ocp

        if self._checkpointer is None:
            _quieten()
            self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self.wait()
        path = self._folder / str(record.position.step)
        arrays = named_arrays(state)
        with _as_user_error(path, "written"):
            self._checkpointer.save(path.absolute(), ocp.args.PyTreeSave(arrays), force=True)
        self._saving = self._thread.submit(self._complete, path, arrays, record, then)

    def wait(self) -> None:
        """Until what has been started is written.

        **Raises:** `UserError` if it could not be.
        """
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def check(self) -> None:
        """**Raises:** `UserError` if what has been started could not be written."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def close(self) -> None:
        """Waits for the thread; what went wrong there, `wait` has to be asked for."""
        self._thread.shutdown()
        if self._checkpointer is None:
            return
        with contextlib.suppress(Exception):
            self._checkpointer.close()

    def _complete(
        self,
        path: Path,
        arrays: dict[str, np.ndarray],
        record: Record,
        then: Callable[[], None],
    ) -> None:
        with _as_user_error(path, "written"):
            self._checkpointer.wait_until_finished()
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise UserError(f"The checkpoint {path} is not kept: {name} is not finite.")
            files = {}
            for file in _files(path):
                sync(file)
                files[str(file.relative_to(path))] = [file.stat().st_size, sha256_of(file)]
            for folder in (*(Path(found) for found, _, _ in os.walk(path)), path.parent):
                sync(folder)
            manifest = {"files": files, "record": dataclasses.asdict(record)}
            write_atomically(path / MANIFEST, json_to_bytes(manifest))
            then()
            self._delete_old()

    def _delete_old(self) -> None:
        """All but the last ones, and the best as seen from each of them."""
        steps = list_steps(self._folder)
        kept = set(steps[: self._keep])
        for step in steps[: self._keep]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                manifest = json_from_bytes((self._folder / str(step) / MANIFEST).read_bytes())
                kept.add(manifest["record"]["best"]["step"])
        for step in steps:
            if step not in kept:
                shutil.rmtree(self._folder / str(step))


def list_steps(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint, whole or not, the newest first."""
    names = (path.name for path in folder.glob("*"))
    return sorted((int(n) for n in names if n.isascii() and n.isdecimal()), reverse=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of the checkpoint in the folder `path`.

    **Raises:** `UserError`, which names the file, if one is missing, damaged or too many.
    """
    try:
        manifest = json_from_bytes((path / MANIFEST).read_bytes())
        files = {
            str(name): (int(size), str(digest))
            for name, (size, digest) in manifest["files"].items()
        }
        position = Position(**manifest["record"].pop("position"))
        record = Record(position=position, **manifest["record"])
    except FileNotFoundError:
        what = "was not written to its end" if path.exists() else "is missing"
        raise UserError(f"The checkpoint {path} {what}.") from None
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{path / MANIFEST} is damaged: {error}.") from error
    found = {str(file.relative_to(path)): file for file in _files(path)}
    for name in sorted(files.keys() | found.keys()):
        if name not in found:
            raise UserError(f"{path / name} is missing.")
        if name not in files:
            raise UserError(f"{path / name} does not belong to the checkpoint.")
        size, checksum = files[name]
        try:
            held = found[name].stat().st_size
            same = held == size and sha256_of(found[name]) == checksum
        except OSError as error:
            raise UserError(f"{path / name} is damaged: {error.strerror}.") from error
        if held != size:
            raise UserError(f"{path / name} is damaged: it has {held} bytes instead of {size}.")
        if not same:
            raise UserError(f"{path / name} is damaged: its checksum does not match.")
    return Checkpoint(path, record)


def _files(path: Path) -> list[Path]:
    return [
        Path(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if Path(folder, name) != path / MANIFEST
    ]


@contextlib.contextmanager
def _as_user_error(path: Path, done: str) -> Iterator[None]:
    """Orbax and TensorStore raise a dozen unrelated kinds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        reason = os.strerror(int(code[1])) if code else f"{error}".strip().partition("\n")[0]
        raise UserError(f"The checkpoint {path} cannot be {done}: {reason}.") from error


def _quieten() -> None:
    """Have Orbax say nothing on its own, in this whole process: it logs every phase of every save,
    and all errors, which it raises too."""
    from absl import logging

    logging.set_verbosity(logging.FATAL)
    before = sys.unraisablehook

    def leave_out_closed_loops(unraisable: Any) -> None:
        # Of several writes that fail together, Orbax raises the first one's error and closes its
        # event loop, which the others then complain about.
        if "Event loop is closed" not in str(unraisable.exc_value):
            before(unraisable)

    sys.unraisablehook = leave_out_closed_loops
