"""A corpus as ids: a small text in memory, all else in files that are mapped into it."""

import contextlib
import hashlib
import io
import itertools
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import tiktoken
from jaxtyping import Integer

from gptlite.config import DataConfig
from gptlite.errors import UserError, require
from gptlite.machine.files import lock_patiently
from gptlite.machine.progress import log, progress_bar
from gptlite.machine.records import read_record, write_record
from gptlite.text.corpus import DATA_FOLDER, Corpus
from gptlite.text.tokenizer import Ids, Tokenizer

# Characters up to which a text is kept in memory: at most 64 MB of ids.
IN_MEMORY = 2**24

# Ids between two entries of the journal: what a process that is killed loses.
SEGMENT = 2**22

# The version of the code that makes ids of texts. A change of it makes files of ids anew.
ENCODING = 2


@dataclass(frozen=True)
class Split:
    """A corpus as ids."""

    train: Ids
    """The training ids; those of a large corpus are a memory-mapped file."""
    validation: Integer[np.ndarray, " validation_tokens"]
    """The validation ids."""
    validation_bytes: int
    """UTF-8 bytes of `validation` without its first token, which is not predicted."""
    sha256: str
    """A checksum of the text, or of the ids of a dataset."""
    characters: int
    """Those of the text, or of the documents that were read."""


def split_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    validation_tokens: int = DataConfig.validation_tokens,
    max_tokens: int | None = None,
    *,
    folder: Path = DATA_FOLDER / "tokens",
    in_memory: int = IN_MEMORY,
) -> Split:
    """The parts of `corpus` as ids, for training and for validation: see `Corpus.parts`. Each part
    is encoded separately. After each document follows the end of a text, if the tokenizer has one.

    All but a text of at most `in_memory` characters is encoded piece by piece into files in
    `folder`. Their name is made of the checksums of text and tokenizer, so that it is encoded only
    once. If it is interrupted, it goes on where it was, if the corpus can: see `Corpus.state`.

    `validation_tokens`: for validation, the first so many. Further documents are for training. (Of
    fewer than ten documents, the last tenth of the ids is for validation.)

    `max_tokens`: of those for training, the first so many. No more of a dataset is read.

    **Raises:** `UserError` if a character is not in the vocabulary or a file cannot be written.
    """
    is_dataset = corpus.characters is None
    limits = (max_tokens if is_dataset else None, validation_tokens)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    if corpus.characters is not None and corpus.characters <= in_memory:
        store = _Store(None, dtype, limits)
        _encode(corpus, tokenizer, store)
    else:
        spec = [ENCODING, tiktoken.__version__, corpus.version, tokenizer.to_json(), *limits]
        path = folder / hashlib.sha256(json.dumps(spec).encode("ascii")).hexdigest()[:32]
        try:
            # One process writes, the others wait for it.
            with lock_patiently(path.with_name(f".{path.name}.lock"), "encodes this text"):
                store = _Store(path, dtype, limits)
                if not store.journal.is_finished:
                    log(f"encoding {corpus.name}, once, into {path}.train")
                    _encode(corpus, tokenizer, store)
        except OSError as error:
            message = f"The ids of {corpus.name} cannot be kept in {folder}: {error}."
            raise UserError(message) from error
    sums, (train, validation) = store.journal.sha256, store.ids()
    require(not is_dataset or len(train) > 1, f"{corpus.name} is empty.")
    if is_dataset and len(validation) < 2:  # fewer than ten documents
        cut = int(0.9 * len(train))
        train, validation = train[:cut], train[cut:][:validation_tokens].astype(np.int32)
    lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    return Split(
        train[:max_tokens],
        validation,
        int(lengths[validation[1:]].sum()),
        hashlib.sha256("".join(sums).encode("ascii")).hexdigest() if is_dataset else corpus.version,
        store.journal.characters,
    )


