"""Where text comes from.

A text of any size is read in pieces, several times. Only `Corpus.text` holds all of it in memory.
"""

import codecs
import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from gptlite.errors import UserError, require
from gptlite.machine.progress import log, progress_bar
from gptlite.machine.shakespeare import download_shakespeare, load_shakespeare
from gptlite.text.documents import Documents, open_documents

# The clone's data/ folder, independent of the working directory.
DATA_FOLDER = Path(__file__).resolve().parents[2] / "data"

# Bytes of a file that are read at once: few enough to stay in a core's cache.
PIECE = 2**20


@dataclass(frozen=True)
class Corpus:
    """A text."""

    name: str
    """The name by which `load_corpus` loads it."""
    sha256: str
    """The checksum of its UTF-8 bytes."""
    characters: int
    """The number of characters."""
    alphabet: str
    """The distinct characters, sorted."""
    pieces: Callable[[], Iterator[str]] = field(repr=False, compare=False)
    """Reads the text from its beginning, in consecutive pieces."""

    @property
    def text(self) -> str:
        """The whole text, in memory."""
        return "".join(self.pieces())

    @property
    def training_characters(self) -> int:
        """How many characters, from the beginning, are for training."""
        return int(0.9 * self.characters)


def split_at(place: int, pieces: Iterator[str]) -> Iterator[str]:
    """The pieces, with one that goes beyond character `place` split there."""
    for piece in pieces:
        yield from (piece[:place], piece[place:]) if 0 < place < len(piece) else (piece,)
        place -= len(piece)


def take(characters: int, pieces: Iterator[str]) -> Iterator[str]:
    """The first pieces, `characters` characters in total."""
    while characters > 0 and (piece := next(pieces, None)) is not None:
        characters -= len(piece)
        yield piece


def text_corpus(text: str, name: str = "text") -> Corpus:
    """A text in memory as a corpus.

    **Raises:** `UserError` if it has fewer than two distinct characters.
    """
    return _scan(name, lambda: iter([text]))


def load_corpus(
    name: str = "auto",
    *,
    data_folder: Path = DATA_FOLDER,
    download: Callable[[float], bytes] = download_shakespeare,
) -> Corpus:
    """Load what `--data.corpus` names (see `DataConfig.corpus`), reading it once to the end. The
    documents of a dataset are joined by line ends.

    Only `auto` falls back to `pydoc`, and logs why.

    **Raises:** `UserError` if there is no such corpus, or it cannot be read, is empty, is not UTF-8
    or has only one distinct character.
    """
    if not name:
        raise UserError("The name of the corpus is empty; see --data.corpus in --help.")
    if name == "auto":
        try:
            return load_corpus("shakespeare", data_folder=data_folder, download=download)
        except UserError as error:
            log(f"{error} Training on `pydoc`, the documentation inside Python, instead.")
            return load_corpus("pydoc")
    if name == "shakespeare":
        text = load_shakespeare(data_folder, download)
        return _scan(name, lambda: iter([text]))
    if name == "pydoc":
        pieces = _pydoc
    elif name.startswith("hf:"):
        pieces = _joined(open_documents(name))
    else:
        pieces = _path(Path(name))
    return _scan(name, pieces)


def open_corpus(name: str) -> Corpus | Documents:
    """As `load_corpus`, but a Hugging Face dataset is not read beforehand."""
    return open_documents(name) if name.startswith("hf:") else load_corpus(name)


def code_points(text: str) -> Integer[np.ndarray, " characters"]:
    """The Unicode code points of `text`, as unsigned integers."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _scan(name: str, pieces: Callable[[], Iterator[str]]) -> Corpus:
    """**Raises:** `UserError` if there are fewer than two distinct characters."""
    checksum, characters = hashlib.sha256(), 0
    seen = np.zeros(sys.maxunicode + 1, bool)
    with progress_bar("reading", unit=" characters", delay=2.0) as bar:
        for piece in pieces():
            checksum.update(piece.encode("utf-8", "surrogatepass"))
            seen[code_points(piece)] = True
            characters += len(piece)
            bar.update(len(piece))
    alphabet = "".join(map(chr, np.flatnonzero(seen)))
    if not alphabet:
        raise UserError(f"The corpus {name} is empty.")
    if len(alphabet) == 1:
        raise UserError(
            f"The corpus {name} is the character {alphabet!r}, {characters:,} times: there is "
            "nothing to learn from it."
        )
    return Corpus(name, checksum.hexdigest(), characters, alphabet, pieces)


def _pydoc() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield "\n".join(topics[title] for title in sorted(topics))


def _joined(documents: Documents) -> Callable[[], Iterator[str]]:
    between = "" if documents.is_text else "\n"

    def pieces() -> Iterator[str]:
        for number, text in enumerate(documents.read()):
            yield f"{between}{text}" if number else text

    return pieces


def _path(path: Path) -> Callable[[], Iterator[str]]:
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # too long for a file name, or with a NUL in it
        is_folder = exists = False
    require(
        exists,
        f"There is no corpus {path}: --data.corpus takes a text file, a folder of .txt files, "
        "`shakespeare`, `pydoc`, `hf:NAME` or `auto`.",
    )
    files = [path]
    if is_folder:
        found = (file for file in path.rglob("*") if file.suffix.lower() == ".txt")
        files = sorted(file for file in found if not file.is_dir())
    require(bool(files), f"The folder {path} has no .txt file in it.")
    for file in files:
        require(
            file.is_file(), f"The corpus {file} is not a regular file, and the text is read twice."
        )

    def pieces() -> Iterator[str]:
        for number, file in enumerate(files):
            if number:
                yield "\n"
            yield from _read(file)

    return pieces


def _read(path: Path) -> Iterator[str]:
    """A UTF-8 file without its byte-order mark. Line ends are not changed."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    try:
        with path.open("rb") as file:
            while True:
                content = file.read(PIECE)
                if place == 0 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UserError(f"{path} is UTF-16 text: save it as UTF-8.")
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(content, final=not content)
                except UnicodeDecodeError as error:
                    wrong, value = place - pending + error.start, error.object[error.start]
                    raise UserError(
                        f"{path} is not UTF-8 text: byte {wrong} is 0x{value:02x}."
                    ) from error
                if 0 in content:
                    raise UserError(f"{path} is not text: byte {place + content.index(0)} is 0x00.")
                yield text.removeprefix("\ufeff") if place == 0 else text
                place += len(content)
                if not content:
                    return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
