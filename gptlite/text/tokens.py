"""Text to ids: a small corpus in memory, a large one in a memory-mapped file."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from filelock import AcquireReturnProxy
from jaxtyping import Integer

from gptlite.config import DataConfig
from gptlite.errors import UserError, require
from gptlite.machine.files import lock, read_json, sha256_of, write_json
from gptlite.machine.progress import log, progress_bar
from gptlite.text.corpus import DATA_FOLDER, Corpus, split_at, take
from gptlite.text.documents import Documents
from gptlite.text.stream import Stream, mapped
from gptlite.text.tokenizer import Ids, Parts, Tokenizer, encode_pieces

# Characters up to which a corpus is kept in memory: at most 64 MB of ids.
IN_MEMORY = 2**24

# The version of the code that makes ids of texts. A change of it makes files of ids anew.
ENCODING = 1

# How long to wait for another process that encodes the same text.
LOCK_SECONDS = 3600.0


@dataclass(frozen=True)
class Split:
    """A corpus as ids."""

    train: Ids
    """The training ids. Of a large corpus: a memory-mapped file."""
    validation: Integer[np.ndarray, " validation_tokens"]
    """The validation ids."""
    validation_bytes: int
    """UTF-8 bytes of `validation` without its first token, which is not predicted."""
    sha256: str
    """A checksum of the text, or of the ids of a dataset."""
    characters: int
    """Those of the text, or of the documents that were read."""


def split_corpus(
    corpus: Corpus | Documents,
    tokenizer: Tokenizer,
    validation_tokens: int = DataConfig.validation_tokens,
    max_tokens: int | None = None,
    *,
    folder: Path = DATA_FOLDER / "tokens",
    in_memory: int = IN_MEMORY,
) -> Split:
    """The first 90 % of the characters of `corpus` for training, the first `validation_tokens` of
    the rest for validation. The two parts are encoded separately.

    A corpus of more than `in_memory` characters is encoded piece by piece into a file in `folder`.
    Its name is made of the checksums of text and tokenizer, so that it is encoded only once.

    Documents of a dataset are encoded one by one into such a file, with the end of a text after
    each, if the tokenizer has one. Every tenth is for validation, until there are
    `validation_tokens` (of fewer than ten, the last tenth of the ids).

    `max_tokens`: of those for training, the first so many. No more of a dataset is read.

    **Raises:** `UserError` if a character is not in the vocabulary or the file cannot be written.
    """
    if isinstance(corpus, Documents):
        return _streamed(corpus, tokenizer, validation_tokens, max_tokens, folder)
    if corpus.characters <= in_memory:
        parts = {True: [np.zeros(0, np.int32)], False: [np.zeros(0, np.int32)]}
        for is_train, ids in _encoded(corpus, tokenizer, validation_tokens):
            parts[is_train].append(ids)
        train, validation = np.concatenate(parts[True]), np.concatenate(parts[False])
        size = _bytes_of(validation, tokenizer)
        return Split(train[:max_tokens], validation, size, corpus.sha256, corpus.characters)
    spec = [ENCODING, tiktoken.__version__]
    spec += [corpus.sha256, tokenizer.to_json(), validation_tokens]
    key = _key(spec)
    path, meta = folder / f"{key}.ids", folder / f"{key}.json"
    try:
        # One process writes, the others wait for it.
        with _locked(folder / f".{key}.lock"):
            split = _mapped(path, meta, tokenizer)
            if split is None:
                log(f"encoding {corpus.characters:,} characters, once, into {path}")
                _write(path, meta, corpus, tokenizer, validation_tokens)
                split = _mapped(path, meta, tokenizer)
    except OSError as error:
        raise UserError(f"The ids of {corpus.name} cannot be kept in {folder}: {error}.") from error
    assert split is not None
    train, validation = split
    size = _bytes_of(validation, tokenizer)
    return Split(train[:max_tokens], validation, size, corpus.sha256, corpus.characters)


def require_documents(corpus: Corpus | Documents, tokenizer: Tokenizer) -> None:
    """What `model.separate_documents` needs of a text.

    **Raises:** `UserError` if the ids of `corpus` have no token between documents.
    """
    is_text = isinstance(corpus, Corpus) or corpus.is_text
    require(
        not is_text,
        "model.separate_documents needs a dataset of documents, such as hf:FILE.jsonl, got the "
        f"text {corpus.name}.",
    )
    require(
        bool(tokenizer.end_ids),
        "model.separate_documents needs a tokenizer with an end-of-text token, such as bpe:4096 or "
        f"tiktoken:gpt2, got one without ({type(tokenizer).__name__}).",
    )


def _streamed(
    documents: Documents,
    tokenizer: Tokenizer,
    validation_tokens: int,
    max_tokens: int | None,
    folder: Path,
) -> Split:
    spec = [ENCODING, tiktoken.__version__]
    spec += [documents.name, tokenizer.to_json(), validation_tokens, max_tokens]
    key = _key(spec)
    sizes = (validation_tokens, max_tokens, _dtype(tokenizer))
    try:
        with _locked(folder / f".{key}.lock"):
            stream = Stream(folder / key, documents, tokenizer, *sizes)
            if not stream.is_finished:
                log(f"encoding {documents.name}, once, into {folder / key}.train")
                stream.append()
            train, validation = stream.ids()
    except OSError as error:
        raise UserError(
            f"The ids of {documents.name} cannot be kept in {folder}: {error}."
        ) from error
    size = _bytes_of(validation, tokenizer)
    return Split(train, validation, size, stream.sha256, stream.characters)


def _locked(path: Path) -> AcquireReturnProxy:
    """**Raises:** `UserError` if another process holds the lock for `LOCK_SECONDS`."""
    busy = (
        f"Another process has held {path} for {LOCK_SECONDS / 60:.0f} minutes. If none encodes "
        "this text, delete that file."
    )
    try:
        return lock(path, busy)
    except UserError:
        log(f"waiting for another process that encodes the same text (it holds {path})")
        return lock(path, busy, LOCK_SECONDS)


def _encoded(
    corpus: Corpus, tokenizer: Tokenizer, validation_tokens: int
) -> Iterator[tuple[bool, Ids]]:
    """The ids in pieces: first those for training, with True, then those for validation.

    **Raises:** `UserError`, at the end, if the text has changed since it was loaded.
    """
    cut = corpus.training_characters
    pieces = split_at(cut, _checked(corpus))
    for ids in encode_pieces(tokenizer, take(cut, pieces)):
        yield True, ids
    left = validation_tokens
    for ids in encode_pieces(tokenizer, pieces):
        yield False, ids[:left]
        left -= len(ids)
        if left <= 0:
            break
    for _ in pieces:  # to the end, for the checksum
        pass


def _checked(corpus: Corpus) -> Iterator[str]:
    """The pieces of `corpus`, with a progress bar and a check of the text's checksum."""
    checksum = hashlib.sha256()
    with progress_bar("encoding", corpus.characters, unit=" characters", delay=2.0) as bar:
        for piece in corpus.pieces():
            checksum.update(piece.encode("utf-8", "surrogatepass"))
            yield piece
            bar.update(len(piece))
    if checksum.hexdigest() != corpus.sha256:
        raise UserError(f"The corpus {corpus.name} was changed while it was read.")


