"""A run's folder, as training writes it.

    config.json        the config
    tokenizer.json     the whole tokenizer
    plan.json          with `--minutes`: the minutes, and the loss that is expected
    custom/            copies of the files with custom blocks
    metrics.jsonl      one JSON object a line
    frozen.safetensors parameters that stay as they are, if there are any
    checkpoints/       the newest and the best: see stored.py
    damaged/           checkpoints that could not be used
    nonfinite.json     where training diverged, with the batch
    loss.png           the loss curves
    result.json        the result, at the end
    tensorboard/       with `--log.to tensorboard`: its event files
    tracked.json       with `--log.to`: what the run is called there

All files are plain data: nothing in a run is executed when it is loaded.
"""

import contextlib
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from gptlite.config import Config
from gptlite.errors import UserError, require
from gptlite.machine.files import is_locked, lock, remove, write_json
from gptlite.machine.processes import (
    broadcast_from_main,
    is_main_process,
    process_count,
    wait_for_main,
)
from gptlite.machine.progress import log
from gptlite.runs.find import CHECKPOINTS, check_free, check_path, list_steps
from gptlite.runs.frozen import FROZEN, save_frozen
from gptlite.runs.saved_config import save_config, save_sources
from gptlite.text.tokenizer import Tokenizer

# How long a file may take to be seen on another host. (NFS keeps what it has seen for a minute.)
SEEN_SECONDS = 90.0
# `is_locked` takes the lock briefly: wait that long before refusing.
LOCK_SECONDS = 1.0
# Names that are tried for a run without one.
MAX_NAMES = 100


class RunFolder:
    """The place of a run that is trained. A context manager: its exit releases the lock.

    Every method raises `UserError` where the folder cannot be written.
    """

    def __init__(self, path: Path, *, may_rename: bool = False):
        """`may_rename`: whether a new run gets another name, where there is one of that name."""
        self.path = path
        self._may_rename = may_rename
        self._lock: contextlib.AbstractContextManager | None = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
            self._lock = None

    @property
    def _lock_path(self) -> Path:
        # Next to the run folder, because `--overwrite` replaces the folder. Resolved, so that all
        # spellings of the path share one lock.
        path = self.path.resolve()
        return path.with_name(f".{path.name}.lock")

    def lock(self) -> None:
        """Lock the run.

        **Raises:** `UserError` if another process trains it.
        """
        if self._lock is not None or not is_main_process():
            return
        busy = f"The run {self.path} is being trained by another process: wait for it, or stop it."
        with self.writing():
            self._lock = lock(self._lock_path, busy, LOCK_SECONDS)
            if isinstance(self._lock, contextlib.nullcontext):
                log(f"{self.path.parent} has no locks: start nothing else that trains {self.path}.")

    def create(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        overwrite: bool,
        frozen: Mapping[str, np.ndarray] = MappingProxyType({}),
        checkpoints: Path | None = None,
    ) -> None:
        """Make the folder, in the first process. `frozen`: the parameters that stay as they are.
        `checkpoints`: a folder of checkpoints, which is moved there.

        **Raises:** `UserError` if there is something at `path` (with `overwrite`: something that
        is not a run), or it cannot be written.
        """
        if is_main_process():
            self._find_place(overwrite=overwrite)
            self._create(config, tokenizer, frozen, checkpoints)
        self.path = Path(broadcast_from_main("run folder", str(self.path)))
        self.check_shared()

    def _find_place(self, *, overwrite: bool) -> None:
        """Lock the run, where there is none of that name."""
        first = self.path
        for number in itertools.count(2):
            try:
                check_free(self.path, overwrite=overwrite)
                self.lock()
                check_free(self.path, overwrite=overwrite)  # another process may have created it
                break
            except UserError:
                is_taken = self.path.exists() or is_locked(self._lock_path)
                if not (self._may_rename and is_taken) or number > MAX_NAMES:
                    raise
                self._release()
                self.path = first.with_name(f"{first.name}-{number}")
        if self.path != first:
            log(f"Another run began in the same second: this one is {self.path}.")

    def _create(
        self,
        config: Config,
        tokenizer: Tokenizer,
        frozen: Mapping[str, np.ndarray],
        checkpoints: Path | None,
    ) -> None:
        # Written under another name and renamed when complete.
        new, old = (self.path.with_name(f".{self.path.name}.{what}") for what in ("new", "old"))
        with self.writing():
            try:
                for leftover in (new, old):
                    remove(leftover)
                new.mkdir()
                save_config(config, new / "config.json")
                write_json(new / "tokenizer.json", tokenizer.to_json())
                save_sources(new, config.model)
                if frozen:
                    save_frozen(new / FROZEN, dict(frozen))
                if checkpoints is not None:
                    checkpoints.rename(new / CHECKPOINTS)
                if self.path.exists():
                    self.path.rename(old)
                new.rename(self.path)
            finally:
                if old.exists() and not self.path.exists():  # stopped between the two
                    old.rename(self.path)
                for leftover in (new, old):
                    remove(leftover)

    def check_shared(self) -> None:
        """Waits until all processes see the folder, as the first one has left it.

        **Raises:** `UserError` if one of them does not.
        """
        if process_count() == 1:
            return
        mark = self.path / f".{broadcast_from_main('mark', secrets.token_hex(8))}.part"
        with self.writing():
            if is_main_process():
                mark.touch()
            wait_for_main("the run folder")
            end = time.monotonic() + SEEN_SECONDS
            while not mark.exists():
                require(
                    time.monotonic() <= end,
                    f"The run folder {self.path.absolute()} is not shared by all processes: "
                    "process 0 has written it, and this process does not see it. Start all of "
                    "them in a folder of one disk that all hosts have.",
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
        check_path(self.path)
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
        require(
            bool(list_steps(self.path)),
            f"There is no checkpoint in {self.path} yet. Start the run again, with --overwrite.",
        )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raises `UserError` for an `OSError`."""
        try:
            yield
        except OSError as error:
            raise UserError(f"The run folder {self.path} cannot be written: {error}.") from error
