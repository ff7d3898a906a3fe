"""Documents of a Hugging Face dataset, one after the other: from the hub, or from files in its
formats, here or at an address."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import datasets
from datasets import config

from gptlite.errors import UserError, require
from gptlite.text.corpus import Corpus

# The formats of single files, by the ends of their names.
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
PACKED = (".gz", ".zst", ".xz", ".bz2")
# Lines of a text that are read at once.
LINES = 1000


def open_dataset(name: str) -> Corpus:
    """The dataset that `hf:NAME[:CONFIG][:SPLIT][:COLUMN]` names. NAME is one on the hub, or a
    folder, a file or an address with JSON lines, Parquet or text.

    **Raises:** `UserError` if there is no such dataset, or it has no such part.
    """
    # Not at the colon of an address, or of its port.
    source, *words = re.split(r":(?!//|\d+/)", name.removeprefix("hf:"))
    require(
        bool(source) and len(words) <= 3 and all(words),
        f"A Hugging Face dataset is named hf:NAME[:CONFIG][:SPLIT][:COLUMN], got {name!r}.",
    )
    end = re.sub("|".join(map(re.escape, PACKED)), "", source.lower())
    kind = next((kind for suffix, kind in FORMATS.items() if end.endswith(suffix)), None)
    try:
        if kind is None:
            configs = datasets.get_dataset_config_names(source)
            chosen = words.pop(0) if words and words[0] in configs else None
            builder = datasets.load_dataset_builder(source, chosen)
        else:
            builder = datasets.load_dataset_builder(kind, data_files=source)
        is_text = builder.name == "text"
        if is_text:
            builder.config.keep_linebreaks = True  # pyright: ignore[reportAttributeAccessIssue]
        splits = _streaming(builder)
        split = words.pop(0) if words and words[0] in splits else "train"
        rows = splits.get(split)
        texts = [] if rows is None else _texts(rows)
    except Exception as error:  # `datasets` raises a dozen unrelated kinds
        raise UserError(f"The dataset {source} cannot be loaded: {_reason(error)}") from error
    if rows is None or len(words) > 1:
        raise UserError(
            f"{name} must name a split of the dataset: it has {', '.join(map(str, splits))}."
        )
    column = words[0] if words else "text" if "text" in texts else texts[0] if texts else ""
    require(
        column in texts and (bool(words) or column == "text" or len(texts) <= 1),
        f"{name} must name a column of text, as in hf:{source}:{split}:COLUMN; the dataset has "
        f"{', '.join(texts) or 'none'}.",
    )

    reading = rows

    def read(state: Any) -> Iterator[str]:
        nonlocal reading
        try:
            reading = _streaming(builder)[split]  # another one, at its beginning
            if state is not None:
                reading.load_state_dict(state)
            cells = (text for row in reading if (text := row[column]))
            if not is_text:
                yield from cells
            while is_text and (part := "".join(itertools.islice(cells, LINES))):
                yield part
        except (UserError, GeneratorExit, KeyboardInterrupt):
            raise
        except Exception as error:  # `datasets` raises a dozen unrelated kinds
            raise UserError(f"{name} cannot be read: {_reason(error)}") from error

    # The hash changes with the files, or with the dataset's revision.
    version = f"{name} {builder.config_id} {builder.hash}"
    return Corpus(name, version, read, lambda: reading.state_dict(), is_text=is_text)


def _streaming(builder: Any) -> Any:
    """The streamed splits. `datasets` would import PyTorch where that is installed, which takes
    100 MB and some seconds."""
    known = config.TORCH_AVAILABLE
    config.TORCH_AVAILABLE = False
    try:
        return builder.as_streaming_dataset()
    finally:
        config.TORCH_AVAILABLE = known


def _texts(rows: Any) -> list[str]:
    """The columns of text."""
    if rows.features is None:  # JSON lines
        first = next(iter(rows), {})
        return [name for name, value in first.items() if isinstance(value, str)]
    kinds = ("string", "large_string")
    return [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in kinds]


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else repr(error)