def _write(
    path: Path, meta: Path, corpus: Corpus, tokenizer: Tokenizer, validation_tokens: int
) -> None:
    dtype, part, counts = _dtype(tokenizer), path.with_suffix(".part"), [0, 0]
    try:
        with part.open("wb") as file:
            for is_train, ids in _encoded(corpus, tokenizer, validation_tokens):
                file.write(ids.astype(dtype).tobytes())
                counts[0 if is_train else 1] += len(ids)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    write_json(meta, {"counts": counts, "checksum": _checksum(path, counts)})


def _key(spec: list[Any]) -> str:
    return hashlib.sha256(json.dumps(spec).encode("ascii")).hexdigest()[:32]


def _mapped(path: Path, meta: Path, tokenizer: Tokenizer) -> Parts | None:
    """What `_write` wrote; None if it is missing or damaged."""
    try:
        record = read_json(meta)
        if _checksum(path, record["counts"]) != record["checksum"]:
            return None
        train, validation = record["counts"]
        ids = mapped(path, _dtype(tokenizer), train + validation)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ids[:train], np.array(ids[train:], np.int32)


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _checksum(path: Path, counts: list[int]) -> str:
    """A checksum of the ids in `path` and of the number of ids in each part."""
    return hashlib.sha256(f"{sha256_of(path)} {counts}".encode()).hexdigest()


def _bytes_of(validation: Ids, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of `validation` without its first token."""
    lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    return int(np.array(lengths)[validation[1:]].sum())
