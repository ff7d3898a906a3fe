"""A stream of documents as ids, in files that grow segment by segment."""

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.errors import UserError
from gptlite.machine.files import read_json, sync, write_json
from gptlite.machine.progress import log, progress_bar
from gptlite.text.documents import Documents, is_held_out
from gptlite.text.tokenizer import Ids, Parts, Tokenizer

# Ids in a segment: what a process that is killed loses.
SEGMENT = 2**22


def mapped(path: Path, dtype: np.dtype, count: int) -> Ids:
    """The ids in a file, memory-mapped, to be read at random: without read-ahead."""
    ids = np.memmap(path, dtype, mode="r", shape=(count,))
    if hasattr(mmap, "MADV_RANDOM"):
        ids._mmap.madvise(mmap.MADV_RANDOM)  # pyright: ignore[reportAttributeAccessIssue]
    return ids


class Stream:
    """The ids of `documents` in two files, for training and validation, and a third that says how
    much of them is complete. Started again, it goes on after the last complete segment."""

    def __init__(
        self,
        path: Path,
        documents: Documents,
        tokenizer: Tokenizer,
        validation_tokens: int,
        max_tokens: int | None,
        dtype: np.dtype,
    ):
        """`path`: of the files, without their suffixes."""
        self._paths = [path.with_suffix(suffix) for suffix in (".train", ".validation")]
        self._journal = path.with_suffix(".json")
        self._documents, self._tokenizer = documents, tokenizer
        self._most = [max_tokens, validation_tokens]
        self._dtype = dtype
        self._fresh()
        self._restore()

    def _fresh(self) -> None:
        self.segments: list[dict[str, Any]] = []
        self._state: Any = None
        self.is_finished = False
        self.counts, self.documents, self.characters = [0, 0], 0, 0

    def _restore(self) -> None:
        """Go on where another process was, if its files are not damaged."""
        try:
            record = read_json(self._journal)
            if record["fingerprint"] != self._documents.fingerprint:
                log(f"{self._documents.name} has changed since it was encoded, and is read anew.")
                return
            for part in record["segments"]:
                self._check(part)
            self.segments, self._state = record["segments"], record["state"]
            self.documents, self.characters = record["documents"], record["characters"]
            self.is_finished = record["finished"]
        except (OSError, ValueError, KeyError, TypeError):
            self._fresh()
            return
        if self.segments and not self.is_finished:
            log(f"going on after {self.counts[0]:,} tokens of {self._documents.name}")

    def _check(self, part: dict[str, Any]) -> None:
        """**Raises:** `ValueError` if a segment in the files is not what it was."""
        for i, path in enumerate(self._paths):
            with path.open("rb") as file:
                file.seek(self.counts[i] * self._dtype.itemsize)
                content = file.read(part["counts"][i] * self._dtype.itemsize)
            if hashlib.sha256(content).hexdigest() != part["sha256"][i]:
                raise ValueError(f"{path} is damaged")
            self.counts[i] += part["counts"][i]

    def append(self) -> None:
        """Encode the rest of the documents."""
        self._paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path, count in zip(self._paths, self.counts, strict=True):
            with path.open("ab") as file:  # without what belongs to no segment
                file.truncate(count * self._dtype.itemsize)
        between = [] if self._documents.is_text else [self._between]
        pending: list[list[Any]] = [[], []]
        sizes = [0, 0]
        bar = progress_bar(
            "encoding", self._most[0], unit=" tokens", done=self.counts[0], delay=2.0
        )
        with bar:
            for text in self._documents.read(self._state):
                held_out = is_held_out(self.documents)
                held_out &= self.counts[1] + sizes[1] < self._most[1]
                for ids in (self._tokenizer.encode(text), *between):
                    pending[held_out].append(ids)
                    sizes[held_out] += len(ids)
                    bar.update(0 if held_out else len(ids))
                self.documents += 1
                self.characters += len(text)
                train, validation = (self.counts[i] + sizes[i] for i in (0, 1))
                if self._most[0] is not None and train >= self._most[0] and validation > 1:
                    break
                if sum(sizes) >= SEGMENT:
                    self._write(pending, finished=False)
                    pending, sizes = [[], []], [0, 0]
        self._write(pending, finished=True)

    @property
    def _between(self) -> Ids:
        """What follows a document: the end of a text, or a line's end where there is none."""
        ends = self._tokenizer.end_ids
        return np.array(ends[:1], np.int32) if ends else self._tokenizer.encode("\n")

    def _write(self, pending: list[list[Any]], *, finished: bool) -> None:
        part: dict[str, Any] = {"counts": [], "sha256": []}
        for i, path in enumerate(self._paths):
            ids = np.concatenate([np.zeros(0, np.int32), *pending[i]])
            most = self._most[i]
            ids = ids if most is None else ids[: most - self.counts[i]]
            content = ids.astype(self._dtype).tobytes()
            with path.open("ab") as file:
                file.write(content)
            sync(path)
            part["counts"].append(len(ids))
            part["sha256"].append(hashlib.sha256(content).hexdigest())
            self.counts[i] += len(ids)
        self.segments.append(part)
        self.is_finished = finished
        write_json(
            self._journal,
            {
                "fingerprint": self._documents.fingerprint,
                "documents": self.documents,
                "characters": self.characters,
                "segments": self.segments,
                "state": None if finished else self._documents.state(),
                "finished": finished,
            },
        )

    @property
    def sha256(self) -> str:
        """A checksum of all ids."""
        return hashlib.sha256(json.dumps(self.segments).encode("ascii")).hexdigest()

    def ids(self) -> Parts:
        """For training, memory-mapped, and for validation.

        **Raises:** `UserError` if there are too few for both.
        """
        train, held_out = self.counts
        if train < 2:
            raise UserError(f"{self._documents.name} is empty.")
        found = mapped(self._paths[0], self._dtype, train)
        if held_out > 1:
            rest = np.memmap(self._paths[1], self._dtype, mode="r", shape=(held_out,))
            return found, np.array(rest, np.int32)
        # Fewer than ten documents: the last tenth of their ids.
        cut = int(0.9 * train)
        return found[:cut], np.array(found[cut:][: self._most[1]], np.int32)
