"""Everything that was tried, in the order in which it was tried.

A file of lines, each a JSON object, which is appended to and never rewritten. Each line has the
checksum of the line before, so a line that was changed or taken out is noticed.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from gptlite.errors import UserError, require
from gptlite.machine.files import read_bounded, sync
from gptlite.machine.printed import CONTROL
from gptlite.machine.records import parse_record

# Bytes of a journal: some ten thousand runs.
MAX_JOURNAL = 2**26
# The checksum before the first line.
FIRST = "0" * 64

Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16,64}$")]
Time = Annotated[str, msgspec.Meta(pattern=r"^[0-9T:+-]{25}$")]


class NotWrittenError(UserError):
    """A journal cannot be written."""


class Entry(msgspec.Struct, tag_field="entry", frozen=True):
    """A line."""


def require_plain(*texts: str) -> None:
    """**Raises:** `ValueError` for a text with control characters."""
    if any(CONTROL.search(text) for text in texts):
        raise ValueError("a text in it has control characters")


K = TypeVar("K", bound=Entry)
E = TypeVar("E", bound=Entry)


class Journal(Generic[K]):
    """The entries in a file."""

    def __init__(self, path: Path, kinds: Any, remedy: str, limit: int = MAX_JOURNAL):
        """`kinds`: the union of the kinds of entries. `remedy`: what to do about a damaged file.
        `limit`: bytes that the file may have.

        **Raises:** `UserError` if the file is damaged, or was changed."""
        self.path = path
        self.entries: list[K] = []
        self.times: list[str] = []
        """When each was written."""
        self._last, self._end = FIRST, 0
        if not path.exists():
            return
        try:
            content = read_bounded(path, limit)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}.") from error
        *lines, rest = content.split(b"\n")
        # What was cut off when it was written never counted. A whole line was not cut off.
        require(
            not _is_whole(rest),
            f"{path} is damaged, or was changed: its last line has no end. {remedy}",
        )
        for number, line in enumerate(lines, 1):
            where = f"{path} is damaged, or was changed, at line {number}"
            try:
                record = parse_record(line, dict[str, Any])
                before, at = record.pop("before", None), record.pop("at", None)
                entry, at = msgspec.convert(record, kinds), msgspec.convert(at, Time)
            except ValueError as error:
                raise UserError(f"{where}: {error}. {remedy}") from error
            require(before == self._last, f"{where}: it does not follow the one before. {remedy}")
            require(self._fits(entry), f"{where}: it does not fit the ones before. {remedy}")
            self._add(line, entry, at)

    def _fits(self, entry: K) -> bool:
        """Whether an entry may follow those before."""
        raise NotImplementedError

    def _took(self, entry: K) -> None:
        """An entry was added."""

    def _add(self, line: bytes, entry: K, at: str) -> None:
        self.entries.append(entry)
        self.times.append(at)
        self._took(entry)
        self._last = hashlib.sha256(line).hexdigest()
        self._end += len(line) + 1

    @property
    def checksum(self) -> str:
        """Of the last line, which has that of the line before, and so of all."""
        return self._last

    def append(self, entry: K) -> None:
        """Write `entry`, which fits the others.

        **Raises:** `NotWrittenError`.
        """
        assert self._fits(entry)  # or the ledger could not be read again
        at = datetime.now(UTC).isoformat(timespec="seconds")
        record = {**msgspec.to_builtins(entry), "at": at, "before": self._last}
        line = json.dumps(record, allow_nan=False).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)  # none on Windows
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | flags)
            with open(descriptor, "wb") as file:
                file.truncate(self._end)
                file.seek(self._end)
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if self._end == 0:
                sync(self.path.parent)
        except OSError as error:
            raise NotWrittenError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._add(line, entry, at)

    def of(self, kind: type[E]) -> Iterator[E]:
        """The entries of a kind."""
        return (entry for entry in self.entries if isinstance(entry, kind))


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
