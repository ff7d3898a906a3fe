"""The corpus that a run is trained on: a text, or the documents of a dataset.

A corpus of any size is read in pieces, several times. Only `Corpus.text` holds all of it in memory.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gptlite.errors import require
from gptlite.machine.characters import scan, utf8

# Every tenth document is for validation, until there is enough of it.
HELD_OUT = 10


@dataclass(frozen=True)
class Corpus:
    """A text, or documents."""

    name: str
    """For messages; `load_corpus` loads what `--data.corpus` names by it."""
    version: str
    """Changes with the content. That of a text is the sha256 of its UTF-8 bytes."""
    read: Callable[[Any], Iterator[str]] = field(repr=False, compare=False)
    """The text in pieces, or the documents, from the beginning (None) or from where `state` was."""
    state: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)
    """Where `read` is, as plain data. None: at a place that it cannot go on from."""
    characters: int | None = None
    """Those of a text. None: unknown, because a dataset is not read beforehand."""
    alphabet: str | None = None
    """The distinct characters of a text, sorted. None: unknown."""
    is_text: bool = True
    """Whether the pieces are those of one text. Else each is a document."""

    @property
    def text(self) -> str:
        """The whole text, in memory; documents are joined by line ends."""
        return ("" if self.is_text else "\n").join(self.read(None))

    def parts(self, state: Any = None, first: int = 0) -> Iterator[tuple[bool, Iterator[str]]]:
        """The parts that are encoded separately, in pieces, and whether each is held out: the
        first 90 % of the characters of a text, then the rest; or the documents of a dataset, of
        which every tenth is held out. (A text in a dataset, too, is held out in pieces, because
        its length is not known.)

        `first`: the number of the document at `state`."""
        if self.characters is None:
            for number, piece in enumerate(self.read(state), first):
                yield number % HELD_OUT == HELD_OUT - 1, iter([piece])
            return
        cut = int(0.9 * self.characters)
        pieces = _split_at(cut, self.read(None))
        yield False, _take(cut, pieces)
        yield True, pieces


def _split_at(place: int, pieces: Iterator[str]) -> Iterator[str]:
    """The pieces, with one that goes beyond character `place` split there."""
    for piece in pieces:
        yield from (piece[:place], piece[place:]) if 0 < place < len(piece) else (piece,)
        place -= len(piece)


def _take(characters: int, pieces: Iterator[str]) -> Iterator[str]:
    """The first pieces, `characters` characters in total."""
    while characters > 0 and (piece := next(pieces, None)) is not None:
        characters -= len(piece)
        yield piece


def text_corpus(text: str | Callable[[], Iterator[str]], name: str = "text") -> Corpus:
    """A text, in memory or as a function that reads it in pieces, as a corpus. Reads it once.

    **Raises:** `UserError` if `text` is neither, or has fewer than two distinct characters.
    `Corpus.read` raises it at the end of a text that has changed since.
    """
    kinds = "A text is a string, or a function that reads one in pieces"
    require(isinstance(text, str) or callable(text), f"{kinds}, got {text!r:.100}.")
    pieces = (lambda: iter([text])) if isinstance(text, str) else text
    version, characters, alphabet = scan(pieces())
    require(bool(alphabet), f"The corpus {name} is empty.")
    require(
        len(alphabet) > 1,
        f"The corpus {name} is the character {alphabet!r}, {characters:,} times: there is nothing "
        "to learn from it.",
    )

    def read(state: None) -> Iterator[str]:
        checksum = hashlib.sha256()
        for piece in pieces():
            checksum.update(utf8(piece))
            yield piece
        unchanged = checksum.hexdigest() == version
        require(unchanged, f"The corpus {name} was changed while it was read.")

    return Corpus(name, version, read, characters=characters, alphabet=alphabet)


def documents(texts: Any, name: str = "documents") -> Corpus:
    """A list of strings as a corpus of documents: encoded one by one, with the end of a text after
    each, and every tenth for validation.

    **Raises:** `UserError` if there are none, or a document is no string.
    """
    require(
        isinstance(texts, list | tuple) and bool(texts) and all(isinstance(x, str) for x in texts),
        f"documents takes a list of strings, at least one, got {str(texts)[:100]}.",
    )
    checksum, texts = hashlib.sha256(), (*texts,)  # which a caller's list may not be any more
    for text in texts:
        checksum.update(len(utf8(text)).to_bytes(8, "little") + utf8(text))
    return Corpus(name, checksum.hexdigest(), lambda _: filter(None, texts), is_text=False)
