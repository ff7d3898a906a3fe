"""Where text comes from."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptlite.config import UserError
from gptlite.files import write_atomically
from gptlite.text.download import SHAKESPEARE, download_shakespeare

# The clone's data/ folder, wherever the command is typed.
DATA_FOLDER = Path(__file__).resolve().parents[2] / "data"
SHAKESPEARE_FILE = "tinyshakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_SECONDS = 10.0


@dataclass(frozen=True)
class Corpus:
    """A text, the name that loads it again, and the sha256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load_corpus(
    name: str = "auto",
    *,
    data_folder: Path = DATA_FOLDER,
    say: Callable[[str], None] = print,
    download: Callable[[float], bytes] = download_shakespeare,
) -> Corpus:
    """Load what `--data.corpus` names (see `DataConfig.corpus`).

    Only `auto` falls back: to `pydoc`, after telling `say` why, in a paragraph. `say` also hears of
    a download.

    **Raises:** `UserError` if there is no such corpus, it cannot be had, is empty or is not UTF-8.
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
        text = _decode(_shakespeare(data_folder, download, say), SHAKESPEARE_FILE)
    elif name == "pydoc":
        text = _pydoc()
    elif name.startswith("hf:"):
        text = _hugging_face(name)
    else:
        text = _path(Path(name))
    if not text:
        raise UserError(f"The corpus {name} is empty.")
    return Corpus(name, text, hashlib.sha256(text.encode("utf-8")).hexdigest())


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
            f"TinyShakespeare is not at {path} and could not be fetched from the Hugging Face hub "
            f"({SHAKESPEARE}): {error}. {by_hand}"
        ) from error
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(
            f"What the Hugging Face hub holds as {SHAKESPEARE} is not TinyShakespeare (its sha256 "
            f"should be {SHAKESPEARE_SHA256}). {by_hand}"
        )
    try:
        data_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        say(f"TinyShakespeare was fetched, but could not be kept at {path}: {error}.")
    return content


def _pydoc() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[title] for title in sorted(topics))


def _hugging_face(name: str) -> str:
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
    return "\n".join(row for row in rows[column] if row)


def _path(path: Path) -> str:
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError:  # a name that is too long to be one
        is_folder, exists = False, False
    if is_folder:
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise UserError(f"The folder {path} has no .txt file in it.")
        return "\n".join(_read(file) for file in files)
    if not exists:
        raise UserError(
            f"There is no corpus {path}: give a text file, a folder of .txt files, `shakespeare`, "
            "`pydoc`, `hf:NAME` or `auto`."
        )
    return _read(path)


def _read(path: Path) -> str:
    return _decode(_read_bytes(path), path)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def _decode(content: bytes, name: Path | str) -> str:
    # Bytes, not text mode: line ends stay as they are.
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}."
        ) from error
