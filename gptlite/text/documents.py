"""Documents of a Hugging Face dataset, one after the other: from the hub, or from files in its
formats, here or at an address."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gptlite.errors import UserError, require
from gptlite.machine.progress import progress_bar

# Every tenth document is for validation, until there is enough of it.
SHARE = 10

# The formats of single files, by the ends of their names.
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}
PACKED = (".gz", ".zst", ".xz", ".bz2")
# Lines of a text that are read at once.
LINES = 1000


@dataclass(frozen=True)
class Documents:
    """The texts in a column of a dataset."""

    name: str
    """The name by which `open_corpus` opens it."""
    fingerprint: str
    """Changes with the files, or with the dataset's revision."""
    rows: Any = field(repr=False, compare=False)
    """A streamed `datasets.IterableDataset`."""
    column: str
    is_text: bool
    """Whether the rows are the lines of a text, which is one document."""

    def read(self, state: Any = None) -> Iterator[str]:
        """The documents that are not empty, or parts of the text, from the beginning, or from where
        `state` was.

        **Raises:** `UserError` if they cannot be read.
        """
        try:
            if state is not None:
                self.rows.load_state_dict(state)
            texts = (text for row in self.rows if (text := row[self.column]))
            if not self.is_text:
                yield from texts
            while self.is_text and (part := "".join(itertools.islice(texts, LINES))):
                yield part
        except (UserError, GeneratorExit, KeyboardInterrupt):
            raise
        except Exception as error:  # `datasets` raises a dozen unrelated kinds
            raise UserError(f"{self.name} cannot be read: {_reason(error)}") from error

    def read_training(self) -> Iterator[str]:
        """Those that are never for validation."""
        return (text for i, text in enumerate(self.read()) if not is_held_out(i))

    def state(self) -> Any:
        """Where `read` is, as plain data."""
        return self.rows.state_dict()

    @cached_property
    def alphabet(self) -> str:
        """The distinct characters, sorted. Reads everything."""
        seen: set[str] = set()
        with progress_bar("reading", unit=" characters", delay=2.0) as bar:
            for text in self.read():
                seen.update(text)
                bar.update(len(text))
        return "".join(sorted(seen))


def is_held_out(number: int) -> bool:
    """Whether document `number`, counted from 0, may be for validation."""
    return number % SHARE == SHARE - 1


def open_documents(name: str) -> Documents:
    """The dataset that `hf:NAME[:CONFIG][:SPLIT][:COLUMN]` names. NAME is one on the hub, or a
    folder, a file or an address with JSON lines, Parquet or text.

    **Raises:** `UserError` if there is no such dataset, or it has no such part.
    """
    import datasets

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
            config = words.pop(0) if words and words[0] in configs else None
            builder = datasets.load_dataset_builder(source, config)
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
    if column not in texts or (not words and column != "text" and len(texts) > 1):
        raise UserError(
            f"{name} must name a column of text, as in hf:{source}:{split}:COLUMN; the dataset has "
            f"{', '.join(texts) or 'none'}."
        )
    return Documents(name, f"{builder.config_id} {builder.hash}", rows, column, is_text)


def _streaming(builder: Any) -> Any:
    """The streamed splits. `datasets` would import PyTorch where that is installed, which takes
    100 MB and some seconds."""
    from datasets import config

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
