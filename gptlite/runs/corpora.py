"""The corpus of a run, by its name: TinyShakespeare, Python's documentation, files, datasets."""

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path

from gptlite.errors import UserError, require
from gptlite.machine.progress import log
from gptlite.machine.shakespeare import download_shakespeare, load_shakespeare
from gptlite.text.corpus import DATA_FOLDER, Corpus, text_corpus

# Bytes of a file that are read at once: few enough to stay in a core's cache.
PIECE = 2**20


def load_corpus(
    name: str = "auto",
    *,
    data_folder: Path = DATA_FOLDER,
    download: Callable[[float], bytes] = download_shakespeare,
) -> Corpus:
    """Load what `--data.corpus` names (see `DataConfig.corpus`). A text is read once to its end, a
    dataset is not.

    Only `auto` falls back to `pydoc`, and logs why.

    **Raises:** `UserError` if there is no such corpus, or it cannot be read, is empty, is not UTF-8
    or has only one distinct character.
    """
    require(bool(name), "The name of the corpus is empty; see --data.corpus in --help.")
    if name == "auto":
        try:
            return load_corpus("shakespeare", data_folder=data_folder, download=download)
        except UserError as error:
            log(f"{error} Training on `pydoc`, the documentation inside Python, instead.")
            return load_corpus("pydoc")
    if name == "shakespeare":
        return text_corpus(load_shakespeare(data_folder, download), name)
    if name == "pydoc":
        from pydoc_data.topics import topics

        return text_corpus("\n".join(topics[title] for title in sorted(topics)), name)
    if name.startswith("hf:"):
        from gptlite.hugging_face.datasets import open_dataset

        return open_dataset(name)
    return text_corpus(_path(Path(name)), name)


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
        texts = (file for file in path.rglob("*") if file.suffix.lower() == ".txt")
        files = sorted(file for file in texts if not file.is_dir())
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
                marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                is_utf16 = place == 0 and content.startswith(marks)
                require(not is_utf16, f"{path} is UTF-16 text: save it as UTF-8.")
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


def require_documents(corpus: Corpus) -> None:
    """**Raises:** `UserError` if `corpus` is a text: `model.separate_documents` needs documents."""
    require(
        not corpus.is_text,
        "model.separate_documents needs a dataset of documents, such as hf:FILE.jsonl, got the "
        f"text {corpus.name}.",
    )
