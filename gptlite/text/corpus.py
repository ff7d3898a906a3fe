"""Where text comes from.

A text of any size is read in pieces, as often as it takes: only `Corpus.text` ever holds all of it.
"""

import codecs
import hashlib
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from jaxtyping import Integer
from tqdm import tqdm

from gptlite.config import UserError
from gptlite.files import write_atomically
from gptlite.text.download import SHAKESPEARE, download_shakespeare

# The clone's data/ folder, wherever the command is typed.
DATA_FOLDER = Path(__file__).resolve().parents[2] / "data"
SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_SECONDS = 10.0

# Bytes of a file that are read at once. What is made of them stays in a core's cache.
PIECE = 2**20


@dataclass(frozen=True)
class Corpus:
    """A text."""

    name: str
    """What loads it again."""
    sha256: str
    """Of its UTF-8 bytes."""
    characters: int
    """How many it has."""
    alphabet: str
    """The distinct ones, sorted."""
    pieces: Callable[[], Iterator[str]] = field(repr=False, compare=False)
    """Reads it, from the beginning, in pieces that follow each other."""

    @property
    def text(self) -> str:
        """All of it, in memory."""
        return "".join(self.pieces())


def text_corpus(text: str, name: str = "text") -> Corpus:
    """A text in memory as a corpus.

    **Raises:** `UserError` if it has fewer than two distinct characters.
    """
    return _survey(name, lambda: iter([text]))


def load_corpus(
    name: str = "auto",
    *,
    data_folder: Path = DATA_FOLDER,
    say: Callable[[str], None] = print,
    download: Callable[[float], bytes] = download_shakespeare,
) -> Corpus:
    """Load what `--data.corpus` names (see `DataConfig.corpus`), reading it once to the end.

    Only `auto` falls back: to `pydoc`, after telling `say` why, in a paragraph. `say` also hears of
    a download.

    **Raises:** `UserError` if there is no such corpus, it cannot be had, is empty, is not UTF-8 or
    has but one distinct character.
    """
    if not name:
        raise UserError("The name of the corpus is empty; see --data.corpus in --help.")
    if name == "auto":
        try:
            return load_corpus("shakespeare", data_folder=data_folder, say=say, download=download)
        except UserError as error:
            say(f"{error} Training on `pydoc`, the documentation inside Python, instead.")
            return load_corpus("pydoc")
    if name == "shakespeare":
        text = _shakespeare(data_folder, download, say).decode("utf-8")

        def pieces() -> Iterator[str]:
            return iter([text])

    elif name == "pydoc":
        pieces = _pydoc
    elif name.startswith("hf:"):
        pieces = _hugging_face(name)
    else:
        pieces = _path(Path(name))
    return _survey(name, pieces)


def code_points(text: str) -> Integer[np.ndarray, " characters"]:
    """The Unicode code points of `text`, as unsigned integers."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def progress_bar(what: str, characters: int | None = None) -> tqdm:
    """For what may take seconds or, with a large text, minutes: it shows after two seconds."""
    return tqdm(
        total=characters,
        desc=what,
        unit=" characters",
        unit_scale=True,
        delay=2.0,
        leave=False,
        file=sys.stdout,
        disable=not sys.stdout.isatty(),
    )


def _survey(name: str, pieces: Callable[[], Iterator[str]]) -> Corpus:
    """**Raises:** `UserError` if there are fewer than two distinct characters."""
    checksum, characters = hashlib.sha256(), 0
    seen = np.zeros(sys.maxunicode + 1, bool)
    with progress_bar("reading") as bar:
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


def _shakespeare(
    data_folder: Path, download: Callable[[float], bytes], say: Callable[[str], None]
) -> bytes:
    path = data_folder / SHAKESPEARE_FILE
    by_hand = (
        f"To use it, put the 1,115,394-character file, known as input.txt from karpathy/char-rnn, "
        f"at {path}."
    )
    if path.is_file():
        content = _read_bytes(path)
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise UserError(
                f"{path} is not TinyShakespeare: its sha256 should be {SHAKESPEARE_SHA256}. Delete "
                "it to have it fetched again, or name it as a file with --data.corpus to train on "
                "it as it is."
            )
        return content
    say(f"fetching TinyShakespeare to {path}")
    try:
        content = download(DOWNLOAD_SECONDS)
    except OSError as error:
        raise UserError(
            f"TinyShakespeare is not at {path} and could not be fetched from {SHAKESPEARE}: "
            f"{error}. {by_hand}"
        ) from error
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(
            f"What is at {SHAKESPEARE} is not TinyShakespeare (its sha256 should be "
            f"{SHAKESPEARE_SHA256}). {by_hand}"
        )
    try:
        data_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        say(f"TinyShakespeare was fetched, but could not be kept at {path}: {error}.")
    return content


def _pydoc() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield "\n".join(topics[title] for title in sorted(topics))


def _hugging_face(name: str) -> Callable[[], Iterator[str]]:
    import datasets

    source, split, column, *rest = [*name.removeprefix("hf:").split(":"), "", ""]
    if not source or any(rest):
        raise UserError(f"A Hugging Face dataset is named hf:NAME[:SPLIT[:COLUMN]], got {name!r}.")
    try:
        rows = datasets.load_dataset(source, split=split or "train")
    except Exception as error:  # `datasets` raises a dozen unrelated kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"The dataset {source} (split {split or 'train'}) could not be loaded: {reason}"
        ) from error
    texts = [
        key
        for key, kind in rows.features.items()
        if getattr(kind, "dtype", "") in ("string", "large_string")
    ]
    column = column or ("text" if "text" in texts else texts[0] if len(texts) == 1 else "")
    if column not in texts:
        raise UserError(
            f"{name} must name a column of text, as in hf:{source}:{split or 'train'}:COLUMN; "
            f"the dataset has {', '.join(texts) or 'none'}."
        )

    def pieces() -> Iterator[str]:
        # Rows are read from the disk as they are asked for.
        for number, batch in enumerate(rows.select_columns(column).iter(1000)):
            lines = [row for row in cast(dict[str, list[str]], batch)[column] if row]
            if lines:
                yield ("\n" if number else "") + "\n".join(lines)

    return pieces


def _path(path: Path) -> Callable[[], Iterator[str]]:
    try:
        is_folder, is_file, exists = path.is_dir(), path.is_file(), path.exists()
    except (OSError, ValueError):  # a name that is too long, or has a NUL in it, to be one
        is_folder, is_file, exists = False, False, False
    if is_folder:
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise UserError(f"The folder {path} has no .txt file in it.")
        return lambda: _joined(_read(file) for file in files)
    if is_file:
        return lambda: _read(path)
    if exists:
        raise UserError(f"The corpus {path} is not a regular file, which can be read twice.")
    raise UserError(
        f"There is no corpus {path}: give a text file, a folder of .txt files, `shakespeare`, "
        "`pydoc`, `hf:NAME` or `auto`."
    )


def _joined(texts: Iterable[Iterator[str]]) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number:
            yield "\n"
        yield from text


def _read(path: Path) -> Iterator[str]:
    """A UTF-8 file without its byte-order mark. Line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a regular file, which can be read twice.")
        with path.open("rb") as file:
            while True:
                content = file.read(PIECE)
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


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
