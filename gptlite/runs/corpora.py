"""The corpus of a run, by its name: TinyShakespeare, Python's documentation, files, datasets."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gptlite.errors import UserError, require
from gptlite.machine.folders import DATA_FOLDER
from gptlite.machine.progress import log
from gptlite.machine.shakespeare import download_shakespeare, load_shakespeare
from gptlite.machine.text_files import read_file
from gptlite.text.corpus import Corpus, documents, text_corpus

# Files and folders of a kind that are named.
NAMED = 5


def load_corpus(
    name: str | Sequence[str] = "auto",
    *,
    data_folder: Path = DATA_FOLDER,
    download: Callable[[float], bytes] = download_shakespeare,
) -> Corpus:
    """Load what `--data.corpus` names, or a list of documents. A text is read once to its end, a
    dataset is not.

    Only `auto` falls back to `pydoc`, and logs why.

    **Arguments:**

    - `name`: see `DataConfig.corpus`. Or documents, as `documents` takes them.
    - `data_folder`: where TinyShakespeare is kept once it is fetched.
    - `download(seconds)`: its bytes, fetched within so many seconds.

    **Raises:** `UserError` if there is no such corpus, or it cannot be read, is empty, is not UTF-8
    or has only one distinct character.
    """
    if isinstance(name, list | tuple):
        return documents(name)
    require(bool(name), "The name of the corpus is empty; see --data.corpus in --help.")
    name = str(name)
    if name == "auto":
        try:
            return load_corpus("shakespeare", data_folder=data_folder, download=download)
        except UserError as error:
            log(f"{error} The text is `pydoc`, the documentation inside Python, instead.")
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
        path = path.expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL in it, of no user
        is_folder = exists = False
    require(
        exists,
        f"There is no corpus {path}: --data.corpus takes a text file, a folder of .txt files, "
        "`shakespeare`, `pydoc`, `hf:NAME` or `auto`.",
    )
    files = [path]
    if is_folder:
        left_out: list[str] = []
        files = sorted(_texts_in(path, left_out))
        _log_some(left_out)
        links = [file for file in files if not _is_inside(file, path)]
        _log_some([f"{x} is read, which is a link to {os.path.realpath(x)}." for x in links])
    require(bool(files), f"The folder {path} has no .txt file in it.")
    for file in files:
        require(
            file.is_file(), f"The corpus {file} is not a regular file, and the text is read twice."
        )

    def pieces() -> Iterator[str]:
        for number, file in enumerate(files):
            if number:
                yield "\n"
            yield from read_file(file)

    return pieces


def _log_some(sentences: Sequence[str]) -> None:
    for sentence in sentences[:NAMED]:
        log(sentence)
    if len(sentences) > NAMED:
        log(f"So it is with {len(sentences) - NAMED} more.")


def _texts_in(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """The .txt files in a folder, but hidden ones: copies of editors, such as Jupyter's in
    .ipynb_checkpoints/. What is left out otherwise is added to `left_out`."""

    def note(error: OSError) -> None:
        left_out.append(f"{error.filename} is left out: {error.strerror}.")

    for place, folders, names in os.walk(folder, onerror=note):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = (Path(place, name) for name in folders if os.path.islink(Path(place, name)))
        left_out += [f"{link} is left out: it is a link to a folder." for link in links]
        for name in names:
            if name.lower().endswith(".txt") and not name.startswith("."):
                yield Path(place, name)


def _is_inside(file: Path, folder: Path) -> bool:
    # A link may lead to itself, of which `Path.resolve` makes a RuntimeError.
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def require_documents(corpus: Corpus) -> None:
    """**Raises:** `UserError` if `corpus` is a text: `model.separate_documents` needs documents."""
    require(
        not corpus.is_text,
        "model.separate_documents needs a dataset of documents, such as hf:FILE.jsonl, got the "
        f"text {corpus.name}.",
    )
