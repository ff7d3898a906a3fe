"""A process that reads one dataset: see `datasets.py`. A question is one of

{"open": NAME}
{"read": NUMBER, "place": PLACE}    begin to read, from the beginning or a place that was told
{"next": NUMBER}                    the next texts
{"close": NUMBER}
"""

import codecs
import contextlib
import functools
import glob
import io
import itertools
import json
import os
import re
import signal
import sys
import urllib.request
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pandas
import pyarrow
import yaml
from datasets import config
from datasets.builder import Key
from datasets.streaming import extend_dataset_builder_for_streaming
from datasets.utils.file_utils import xgetsize, xopen
from pyarrow import parquet

from gptlite.errors import UserError, require, told
from gptlite.machine.limits import allow, answer_lines
from gptlite.machine.text_files import read_text

# The library would import PyTorch where that is installed, which takes 100 MB and some seconds.
config.TORCH_AVAILABLE = False

# The formats of single files, by the ends of their names.
FORMATS = {
    **{".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text"},
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
}
PACKED = (".gz", ".zst", ".xz", ".bz2")
# Rows of a Parquet file that are read at once, at most: what it says of its size may be a lie.
# (1,000 at once take 6 µs a row, 16 take 8.)
PARQUET_ROWS = 16
# Bytes of a Parquet file's rows that are read at once, if what it says is true.
PARQUET_BYTES = 2**28
# Rows that are read for one answer, and in which a text is looked for; and characters, about.
ROWS, PART = 1000, 2**20
# How many times as long as another answer the first one at some place may take.
RESUMING = 20
# Seconds after which the process ends if nothing is being read: it has some 150 MB.
IDLE = 30
# Seconds after which it ends even while it answers: who has asked waits no longer, or is gone.
ALONE = 900
# Seconds that a server may take to say what changes with a file.
MARK_SECONDS = 5.0
# Characters of a text.
MAX_TEXT = 2**26
# Characters that may come of a byte of the files, after the first `FREE` ones. (Text is packed to a
# fifth or a tenth of its size.) A row counts as some more: without a text, too, it takes time.
MAX_GROWTH, FREE, ROW = 100, 2**28, 256
# Arrow's kinds of texts.
TEXTS = ("string", "large_string", "string_view")


