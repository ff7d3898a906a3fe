"""A corpus as ids: a small text in memory, all else in files that are mapped into it."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from jaxtyping import Integer

from gptlite.config import DataConfig
from gptlite.errors import UserError, require
from gptlite.machine.folders import DATA_FOLDER
from gptlite.machine.id_store import SEGMENT, IdStore, filled
from gptlite.machine.progress import progress_bar
from gptlite.machine.text_files import PIECE
from gptlite.text.corpus import HELD_OUT, Corpus
from gptlite.text.tokenizer import Ids, Tokenizer, n_bytes

# Characters up to which a text is kept in memory: at most 64 MB of ids.
IN_MEMORY = 2**24

# The version of the code that makes ids of texts. A change of it makes files of ids anew.
ENCODING = 4


@dataclass(frozen=True)
class Split:
    """A corpus as ids."""

    train: Ids
    """The training ids; those of a large corpus are a memory-mapped file."""
    validation: Integer[np.ndarray, " validation_tokens"]
    """The validation ids."""
    validation_bytes: int
    """UTF-8 bytes of the text of `validation`, without its first token, which is not predicted, and
    without what is put after each document."""
    sha256: str
    """A checksum of the text, or of the ids of a dataset."""
    characters: int
    """Those of the text, or of the documents that were read."""

    def bits_per_byte(self, val_loss: float) -> float:
        """Nats per token as bits per byte of UTF-8, which compare across tokenizers."""
        n_bytes = self.validation_bytes or math.nan
        return val_loss * (len(self.validation) - 1) / math.log(2) / n_bytes


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

    **Raises:** `UserError` for an unknown character, a file that cannot be written, limits below 2.
    """
    DataConfig(max_tokens=max_tokens, validation_tokens=validation_tokens)  # or an error
    is_dataset = corpus.characters is None
    limits = (max_tokens if is_dataset else None, validation_tokens)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    if corpus.characters is not None and corpus.characters <= in_memory:
        store = IdStore(None, dtype, limits)
        _encode(corpus, tokenizer, store)
    else:
        spec = [ENCODING, tiktoken.__version__, corpus.version, tokenizer.to_json(), *limits]
        path = folder / hashlib.sha256(json.dumps(spec).encode("ascii")).hexdigest()[:32]
        try:
            store = filled(path, dtype, limits, lambda x: _encode(corpus, tokenizer, x))
        except OSError as error:
            raise UserError(f"The ids of {corpus.name} cannot be kept: {error}.") from error
    journal, (train, validation) = store.journal, store.ids()
    sums, text_bytes, ends = journal.sha256, journal.validation_bytes, []
    require(not is_dataset or len(train) > 1, f"{corpus.name} is empty.")
    if is_dataset and len(validation) < 2:  # fewer than ten documents
        cut = int(0.9 * len(train))
        train, validation = train[:cut], train[cut:][:validation_tokens].astype(np.int32)
        ends = [end - cut for end in journal.ends if 0 < end - cut <= len(validation)]
        bounds = zip([0, *ends], [*(end - 1 for end in ends), len(validation)], strict=True)
        text_bytes = sum(n_bytes(tokenizer, validation[start:end]) for start, end in bounds)
    return Split(
        train[:max_tokens],
        validation,
        text_bytes - n_bytes(tokenizer, validation[: 1 not in ends]),  # unless it is an end
        hashlib.sha256("".join(sums).encode("ascii")).hexdigest() if is_dataset else corpus.version,
        journal.characters,
    )


def encode_pieces(tokenizer: Tokenizer, pieces: Iterator[str]) -> Iterator[Ids]:
    """The ids of a text in pieces; pieces are joined and cut where their tokens allow it."""
    rest = ""
    for piece in (x[i : i + PIECE] for x in pieces for i in range(0, len(x), PIECE)):
        if cut := tokenizer.boundary(rest):
            yield tokenizer.encode(rest[:cut])
            rest = rest[cut:]
        rest += piece
    if rest:
        yield tokenizer.encode(rest)


def _encode(corpus: Corpus, tokenizer: Tokenizer, store: IdStore) -> None:
    """Encode what is not in `store` yet."""
    journal, is_dataset = store.journal, corpus.characters is None
    total, unit = (store.limits[0], " tokens") if is_dataset else (corpus.characters, " characters")
    bar = progress_bar("encoding", total, unit=unit, done=journal.counts[0], delay=2.0)

    def counted(pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece
            journal.characters += len(piece)
            bar.update(0 if is_dataset else len(piece))

    with bar, store.opened(corpus.name):
        for is_held_out, pieces in corpus.parts(journal.state, journal.parts):
            part, pieces = int(is_held_out and not store.is_full(1)), counted(pieces)
            for ids in encode_pieces(tokenizer, pieces):
                ids = store.add(part, ids)
                bar.update(len(ids) if is_dataset and part == 0 else 0)
                journal.validation_bytes += n_bytes(tokenizer, ids) if part else 0
                if part and store.is_full(part):
                    break
            for _ in pieces:  # to the end, where a text that has changed is found out
                pass
            if not corpus.is_text:
                is_whole = len(store.add(part, _end_of_document(tokenizer))) > 0
                if is_whole and not part and len(journal.ends) < HELD_OUT - 1:
                    journal.ends.append(journal.counts[0])
            journal.parts += 1
            if is_dataset and store.is_full(0) and journal.counts[1] > 1:
                break
            if store.n_pending >= SEGMENT and (state := corpus.state()) is not None:
                store.commit(state)
        store.commit(None, is_finished=True)


def _end_of_document(tokenizer: Tokenizer) -> Ids:
    """The end of a text; of a line if the tokenizer has none, without a space that it may add."""
    try:
        return np.array(tokenizer.end_ids[:1] or tokenizer.encode("\n")[-1:], np.int32)
    except UserError as error:
        raise UserError(f"A line's end is put after each document. {error}") from error
