"""Documents of a Hugging Face dataset, one after the other: from the hub, or from files in its
formats, here or at an address."""

import codecs
import glob
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow
import yaml
from datasets import config
from datasets.builder import Key
from datasets.streaming import extend_dataset_builder_for_streaming
from datasets.utils.file_utils import xopen
from huggingface_hub import repocard
from pyarrow import parquet

from gptlite.errors import UserError, require, told
from gptlite.machine.files import behind_links, read_bounded
from gptlite.machine.progress import log
from gptlite.machine.text_files import read_text
from gptlite.text.corpus import Corpus

# The formats of single files, by the ends of their names.
FORMATS = {
    **{".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text"},
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
}
PACKED = (".gz", ".zst", ".xz", ".bz2")
# Bytes that a reader of a stranger's file may take for one table of rows: a packed file of a few
# bytes may have a line of any length.
MAX_TABLE = 2**28
BLOCK = 2**18
# Rows of a Parquet file that are read at once, at most: what it says of its size may be a lie.
# (1,000 at once take 6 µs a row, 16 take 8.)
PARQUET_ROWS = 16
# Rows in which a text is looked for.
ROWS = 1000
# How often the bytes of a Parquet file's row group may hold more than they are.
MAX_RATIO = 100
# Bytes and marks of a dataset's card, and bytes of the older file that described all of it.
MAX_CARD, MAX_MARKS, MAX_INFOS = 2**20, 20_000, 2**24


def open_dataset(name: str) -> Corpus:
    """The dataset that `hf:NAME[:CONFIG][:SPLIT][:COLUMN]` names. NAME is one on the hub, or a
    folder, a file or an address with JSON lines, Parquet, CSV or text.

    **Raises:** `UserError` if there is no such dataset, or it has no such part.
    """
    source, words = _parts(name)
    require(
        bool(source) and len(words) <= 3 and all(words),
        f"A Hugging Face dataset is named hf:NAME[:CONFIG][:SPLIT][:COLUMN], got {name!r}.",
    )
    end = re.sub("|".join(map(re.escape, PACKED)), "", source.lower())
    kind = next((kind for suffix, kind in FORMATS.items() if end.endswith(suffix)), None)
    if os.path.isdir(source):
        kind = None
    require(
        kind is not None or not os.path.isfile(source),
        f"{source} is none of the files that gptlite reads: their names end with "
        f"{', '.join(FORMATS)}, and {', '.join(PACKED)} behind it where they are packed.",
    )
    # `datasets` raises a dozen unrelated kinds of errors.
    with told(f"The dataset {source} cannot be loaded"):
        if kind is None:
            _check_card(source)
            configs = datasets.get_dataset_config_names(source)
            chosen = words.pop(0) if words and words[0] in configs else None
            builder = datasets.load_dataset_builder(source, chosen)
        else:
            # Its names are patterns, in which brackets are no letters.
            file = glob.escape(source) if os.path.exists(source) else source
            builder = datasets.load_dataset_builder(kind, data_files=file)
        _check_files(source, builder)
        _bound(builder, source)
        is_text = builder.name == "text"
        splits = _streaming(builder)
        split = words.pop(0) if words and words[0] in splits else "train"
        rows = splits.get(split)
        texts = [] if rows is None else _texts(rows)
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
        with told(f"{name} cannot be read"):
            reading = _streaming(builder)[split]  # another one, at its beginning
            if state is not None:
                reading.load_state_dict(state)
            yield from (text for row in reading if (text := row[column]))

    # The hash changes with the files, or with the dataset's revision.
    version = f"{name} {builder.config_id} {builder.hash}"
    return Corpus(name, version, read, lambda: reading.state_dict(), is_text=is_text)


def _parts(name: str) -> tuple[str, list[str]]:
    """The source in the name of a dataset, and the words that follow. A file or folder that is
    here may have colons in its name."""
    rest = os.path.expanduser(name.removeprefix("hf:"))
    parts = rest.split(":")
    for n in range(len(parts), 0, -1):
        if os.path.exists(":".join(parts[:n])):
            return ":".join(parts[:n]), parts[n:]
    # Not at the colon of an address, or of its port.
    source, *words = re.split(r":(?!//|\d+/)", rest)
    return source, words


def _check_card(source: str) -> None:
    """**Raises:** `UserError` if what describes the dataset is larger than any description: a few
    lines of YAML can stand for any number of values."""
    names = (config.REPOCARD_FILENAME, config.REPOYAML_FILENAME, config.DATASETDICT_INFOS_FILENAME)
    for name in names:
        path = Path(source, name)
        if not os.path.isdir(source):
            try:  # `datasets` reads the same file
                path = Path(huggingface_hub.hf_hub_download(source, name, repo_type="dataset"))
            except Exception:  # there is none, or no network: `datasets` says so
                continue
        if not path.exists():
            continue
        most = MAX_INFOS if path.suffix == ".json" else MAX_CARD
        with told(f"{path} cannot be read"):
            text = read_bounded(behind_links(path), most).decode("utf-8-sig", errors="replace")
        if path.suffix == ".json":
            continue  # has no aliases
        if path.suffix == ".md":
            block = repocard.REGEX_YAML_BLOCK.search(text)
            text = "" if block is None else block.group(2)
        for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            require(
                number < MAX_MARKS and not isinstance(event, yaml.AliasEvent),
                f"The card {path} has more than {MAX_MARKS:,} values, or aliases of them.",
            )


