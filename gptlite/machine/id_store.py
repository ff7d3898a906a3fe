"""Ids that are added piece by piece: in memory, or in two files beside a journal, which say after a
kill how far they are complete."""

import contextlib
import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from jaxtyping import Integer

from gptlite.machine.files import lock_patiently
from gptlite.machine.progress import log
from gptlite.machine.records import read_record, write_record
from gptlite.text.tokenizer import Ids

# Ids between two entries of the journal: what a process that is killed loses.
SEGMENT = 2**22

Size = Annotated[int, msgspec.Meta(ge=0)]
Two = msgspec.Meta(min_length=2, max_length=2)


class Journal(msgspec.Struct):
    """How much of a store is complete."""

    counts: Annotated[list[Size], Two] = msgspec.field(default_factory=lambda: [0, 0])
    """Ids for training, and for validation."""
    sha256: Annotated[list[str], Two] = msgspec.field(default_factory=lambda: ["", ""])
    """Their checksums."""
    parts: Size = 0
    characters: Size = 0
    validation_bytes: Size = 0
    """UTF-8 bytes of the text for validation."""
    ends: list[Size] = msgspec.field(default_factory=list)
    """Ids for training at the end of each of the first documents."""
    state: Any = None
    """Where the encoding goes on, if it is not finished: see `Corpus.state`."""
    is_finished: bool = False


def read_journal(path: Path) -> Journal:
    """What the journal of a store says; that nothing is complete, if it cannot be read."""
    try:
        return read_record(path.with_suffix(".json"), Journal)
    except (OSError, ValueError):
        return Journal()


class IdStore:
    """Ids for training and for validation, in memory, or in two files beside a journal."""

    def __init__(
        self,
        path: Path | None,
        dtype: np.dtype,
        limits: tuple[int | None, int],
        *,
        only_finished: bool = False,
    ):
        """`path`: of the files, without their suffixes; None: in memory. Ids in the files that are
        complete and not damaged stay; with `only_finished`, which changes no file, only those of a
        store that is finished. `limits`: the most ids of each kind."""
        self.limits = limits
        self.journal = Journal()
        self.n_pending = 0
        """Ids since the last entry in the journal."""
        self._path, self._dtype = path, dtype
        self._data = [path.with_suffix(x) for x in (".train", ".validation")] if path else []
        self._sums = [hashlib.sha256(), hashlib.sha256()]
        self._files: list[Any] = [io.BytesIO(), io.BytesIO()]
        if path is not None:
            journal = read_journal(path)
            with contextlib.suppress(OSError):
                if journal.is_finished or (journal.state is not None and not only_finished):
                    self._restore(journal)

    def _restore(self, journal: Journal) -> None:
        sums = []
        for path, count in zip(self._data, journal.counts, strict=True):
            if not journal.is_finished:  # what follows is not in the journal
                os.truncate(path, count * self._dtype.itemsize)
            with path.open("rb") as file:
                sums.append(hashlib.file_digest(file, "sha256"))
        if [checksum.hexdigest() for checksum in sums] != journal.sha256:
            return  # damaged
        self.journal, self._sums = journal, sums
        if not journal.is_finished:
            log(f"going on after {journal.counts[0]:,} tokens, in {self._path}.train")

    @contextlib.contextmanager
    def opened(self, text: str) -> Iterator[None]:
        """Ids of this text can be added."""
        if self._path is not None:
            log(f"encoding {text}, once, into {self._path}.train")
        is_new = not self.journal.parts
        try:
            with contextlib.ExitStack() as stack:
                for i, path in enumerate(self._data):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if is_new:  # other files, because others may be trained on
                        path.unlink(missing_ok=True)
                    self._files[i] = stack.enter_context(path.open("ab"))
                yield
        finally:
            if self._path and not self._path.with_suffix(".json").exists():  # nothing is complete
                for path in self._data:
                    path.unlink(missing_ok=True)

    def is_full(self, part: int) -> bool:
        """Whether there are all ids for training (0) or validation (1) that are wanted."""
        most = self.limits[part]
        return most is not None and self.journal.counts[part] >= most

    def add(self, part: int, ids: Ids) -> Ids:
        """Add ids for training (0) or validation (1), as far as they are wanted: those that were
        added."""
        most, count = self.limits[part], self.journal.counts[part]
        ids = ids if most is None else ids[: most - count]
        content = ids.astype(self._dtype).tobytes()
        self._files[part].write(content)
        self._sums[part].update(content)
        self.journal.counts[part] += len(ids)
        self.n_pending += len(ids)
        return ids

    def commit(self, state: Any, *, is_finished: bool = False) -> None:
        """Write down in the journal that all ids so far are complete. `state`: where the encoding
        would go on."""
        self.journal.state, self.journal.is_finished = state, is_finished
        self.journal.sha256 = [checksum.hexdigest() for checksum in self._sums]
        self.n_pending = 0
        if self._path is not None:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            write_record(self._path.with_suffix(".json"), self.journal)

    def ids(self) -> tuple[Ids, Integer[np.ndarray, " validation"]]:
        """All ids for training, and for validation."""
        n_train = self.journal.counts[0]
        if self._path is None:
            train, validation = (np.frombuffer(x.getbuffer(), self._dtype) for x in self._files)
            return train.astype(np.int32), validation.astype(np.int32)
        validation = np.fromfile(self._data[1], self._dtype)
        if not n_train:  # an empty file cannot be mapped
            return np.zeros(0, self._dtype), validation.astype(np.int32)
        train = np.memmap(self._data[0], self._dtype, mode="r", shape=(n_train,))
        if hasattr(mmap, "MADV_RANDOM"):  # read at random: without read-ahead
            train._mmap.madvise(mmap.MADV_RANDOM)  # pyright: ignore[reportAttributeAccessIssue]
        return train, validation.astype(np.int32)


def filled(
    path: Path,
    dtype: np.dtype,
    limits: tuple[int | None, int],
    fill: Callable[[IdStore], None],
) -> IdStore:
    """The finished store at `path`. If there is none, one process fills it, the others wait.

    **Raises:** `OSError` if a file cannot be written; what `fill` raises.
    """
    is_damaged = False
    while True:
        # The checksums of large files take minutes: all processes make them at the same time.
        store = IdStore(path, dtype, limits, only_finished=True)
        if store.journal.is_finished:
            return store
        with lock_patiently(path.with_name(f".{path.name}.lock"), "encodes this text"):
            # Another process may have finished it just now.
            if is_damaged or not read_journal(path).is_finished:
                store = IdStore(path, dtype, limits)
                if not store.journal.is_finished:
                    fill(store)
                return store
        is_damaged = True