class Dataset:
    """What `hf:NAME[:CONFIG][:SPLIT][:COLUMN]` names."""

    def __init__(self, name: str):
        """**Raises:** `UserError` as `open_dataset` does."""
        self._name, self.notes = name, []
        source, words = _parts(name)
        require(
            bool(source) and all(words),
            f"A Hugging Face dataset is named hf:NAME[:CONFIG][:SPLIT][:COLUMN], got {name!r}.",
        )
        end = re.sub("|".join(map(re.escape, PACKED)), "", source.lower())
        kind = next((kind for suffix, kind in FORMATS.items() if end.endswith(suffix)), None)
        if os.path.isdir(source):
            kind = None
            path = os.path.realpath(source)
            require(
                "[" not in path,
                f"The library that reads the folder {path} takes [ in its name for a pattern: "
                "rename it, or give one of its files.",
            )
        require(
            kind is not None or not os.path.isfile(source),
            f"{source} is none of the files that gptlite reads: their names end with "
            f"{', '.join(FORMATS)}, and {', '.join(PACKED)} behind it where they are packed.",
        )
        # `datasets` raises a dozen unrelated kinds of errors.
        with told(f"The dataset {source} cannot be loaded"):
            settings = _settings(source)
            if kind is None:
                _check_settings(source, settings)
                configs = datasets.get_dataset_config_names(source)
                chosen = words.pop(0) if words and words[0] in configs else None
                if chosen is None and len(configs) > 1:
                    chosen = datasets.get_dataset_default_config_name(source)
                    require(
                        chosen is not None,
                        f"{name} must name a configuration of the dataset: it has "
                        f"{', '.join(configs)}.",
                    )
                builder = datasets.load_dataset_builder(source, chosen)
            else:
                # Its names are patterns, in which brackets are no letters.
                here = os.path.exists(source)
                require(not here or os.path.isfile(source), f"{source} is not a regular file.")
                file = glob.escape(os.path.abspath(source)) if here else source
                builder = datasets.load_dataset_builder(kind, data_files=file)
            self.notes += _check_files(source, builder)
            if os.path.isdir(source) and not settings:
                self.notes += _left_out(source, builder)
            self._column = ""  # not known yet
            self._adapt(builder, source)
            self.is_text = builder.name == "text"
            self._builder, splits = builder, builder.as_streaming_dataset()
            self._split = words.pop(0) if words and words[0] in splits else "train"
            texts = _texts(splits[self._split]) if self._split in splits else []
        column = ":".join(words)  # its name may have colons
        if self._split not in splits or (len(words) > 1 and column not in texts):
            raise UserError(
                f"{name} must name a split of the dataset: it has {', '.join(map(str, splits))}."
            )
        self._column = column or ("text" if "text" in texts else "".join(texts[:1]))
        require(
            self._column in texts and (bool(words) or self._column == "text" or len(texts) <= 1),
            f"{name} must name a column of text, as in hf:{source}:{self._split}:COLUMN; the "
            f"columns in which all are texts are {', '.join(texts) or 'none'}.",
        )
        # The hash changes with the times of files, or with the dataset's revision.
        with told(f"The dataset {source} cannot be loaded"):
            marks = " ".join(map(_mark, _files(builder)))
        self.version = f"{name} {builder.config_id} {builder.hash} {marks}"

    def parts(self, begin: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The texts, some at a time, with the `place` of each part: the state of the library, and
        how many texts are skipped after it. None: it cannot be begun from."""
        with told(f"{self._name} cannot be read"):
            # Other columns may name files anywhere.
            splits: Any = self._builder.as_streaming_dataset()
            rows = splits[self._split].select_columns([self._column])
            if begin["state"] is not None:
                rows.load_state_dict(begin["state"])
            texts = (row[self._column] or "" for row in rows)
            place: dict[str, Any] | None = begin
            skipped, is_end, total = begin["skip"], False, 0
            while not is_end:
                part, size = [], 0
                for _ in range(ROWS):
                    if size > PART:
                        break
                    text = next(texts, None)
                    if text is None:
                        is_end = True
                        break
                    require(
                        isinstance(text, str),
                        f"{self._name} has {text!r:.100} where a text is expected.",
                    )
                    total += ROW + len(text)
                    if text and skipped:
                        skipped -= 1
                    elif text:
                        require(
                            len(text) <= MAX_TEXT,
                            f"{self._name} has a text of {len(text):,} characters: at most "
                            f"{MAX_TEXT:,} are read as one.",
                        )
                        part.append(text)
                        size += len(text)
                require(
                    total <= FREE or total <= MAX_GROWTH * self._n_bytes,
                    f"{self._name} has more than {MAX_GROWTH} characters for each byte of its "
                    f"files ({self._n_bytes:,} bytes), where a row counts as {ROW} more: no text "
                    "is packed so well.",
                )
                yield {"texts": part, "place": place, "end": is_end}
                state = rows.state_dict()
                place = None if state is None else {"state": state, "skip": skipped}

    def _adapt(self, builder: Any, source: str) -> None:
        """Read as gptlite does, where the library would read otherwise."""
        extend_dataset_builder_for_streaming(builder)
        if builder.name == "text":
            builder._generate_tables = self._text_tables
        elif builder.name == "json":
            builder._generate_tables = self._json_tables
        elif builder.name == "parquet":

            def tables_of_groups(files: Any, row_groups_list: Any) -> Iterator[Any]:
                for shard, (file, groups) in enumerate(zip(files, row_groups_list, strict=True)):
                    with _opened(file) as content:
                        reader = parquet.ParquetFile(content)
                        self._check_kind(reader.schema_arrow, file)
                        # Files may differ in their other columns, and in how they keep texts.
                        for number, rows in enumerate(_parquet_rows(reader, groups, self._column)):
                            texts = rows.column(self._column).cast(pyarrow.string())
                            yield Key(shard, number), pyarrow.table({self._column: texts})

            builder._generate_tables = tables_of_groups
        elif builder.name == "csv":
            if re.search(rf"\.tsv({'|'.join(map(re.escape, PACKED))})*$", source.lower()):
                builder.config.sep = "\t"
            # Else 007 would be the number 7, and the text NA nothing; and in a file whose first row
            # has a comma too many, what is before it would be no text but the name of a row.
            texts = {"dtype": str, "keep_default_na": False, "index_col": False}
            options = builder.config.pd_read_csv_kwargs | texts | {"chunksize": ROWS}
            warnings.simplefilter("error", pandas.errors.ParserWarning)

            def tables_of_texts(base_files: Any, files_iterables: Any) -> Iterator[Any]:
                for shard, files in enumerate(files_iterables):
                    for file in files:
                        with _opened(file) as content:
                            pieces = pandas.read_csv(content, **options)
                            for number, rows in enumerate(pieces):
                                if self._column:  # files may differ in the others
                                    self._check_name(rows.columns, file)
                                    rows = rows[[self._column]]
                                yield Key(shard, number), pyarrow.Table.from_pandas(rows)

            builder._generate_tables = tables_of_texts

    def _text_tables(self, base_files: Any, files_iterables: Any) -> Iterator[Any]:
        """A text in pieces, one of which is a row, as of a file that is no dataset: the library's
        own reader changes line ends, and reads a line of any length. As in a folder of texts, a
        line ends between two files."""
        splits = self._builder.config.data_files or {}
        firsts = [files[0] for files in splits.values() if files]
        for shard, (base, files) in enumerate(zip(base_files, files_iterables, strict=True)):
            for place, file in enumerate(files):
                with _opened(file) as content:
                    pieces = read_text(content, file)  # pyright: ignore[reportArgumentType]
                    for number, piece in enumerate(pieces):
                        begin = "\n" if number == 0 and (place or base not in firsts) else ""
                        yield Key(shard, number), pyarrow.table({"text": [begin + piece]})

    def _check_name(self, names: Iterable[str], file: str) -> None:
        """**Raises:** `UserError` if the column of text is not in this file."""
        require(self._column in names, f"{file} has no column {self._column}.")

    def _check_kind(self, schema: Any, file: str) -> None:
        """**Raises:** `UserError` if the column of text is not in this file, or of another kind
        there: the library would make texts of it."""
        self._check_name(schema.names, file)
        kind = schema.field(self._column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        require(
            str(kind) in (*TEXTS, "null"),
            f"The column {self._column} in {file} is of the kind {kind}: texts are expected.",
        )

    def _json_tables(self, base_files: Any, files_iterables: Any, **_: Any) -> Iterator[Any]:
        """The texts in files of JSON. The library's own reader makes times of texts that look like
        ones, and texts of what is none."""
        for shard, files in enumerate(files_iterables):
            for file in files:
                keys: set[str] = set()
                with _opened(file) as content:
                    for number, rows in enumerate(_json_rows(content)):
                        keys.update(*rows)
                        names = [self._column] if self._column else _text_keys(rows)
                        columns = {name: [row.get(name) for row in rows] for name in names}
                        for text in itertools.chain(*columns.values()):
                            require(
                                text is None or isinstance(text, str),
                                f"{self._name} has {text!r:.100} where a text is expected.",
                            )
                        yield Key(shard, number), pyarrow.table(columns)
                # A row may leave it out, and a file have no rows.
                if self._column and keys:
                    self._check_name(keys, file)

    @functools.cached_property
    def _n_bytes(self) -> int:
        """The size of the files."""
        return sum(map(xgetsize, _files(self._builder)))


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


def _check_settings(source: str, settings: list[Any]) -> None:
    """**Raises:** `UserError` if the `settings` of a folder name files that are not in it."""
    named = list(settings)
    while named:
        value = named.pop()
        if isinstance(value, dict | list):
            named += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str):
            outside = "://" in value or value.startswith("/") or ".." in Path(value).parts
            require(not outside, f"The dataset {source} names {value}, which is not in its folder.")


def _settings(source: str) -> list[Any]:
    """What the card of a folder, or the file beside it, says of its files."""
    card = Path(source, config.REPOCARD_FILENAME)
    settings = Path(source, config.REPOYAML_FILENAME)
    named: list[Any] = []
    if card.is_file():
        named.append(huggingface_hub.DatasetCard.load(card).data.to_dict().get("configs"))
    if settings.is_file():
        more = yaml.safe_load(settings.read_text(encoding="utf-8"))
        named.append(more.get("configs") if isinstance(more, dict) else None)
    return [found for found in named if found]


def _check_files(source: str, builder: Any) -> list[str]:
    """What is to be said of links among the files.

    **Raises:** `UserError` if the files of a dataset are of another kind than `FORMATS` (some of
    which are executed when they are read), or a folder's are not in the folder."""
    kinds = sorted({*FORMATS.values()})
    require(
        builder.name in FORMATS.values(),
        f"The dataset {source} is of the kind {builder.name}: gptlite reads {', '.join(kinds)}.",
    )
    folder = os.path.realpath(source)
    notes = []
    if not os.path.isdir(source):
        return notes
    for file in _files(builder):
        place = os.path.realpath(os.path.dirname(file))  # also through a link to a folder
        inside = f"{place}{os.sep}".startswith(f"{folder}{os.sep}") and "://" not in file
        require(inside, f"The dataset {source} names {file}, which is not in its folder.")
        require(os.path.isfile(file), f"{file} is no file.")
        if os.path.islink(file):
            notes.append(f"{file} is read, which is a link to {os.path.realpath(file)}.")
    return notes


def _files(builder: Any) -> list[str]:
    """The files of a dataset."""
    return list(itertools.chain.from_iterable((builder.config.data_files or {}).values()))


def _opened(file: str) -> Any:
    """A file that says that it has no bytes is not read: to read /proc/kmsg waits for ever."""
    is_empty = "://" not in file and os.stat(file).st_size == 0
    return io.BytesIO() if is_empty else xopen(file, "rb")


def _mark(file: str) -> str:
    """What changes with a file, of which the library's hash knows the time, or the server's tag."""
    if "://" not in file:
        return str(os.stat(file).st_size)
    if not file.startswith(("http://", "https://")):
        return ""  # the hub's have a revision
    request = urllib.request.Request(file, method="HEAD")
    for is_last in (False, False, True):
        try:
            with urllib.request.urlopen(request, timeout=MARK_SECONDS) as answer:
                names = ("Last-Modified", "Content-Length")
                return answer.headers.get("ETag") or "|".join(
                    map(str, map(answer.headers.get, names))
                )
        except OSError as error:
            code = getattr(error, "code", 500)
            if code < 500 and code != 429:  # the server does not answer such questions
                return ""
            if is_last:
                raise
    return ""


def _left_out(source: str, builder: Any) -> list[str]:
    """What is to be said of the files that are not read, in a folder without settings: the library
    takes the files of one kind, that of the most."""
    kind, files = builder.name, set(_files(builder))
    left = []
    for place, folders, names in os.walk(os.path.realpath(source)):  # not into links
        folders[:] = (name for name in folders if not name.startswith("."))
        paths = (os.path.join(place, name) for name in names if not name.startswith("."))
        left += [
            path
            for path in paths
            if path not in files and FORMATS.get(Path(path).suffix.lower(), kind) != kind
        ]
    left.sort()
    more = f" and {len(left) - 1:,} more" if left[1:] else ""
    return [f"Of {source}, the {kind} files are read. Left out: {left[0]}{more}."] if left else []


def _json_rows(content: Any) -> Iterator[list[dict[str, Any]]]:
    """The objects in a file of JSON, some at a time: one in each line, or a list of them, or of
    texts."""
    begin = content.read(PART).removeprefix(codecs.BOM_UTF8)
    if begin.lstrip().startswith(b"["):
        rows = json.loads(begin + content.read())
        rows = [{"text": row} if isinstance(row, str) else row for row in rows]
        parts = (rows[i : i + ROWS] for i in range(0, len(rows), ROWS))
    else:
        parts = ([json.loads(x) for x in part if x.strip()] for part in _lines(begin, content))
    for part in parts:
        for row in part:
            if not isinstance(row, dict):
                raise ValueError(f"a row is a JSON object, got {json.dumps(row)[:100]}")
        if part:
            yield part


def _lines(begin: bytes, content: Any) -> Iterator[list[bytes]]:
    """The lines of a file, some at a time."""
    rest, piece = begin, begin
    while piece:
        piece = content.read(PART)
        *lines, rest = (rest + piece).split(b"\n") if piece else (*rest.split(b"\n"), b"")
        yield from (lines[i : i + ROWS] for i in range(0, len(lines), ROWS))


def _text_keys(rows: list[dict[str, Any]]) -> list[str]:
    """The keys of rows that have texts, and nothing else."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if value is not None)
    return [key for key in keys if all(isinstance(row.get(key, ""), str | None) for row in rows)]


def _parquet_rows(reader: Any, groups: Any, column: str) -> Iterator[Any]:
    """A column of some of a Parquet file's groups, or of all. The library's own reader expands a
    whole group, in which one value may stand for any number of rows."""
    for i in range(reader.num_row_groups) if groups is None else groups:
        group = reader.metadata.row_group(i)
        parts = [group.column(j) for j in range(group.num_columns)]
        size = sum(x.total_uncompressed_size for x in parts if x.path_in_schema == column)
        # A row is not larger than its group.
        n_rows = max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(size, 1)))
        yield from reader.iter_batches(n_rows, row_groups=[i], columns=[column])


def _texts(rows: Any) -> list[str]:
    """The columns of text."""
    if rows.features is None:
        return _text_keys(list(itertools.islice(rows, ROWS)))
    return [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in TEXTS]


def main(seconds: int, memory: int) -> None:
    """Answer questions, each in so many seconds of the processor, with `memory` bytes."""
    dataset: Dataset | None = None
    readings: dict[int, Iterator[dict[str, Any]]] = {}
    begun: set[int] = set()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal dataset
        match question:
            case {"open": name}:
                dataset = Dataset(name)
                parts = {"version": dataset.version, "is_text": dataset.is_text}
                return {**parts, "notes": dataset.notes}
            case {"read": number, "place": place}:
                assert dataset is not None, "it is opened first"
                readings[number] = dataset.parts(place)
                begun.update([number] if place["state"] else [])
            case {"next": number}:
                if number in begun:  # what was read before may be read again
                    allow(RESUMING * seconds)
                    begun.remove(number)
                return next(readings[number])
            case {"close": number}:
                del readings[number]
        return {}

    def end_after(idle: int) -> None:
        with contextlib.suppress(AttributeError):  # Windows has no alarm
            signal.alarm(idle)

    def answer_or_error(question: dict[str, Any]) -> dict[str, Any]:
        end_after(ALONE)
        try:
            return answer(question)
        except UserError as error:
            return {"error": str(error)}
        finally:
            end_after(0 if readings else IDLE)

    answer_lines(answer_or_error, seconds, memory)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