def encode_pieces(tokenizer: Tokenizer, pieces: Iterator[str]) -> Iterator[Ids]:
    """The ids of a text in pieces; pieces are joined and cut where their tokens allow it."""
    rest = ""
    for piece in pieces:
        if cut := tokenizer.boundary(rest):
            yield tokenizer.encode(rest[:cut])
            rest = rest[cut:]
        rest += piece
    if rest:
        yield tokenizer.encode(rest)


def _encode(corpus: Corpus, tokenizer: Tokenizer, store: "_Store") -> None:
    """Encode what is not in `store` yet."""
    journal, is_dataset = store.journal, corpus.characters is None
    total, unit = (store.limits[0], " tokens") if is_dataset else (corpus.characters, " characters")
    bar = progress_bar("encoding", total, unit=unit, done=journal.counts[0], delay=2.0)
    after = [] if corpus.is_text else [_end_of_document(tokenizer)]

    def counted(pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece
            journal.characters += len(piece)
            bar.update(0 if is_dataset else len(piece))

    with bar, store.opened():
        for is_held_out, pieces in corpus.parts(journal.state, journal.parts):
            part, pieces = int(is_held_out and not store.is_full(1)), counted(pieces)
            for ids in itertools.chain(encode_pieces(tokenizer, pieces), after):
                store.add(part, ids)
                bar.update(len(ids) if is_dataset and part == 0 else 0)
                if part and store.is_full(part):
                    break
            for _ in pieces:  # to the end, where a text that has changed is found out
                pass
            journal.parts += 1
            if is_dataset and store.is_full(0) and journal.counts[1] > 1:
                break
            if store.n_pending >= SEGMENT and (state := corpus.state()) is not None:
                store.commit(state)
        store.commit(None, is_finished=True)


def _end_of_document(tokenizer: Tokenizer) -> Ids:
    """The end of a text, or the end of a line if the tokenizer has no such token."""
    try:
        return np.array(tokenizer.end_ids[:1] or tokenizer.encode("\n"), np.int32)
    except UserError as error:
        raise UserError(f"A line's end is put after each document. {error}") from error


Size = Annotated[int, msgspec.Meta(ge=0)]
Two = msgspec.Meta(min_length=2, max_length=2)


class _Journal(msgspec.Struct):
    """How much of a store is complete."""

    counts: Annotated[list[Size], Two] = msgspec.field(default_factory=lambda: [0, 0])
    """Ids for training, and for validation."""
    sha256: Annotated[list[str], Two] = msgspec.field(default_factory=lambda: ["", ""])
    """Their checksums."""
    parts: Size = 0
    characters: Size = 0
    state: Any = None
    """Where the encoding goes on, if it is not finished: see `Corpus.state`."""
    is_finished: bool = False


class _Store:
    """Ids for training and for validation, in memory, or in two files beside a journal."""

    def __init__(self, path: Path | None, dtype: np.dtype, limits: tuple[int | None, int]):
        """`path`: of the files, without their suffixes; None: in memory. Ids in the files that are
        complete and not damaged stay. `limits`: the most ids of each kind."""
        self.limits = limits
        self.journal = _Journal()
        self.n_pending = 0
        """Ids since the last entry in the journal."""
        self._path, self._dtype = path, dtype
        self._data = [path.with_suffix(x) for x in (".train", ".validation")] if path else []
        self._sums = [hashlib.sha256(), hashlib.sha256()]
        self._files: list[Any] = [io.BytesIO(), io.BytesIO()]
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                self._restore(read_record(path.with_suffix(".json"), _Journal))

    def _restore(self, journal: _Journal) -> None:
        if journal.state is None and not journal.is_finished:
            return
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
    def opened(self) -> Iterator[None]:
        """Ids can be added."""
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

    def add(self, part: int, ids: Ids) -> None:
        """Add ids for training (0) or validation (1), as far as they are wanted."""
        most, count = self.limits[part], self.journal.counts[part]
        content = (ids if most is None else ids[: most - count]).astype(self._dtype).tobytes()
        self._files[part].write(content)
        self._sums[part].update(content)
        n_ids = len(content) // self._dtype.itemsize
        self.journal.counts[part] += n_ids
        self.n_pending += n_ids

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