def _check_files(source: str, builder: Any) -> None:
    """**Raises:** `UserError` if the files of a dataset are of another kind than `FORMATS` (some of
    which are executed when they are read), or a folder's are not in the folder. Links are told."""
    kinds = sorted({*FORMATS.values()})
    require(
        builder.name in FORMATS.values(),
        f"The dataset {source} is of the kind {builder.name}: gptlite reads {', '.join(kinds)}.",
    )
    folder = os.path.realpath(source)
    if not os.path.isdir(source):
        return
    for file in itertools.chain.from_iterable((builder.config.data_files or {}).values()):
        inside = os.path.normpath(file).startswith(f"{folder}{os.sep}") and "://" not in file
        require(inside, f"The dataset {source} names {file}, which is not in its folder.")
        if os.path.islink(file):
            log(f"{file} is read, which is a link to {os.path.realpath(file)}.")


def _bound(builder: Any, source: str) -> None:
    """Bound what is read for one table of rows."""
    extend_dataset_builder_for_streaming(builder)
    if builder.name == "text":
        builder._generate_tables = _text_tables
    elif builder.name == "parquet":

        def tables_of_groups(files: Any, row_groups_list: Any) -> Iterator[Any]:
            for shard, (file, groups) in enumerate(zip(files, row_groups_list, strict=True)):
                with xopen(file, "rb") as content:
                    for number, batch in enumerate(_parquet_batches(content, file, groups)):
                        table = pyarrow.Table.from_batches([batch])
                        yield Key(shard, number), builder._cast_table(table)

        builder._generate_tables = tables_of_groups
    elif builder.name in ("csv", "json"):
        if ".tsv" in source.lower():
            builder.config.sep = "\t"
        meter, generate = Meter(is_json=builder.name == "json"), builder._generate_tables

        def tables(base_files: Any, files_iterables: Any, **words: Any) -> Iterator[Any]:
            files = [map(meter.open, some) for some in files_iterables]
            for table in generate(base_files, files, **words):
                meter.taken = 0
                yield table

        builder._generate_tables = tables
        # It would print what it raises.
        logging.getLogger(type(builder).__module__).disabled = True
        module: Any = sys.modules[type(builder).__module__]
        # What is open already is not opened; other readers may use the module, too.
        known = getattr(module, "open", open)
        module.open = lambda file, *x, **y: (
            file if isinstance(file, Metered) else known(file, *x, **y)
        )


def _text_tables(base_files: Any, files_iterables: Any) -> Iterator[Any]:
    """A text in pieces, one of which is a row, as of a file that is no dataset: the library's own
    reader changes line ends, and reads a line of any length."""
    for shard, files in enumerate(files_iterables):
        for file in files:
            with xopen(file, "rb") as content:
                pieces = read_text(content, file)  # pyright: ignore[reportArgumentType]
                for number, piece in enumerate(pieces):
                    yield Key(shard, number), pyarrow.table({"text": [piece]})


def _parquet_batches(content: Any, file: str, groups: Any) -> Iterator[Any]:
    """The rows of some of a Parquet file's groups, or of all. The library's own reader expands a
    whole group, in which one value may stand for any number of rows."""
    reader = parquet.ParquetFile(content)
    for i in range(reader.num_row_groups) if groups is None else groups:
        group = reader.metadata.row_group(i)
        columns = [group.column(j) for j in range(group.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns)
        packed = sum(column.total_compressed_size for column in columns)
        require(
            size <= max(MAX_TABLE, MAX_RATIO * packed),
            f"{file} has {packed:,} bytes that stand for {size:,}: at most {MAX_RATIO} times as "
            "many are expected.",
        )
        # A row is not larger than its group.
        n_rows = max(1, min(PARQUET_ROWS, MAX_TABLE // max(size, 1)))
        yield from reader.iter_batches(n_rows, row_groups=[i])


class Meter:
    """Counts what is read of files for one table of rows."""

    def __init__(self, *, is_json: bool):
        self.taken, self.is_json = 0, is_json

    def open(self, file: Any) -> "Metered":
        return Metered(xopen(file, "rb"), str(file), self)


class Metered:
    """A file that is read in bounded pieces."""

    def __init__(self, file: Any, name: str, meter: Meter):
        self._file, self._name, self._meter = file, name, meter
        self._is_json = meter.is_json
        self._rest = b""

    def _next(self) -> bytes:
        content = self._file.read(BLOCK)
        self._meter.taken += len(content)
        require(
            self._meter.taken <= MAX_TABLE,
            f"{self._name} has a line, or a list in JSON, of more than {MAX_TABLE:,} bytes.",
        )
        return content

    def read(self, size: int | None = -1) -> bytes:
        parts, length = [self._rest], len(self._rest)
        size = sys.maxsize if size is None or size < 0 else size
        while length < size and (part := self._next()):
            parts.append(part)
            length += len(part)
        content = b"".join(parts)
        content, self._rest = content[:size], content[size:]
        # The library reads from the beginning of a line. At rows that are all null it crashes.
        first = content.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        require(
            not self._is_json or size == sys.maxsize or first in (b"", b"{", b"["),
            f"{self._name} is not lines of JSON objects: one begins with {first!r}.",
        )
        return content

    def readline(self) -> bytes:
        parts, self._rest = [self._rest], b""
        while b"\n" not in parts[-1] and (part := self._next()):
            parts.append(part)
        line, end, self._rest = b"".join(parts).partition(b"\n")
        return line + end

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def __enter__(self) -> "Metered":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


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
    if rows.features is None:  # of a list in JSON
        first = itertools.islice(rows, ROWS)
        found = {k: None for row in first for k, value in row.items() if isinstance(value, str)}
        return list(found)
    kinds = ("string", "large_string", "string_view")
    return [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in kinds]
