"""Datasets of Hugging Face's formats: how they are named, and how they become ids."""

import contextlib
import dataclasses
import datetime
import functools
import gzip
import http.server
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from conftest import TEXT

from gptlite.errors import UserError
from gptlite.hugging_face import dataset_worker, datasets
from gptlite.hugging_face.bpe import train_bpe
from gptlite.machine import bounded
from gptlite.runs.corpora import load_corpus
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.text import tokens
from gptlite.text.corpus import Corpus
from gptlite.text.tokenizer import ByteTokenizer, Tokenizer
from gptlite.text.tokens import Split, split_corpus

TEXTS = [f"{number}: {line}" for number, line in enumerate(TEXT.split("\n")) if line]


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Processes that read are forked, except on Windows. Tests of the scripts begin new ones."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        from support.forked import FORKED

        monkeypatch.setattr(bounded, "subprocess", FORKED)


def documents(name: object) -> Corpus:
    return load_corpus(f"hf:{name}")


def lines(texts: list[str], **more: str) -> str:
    return "".join(json.dumps({"text": text} | more) + "\n" for text in texts)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "train.jsonl").write_text(lines(["first", "", "second"], other="eins"))
    (folder / "test.jsonl").write_text(lines(["third"], other="zwei"))
    return folder


@pytest.mark.parametrize(
    ("suffix", "texts"),
    [
        ("", ["first", "second"]),
        (":test", ["third"]),
        (":other", ["eins"] * 3),
        (":test:other", ["zwei"]),
        (":default:test:other", ["zwei"]),
    ],
)
def test_configuration_split_and_column_are_found_by_their_names(folder, suffix, texts):
    assert list(documents(f"{folder}{suffix}").read(None)) == texts


def test_a_dataset_may_be_loaded_as_one_text(folder):
    assert load_corpus(f"hf:{folder}").text == "first\nsecond"
    assert load_corpus(f"hf:{folder}:test").text == "third"


def test_configurations_of_a_folder(folder):
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: train.jsonl\n"
        "- config_name: two\n  data_files: test.jsonl\n---\n"
    )
    assert list(documents(f"{folder}:two").read(None)) == ["third"]
    assert list(documents(f"{folder}:one:train:other").read(None)) == ["eins"] * 3
    with pytest.raises(
        UserError, match="must name a configuration of the dataset: it has one, two"
    ):
        documents(folder)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (":train:absent", "text, other"),
        (":absent", "text, other"),
        (":absent:text", "must name a split of the dataset: it has train, test"),
        (":a:b:c:d", "must name a split of the dataset: it has train, test"),
        (":", "is named hf:NAME"),
        ("/absent", "cannot be loaded"),
    ],
)
def test_a_part_that_is_not_there_is_refused(folder, suffix, words):
    with pytest.raises(UserError, match=words):
        documents(f"{folder}{suffix}")


def test_a_column_may_have_a_colon_in_its_name(tmp_path):
    (tmp_path / "a.csv").write_text("a:b,c\nfirst,x\nsecond,y\n")
    for name in ("a.csv:a:b", "a.csv:train:a:b"):
        assert list(documents(tmp_path / name).read(None)) == ["first", "second"]


def write_file(path: Path, texts: list[str]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table({"text": texts}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines(texts).encode()))
    else:
        path.write_text(lines(texts))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder at a server of Python's, which sends no tags of files."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("name", ["a.jsonl", "b.json", "c.parquet", "d.jsonl.gz"])
def test_a_single_file_is_a_dataset_here_and_at_an_address(name, tmp_path):
    write_file(tmp_path / name, TEXTS)
    assert list(documents(tmp_path / name).read(None)) == TEXTS
    with served(tmp_path) as address:
        assert list(documents(f"{address}/{name}:train:text").read(None)) == TEXTS


@pytest.mark.parametrize("at", ["here", "address"])
def test_a_file_that_has_changed_in_the_same_second_is_another_one(at, tmp_path):
    """An archive's files may have a fixed time."""
    path, versions = tmp_path / "a.jsonl", []
    with served(tmp_path) as address:
        for texts in (TEXTS, TEXTS[1:], TEXTS):
            path.write_text(lines(texts))
            os.utime(path, (10**9, 10**9))
            versions.append(documents(path if at == "here" else f"{address}/a.jsonl").version)
    assert versions[0] == versions[2] != versions[1]


def test_a_line_ends_between_two_texts_of_a_folder(tmp_path):
    for name, text in {"a.txt": "first", "b.txt": "second", "c.txt": "third"}.items():
        (tmp_path / name).write_text(text)
    whole = load_corpus(str(tmp_path)).text
    assert "".join(documents(str(tmp_path)).read(None)) == whole == "first\nsecond\nthird"


def test_tabs_are_told_by_the_end_of_a_name(tmp_path):
    (tmp_path / "old.tsv.d").mkdir()
    (tmp_path / "old.tsv.d" / "a.csv").write_text("text,n\na\tb,1\n")
    (tmp_path / "b.TSV").write_text("text\tn\na,b\t1\n")
    assert list(documents(tmp_path / "old.tsv.d" / "a.csv:text").read(None)) == ["a\tb"]
    assert list(documents(tmp_path / "b.TSV:text").read(None)) == ["a,b"]


LONG = TEXT * (5 * 2**20 // len(TEXT))


def test_a_text_is_one_document_with_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_text(LONG)
    found = documents(tmp_path / "a.txt")
    parts = list(found.read(None))
    assert len(parts) > 3
    assert "".join(parts) == LONG
    split = split_corpus(found, ByteTokenizer(), folder=tmp_path)
    assert len(split.train) + len(split.validation) == len(LONG.encode())


# -- ids -----------------------------------------------------------------------------------------


def write_dataset(path: Path, texts: list[str] = TEXTS) -> Corpus:
    path.write_text(lines(texts))
    return documents(path)


def text_of(ids: np.ndarray, tokenizer: Tokenizer | None = None) -> str:
    return (tokenizer or ByteTokenizer()).decode(np.asarray(ids))


def test_every_tenth_document_is_for_validation(tmp_path):
    found = write_dataset(tmp_path / "a.jsonl")
    split = split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids")
    held_out = TEXTS[9::10]
    kept = [text for i, text in enumerate(TEXTS) if i % 10 != 9]
    assert text_of(split.train) == "".join(f"{text}\n" for text in kept)
    assert text_of(split.validation) == "".join(f"{text}\n" for text in held_out)
    assert split.characters == sum(map(len, TEXTS))
    parts = [("".join(pieces), is_held_out) for is_held_out, pieces in found.parts()]
    assert parts == [(text, text in held_out) for text in TEXTS]
    # Then, no more than are wanted: the other documents are for training.
    few = split_corpus(found, ByteTokenizer(), 10, folder=tmp_path / "ids")
    assert text_of(few.validation) == held_out[0][:10]
    assert len(few.train) > len(split.train)


def test_a_token_ends_a_document_if_there_is_one(tmp_path):
    found = write_dataset(tmp_path / "a.jsonl")
    tokenizer = train_bpe(found, 300)
    (end,) = tokenizer.end_ids
    split = split_corpus(found, tokenizer, folder=tmp_path / "ids")
    assert np.sum(np.asarray(split.train) == end) == sum(i % 10 != 9 for i in range(len(TEXTS)))
    assert split.train[-1] == end
    assert text_of(split.validation, tokenizer) == "".join(
        f"{text}<|endoftext|>" for text in TEXTS[9::10]
    )


def test_characters_are_surveyed_for_a_char_tokenizer_alone(tmp_path):
    found = write_dataset(tmp_path / "a.jsonl", ["ab\n", "cé"] * 10)
    read = []
    found = dataclasses.replace(found, read=lambda _: read.append(1) or iter(["ab\n", "cé"] * 10))
    make_tokenizer("byte", found)
    assert not read
    tokenizer = make_tokenizer("char", found)
    assert tokenizer.vocab_size == 5
    split = split_corpus(found, tokenizer, folder=tmp_path / "ids")
    assert text_of(split.train, tokenizer)[:7] == "ab\n\ncé\n"
    plain = write_dataset(tmp_path / "b.jsonl", ["ab", "cd"] * 10)
    split = split_corpus(plain, make_tokenizer("char", plain), folder=tmp_path / "ids")
    assert len(split.train) == 18 * 3


@pytest.mark.parametrize("most", [2, 100, 101, 5000])
def test_no_more_is_read_than_is_wanted(tmp_path, most):
    found = write_dataset(tmp_path / "a.jsonl")
    whole = split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids")
    split = split_corpus(found, ByteTokenizer(), max_tokens=most, folder=tmp_path / "ids")
    np.testing.assert_array_equal(split.train, whole.train[:most])
    assert split.characters <= whole.characters
    assert (split.characters < 600) == (most < 200)  # up to the first that is held out


def test_of_a_few_documents_the_end_is_for_validation(tmp_path):
    found = write_dataset(tmp_path / "a.jsonl", ["0123456789"] * 9)
    split = split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids")
    assert (len(split.train), len(split.validation)) == (89, 10)
    with pytest.raises(UserError, match="is empty"):
        split_corpus(
            write_dataset(tmp_path / "b.jsonl", ["", ""]), ByteTokenizer(), folder=tmp_path / "ids"
        )


class Counting(ByteTokenizer):
    """Stops the process after so many texts."""

    def __init__(self, most: float = float("inf")):
        self.left, self.texts = most, []

    def encode(self, text: str) -> Any:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.texts.append(text)
        return super().encode(text)


@pytest.mark.processes
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "txt"])
def test_one_that_is_stopped_goes_on_after_its_last_segment(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(tokens, "SEGMENT", 200)
    path = tmp_path / f"a.{suffix}"
    if suffix == "txt":
        path.write_text(LONG)
    else:
        write_file(path, TEXTS)
    whole = split_corpus(documents(path), ByteTokenizer(), folder=tmp_path / "whole")
    encoded, stops, split = 0, 0, None
    while split is None and stops < 50:
        tokenizer = Counting(4 if suffix == "txt" else 17)
        try:
            split = split_corpus(documents(path), tokenizer, folder=tmp_path / "stopped")
        except KeyboardInterrupt:
            stops += 1
        encoded += len(tokenizer.texts)
    assert stops > 0
    assert split is not None
    assert_same(split, whole)
    # Documents, and what follows them; those of the last segment a second time.
    assert encoded < 2 * 2 * len(TEXTS)
    tokenizer = Counting()
    assert_same(split_corpus(documents(path), tokenizer, folder=tmp_path / "stopped"), whole)
    assert not tokenizer.texts


def test_a_corpus_that_went_on_in_the_middle_is_read_from_its_beginning_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tokens, "SEGMENT", 200)
    found = write_dataset(tmp_path / "a.jsonl")
    whole = split_corpus(found, ByteTokenizer(), folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        split_corpus(found, Counting(17), folder=tmp_path / "ids")
    again = write_dataset(tmp_path / "a.jsonl")
    assert_same(split_corpus(again, ByteTokenizer(), folder=tmp_path / "ids"), whole)
    other = split_corpus(again, ByteTokenizer(), 20, folder=tmp_path / "ids")
    assert text_of(other.train).startswith(TEXTS[0])
    assert list(again.read(None)) == TEXTS


def assert_same(a: Split, b: Split) -> None:
    np.testing.assert_array_equal(a.train, b.train)
    np.testing.assert_array_equal(a.validation, b.validation)
    assert (a.sha256, a.characters, a.validation_bytes) == (
        b.sha256,
        b.characters,
        b.validation_bytes,
    )


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        lambda files: damage(files[".train"]),
        lambda files: damage(files[".validation"]),
        lambda files: files[".train"].unlink(),
        lambda files: files[".json"].write_text("{"),
        lambda files: files[".json"].write_text('{"counts": [1, -1]}'),
        lambda files: files[".train"].write_bytes(files[".train"].read_bytes()[:-1]),
    ],
    ids=["train", "validation", "missing", "journal", "other journal", "short"],
)
def test_files_that_are_damaged_are_made_again(tmp_path, harm):
    found = write_dataset(tmp_path / "a.jsonl")
    whole = split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids")
    whole = Split(np.array(whole.train), *list(vars(whole).values())[1:])
    harm({path.suffix: path for path in (tmp_path / "ids").glob("[!.]*")})
    assert_same(split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids"), whole)


def test_a_dataset_that_has_changed_is_read_anew(tmp_path):
    found = write_dataset(tmp_path / "a.jsonl")
    old = split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids")
    found = write_dataset(tmp_path / "a.jsonl", [f"new {text}" for text in TEXTS])
    new = split_corpus(found, ByteTokenizer(), folder=tmp_path / "ids")
    assert text_of(new.train).startswith("new 0:")
    assert old.sha256 != new.sha256


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(TEXTS) + '{"text": "half')
    with pytest.raises(UserError, match=r"a\.jsonl cannot be (read|loaded)"):
        split_corpus(documents(tmp_path / "a.jsonl"), ByteTokenizer(), folder=tmp_path / "ids")


# -- strangers, and ordinary use -----------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["one\r\ntwo\rthree\n", "\ufeffone\ntwo", "one\u2028\x0ctwo\x85"]
)
def test_a_text_is_the_same_as_a_file_and_as_a_dataset(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    assert documents(path).text == load_corpus(str(path)).text == content.removeprefix("\ufeff")
    with gzip.open(tmp_path / "b.txt.gz", "wb") as file:
        file.write(content.encode())
    assert documents(tmp_path / "b.txt.gz").text == content.removeprefix("\ufeff")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log-12:30.jsonl", lines(["first", "second"])),
        ("a [1].jsonl", lines(["first", "second"])),
        ("a*b?.ndjson", lines(["first", "second"])),
        ("file:a.jsonl", lines(["first", "second"])),
        ("a.csv", "n,text\n1,first\n2,second\n"),
        ("a.tsv", "n\ttext\n1\tfirst\n2\tsecond\n"),
        ("a.json", json.dumps([{"text": None}, {"text": "first"}, {"text": "second"}])),
    ],
)
def test_files_with_other_names_and_forms_are_datasets(tmp_path, name, content, monkeypatch):
    (tmp_path / name).write_text(content)
    assert list(documents(tmp_path / name).read(None)) == ["first", "second"]
    assert list(documents(f"{tmp_path / name}:train:text").read(None)) == ["first", "second"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(documents(f"~/{name}").read(None)) == ["first", "second"]
    monkeypatch.chdir(tmp_path)
    assert list(documents(name).read(None)) == ["first", "second"]


def refuses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the dataset breaks its limits, and that is said."""
    monkeypatch.setattr(datasets, "SECONDS", 1)
    monkeypatch.setattr(datasets, "MEMORY", 2**28)
    words = r"cannot be read: .* more than 1 s .* or 256 MiB|reserve memory|out of memory|as one"
    with pytest.raises(UserError, match=words):
        for _ in documents(path).read(None):
            pass


def array_of_any_size(folder: Path) -> None:
    kind = "dtype:\n      array2_d:\n        dtype: float64\n        shape: [30000, 30000]\n"
    features = f"  features:\n  - name: text\n    dtype: string\n  - name: a\n    {kind}"
    (folder / "README.md").write_text(f"---\ndataset_info:\n{features}---\n")
    (folder / "a.jsonl").write_text('{"text": "hi", "a": null}\n')


def long_pattern(folder: Path) -> None:
    files = f"configs:\n- config_name: x\n  data_files: '{'*a' * 40}b.jsonl'\n"
    (folder / "README.md").write_text(f"---\n{files}---\n")
    (folder / f"{'a' * 240}.jsonl").write_text('{"text": "hi"}\n')


def values_of_values(folder: Path) -> None:
    levels = [f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 12)]
    (folder / "README.md").write_text(f"\n---\na0: &a0 [x]\n{''.join(levels)}configs: *a11\n---\n")
    (folder / "a.jsonl").write_text('{"text": "hi"}\n')


def a_long_string_many_times(folder: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 16, pa.int32()), pa.array(["a" * 2**26]))
    pyarrow.parquet.write_table(pa.table({"text": text}), folder / "a.parquet", store_schema=False)


def a_list_of_empty_objects(folder: Path) -> None:
    with gzip.open(folder / "a.json.gz", "wb", compresslevel=1) as file:
        file.write(b'[{"text": "hi"},' + b"{}," * (20 * 2**20) + b"{}]")


def a_hundred_columns_a_byte(folder: Path) -> None:
    with gzip.open(folder / "a.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"text," + b"a," * (20 * 2**20) + b"b\nhi,\n")


@pytest.mark.processes
@pytest.mark.parametrize(
    "make",
    [
        *(long_pattern, values_of_values, a_long_string_many_times),
        *(a_list_of_empty_objects, a_hundred_columns_a_byte),
    ],
)
def test_a_few_bytes_that_stand_for_any_number_are_refused(make, tmp_path, monkeypatch):
    make(tmp_path)
    refuses(tmp_path, monkeypatch)


def test_columns_that_are_no_text_are_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "MEMORY", 2**28)
    array_of_any_size(tmp_path)
    assert list(documents(tmp_path).read(None)) == ["hi"]
    image = "---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n"
    (tmp_path / "README.md").write_text(f"{image}  - {{name: a, dtype: image}}\n---\n")
    os.mkfifo(tmp_path / "pipe")
    row = {"text": "hi", "a": {"path": str(tmp_path / "pipe"), "bytes": None}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert list(documents(tmp_path).read(None)) == ["hi"]


def test_a_pipe_is_no_dataset(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.txt is not a regular file"):
        documents(tmp_path / "a.txt")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("a.jsonl.gz", b'{"text": "', b'"}'),
        ("a.json.gz", b'[{"text": "', b'"}]'),
        ("a.csv.gz", b'text\n"', b'"\n'),
        ("b.csv.gz", b"text\n", b"\n" * 0),
    ],
)
def test_a_line_of_any_length_in_a_few_bytes_is_refused(tmp_path, monkeypatch, name, begin, end):
    with gzip.GzipFile(tmp_path / name, "wb", compresslevel=1) as file:
        file.write(begin)
        for _ in range(100):
            file.write(b"a" * 2**20)
        file.write(end)
    refuses(tmp_path / name, monkeypatch)


@pytest.mark.parametrize("row", ["Hello, world", "a\nb, c", ",a"])
def test_a_row_of_a_csv_file_with_more_fields_than_the_head_is_refused(tmp_path, row):
    (tmp_path / "a.csv").write_text(f"text\n{row}\nGood morning\n")
    with pytest.raises(UserError, match="cannot be"):
        list(documents(tmp_path / "a.csv").read(None))


@pytest.mark.parametrize("values", [[5, 6], [True], [datetime.date(2024, 1, 1)], [["a"]], [b"a"]])
def test_a_file_in_which_the_column_is_no_text_is_refused(tmp_path, values):
    """Also one that is not the first."""
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pa.table({"text": values}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"of the kind .*: texts are expected"):
        list(documents(tmp_path).read(None))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jsonl").write_text(lines(["a", "b"]))
    (tmp_path / "c" / "b.jsonl").write_text('{"text": "c"}\n{"text": 5}\n')
    with pytest.raises(UserError, match="has 5 where a text is expected"):
        list(documents(tmp_path / "c").read(None))


def test_texts_that_look_like_something_else_are_texts(tmp_path):
    """Also the first time that they come after a million others."""
    texts = ["hello"] * 2000 + ["2024-01-15T10:00:00Z", "2024-01-01", "12:30", "5", "true", "null"]
    for content in (lines(texts), json.dumps([{"text": text} for text in texts])):
        (tmp_path / "a.json").write_text(content)
        assert list(documents(tmp_path / "a.json").read(None)) == texts
    (tmp_path / "b.jsonl").write_text("\n" * 2**20 + lines(texts[2000:]))
    assert list(documents(tmp_path / "b.jsonl").read(None)) == texts[2000:]


@pytest.mark.parametrize("content", ["null\n" * 5, "3\n", '"a"\n', "true", " \n null\n"])
def test_lines_that_are_no_objects_are_refused(tmp_path, content):
    """At rows that are all null, the library that parses them crashes."""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"The dataset .* cannot be (loaded|read)"):
        split_corpus(documents(tmp_path / "a.jsonl"), ByteTokenizer(), folder=tmp_path / "ids")


def test_a_packed_text_without_lines_is_read_in_pieces(tmp_path):
    with gzip.GzipFile(tmp_path / "a.txt.gz", "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(b"a" * 2**20)
    pieces = list(documents(tmp_path / "a.txt.gz").read(None))
    assert max(map(len, pieces)) == 2**20
    assert sum(map(len, pieces)) == 20 * 2**20


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("configs:\n- config_name: x\n  data_files: ../id.txt\n", "not in its folder"),
        ("configs:\n- config_name: x\n  data_files: /etc/passwd\n", "not in its folder"),
        ("configs:\n- config_name: x\n  data_files: /**\n", "not in its folder"),
        ("configs:\n- config_name: x\n  data_files: [a/../../**]\n", "not in its folder"),
        (
            "configs:\n- config_name: x\n  data_files:\n  - split: train\n    path: http://[::1]:1/x\n",
            "not in its folder",
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("README.md", "---\n", "---\n"),
        ("README.md", "\ufeff \n \n---\r\n---x: 1\n", "--- \t"),
        (".huggingface.yaml", "", ""),
    ],
)
def test_a_card_names_files_in_its_folder_only(folder, card, words, name, begin, end):
    (folder.parent / "id.txt").write_text("secret")
    (folder / name).write_text(begin + card + end, encoding="utf-8", newline="")
    with pytest.raises(UserError, match=words):
        documents(folder)


@pytest.mark.processes
def test_a_value_of_a_parquet_file_that_stands_for_many_rows_is_read_for_a_few(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(datasets, "MEMORY", 2**28)
    one, path = "a" * 2**20, tmp_path / "a.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array([one]))
    pyarrow.parquet.write_table(pa.table({"text": text}), path, store_schema=False)
    texts = iter(documents(path).read(None))
    for _ in range(40):  # of 2,000 MiB
        assert next(texts) == one
    # Nor does it fill a disk.
    with pytest.raises(UserError, match="more than 100 characters for each byte of its files"):
        list(texts)


def test_a_csv_file_is_texts_whatever_they_say(tmp_path):
    texts = ["hello"] * 10_000 + ["007", "1.50", "True", "NA", "null", "nan"] * 2000
    (tmp_path / "a.csv").write_text("text\n" + "".join(f"{text}\n" for text in texts))
    assert list(documents(tmp_path / "a.csv").read(None)) == texts


@pytest.mark.parametrize("rows", [["hello", 5, ["a"]], [5, "hello"], ["a", None, {"b": 1}]])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_column_of_texts_and_other_things_is_refused(rows, suffix, tmp_path):
    content = [json.dumps({"text": row}) for row in rows]
    joined = "\n".join(content) if suffix == "jsonl" else f"[{', '.join(content)}]"
    (tmp_path / f"a.{suffix}").write_text(joined)
    with pytest.raises(UserError, match=r"column of text|where a text is expected|cannot be"):
        list(documents(tmp_path / f"a.{suffix}").read(None))


def test_a_process_that_has_nothing_to_read_ends_and_another_one_begins(tmp_path, monkeypatch):
    begun = []

    class Process(datasets.BoundedProcess):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            begun.append(self)

    monkeypatch.setattr(datasets, "BoundedProcess", Process)
    corpus = write_dataset(tmp_path / "a.jsonl", ["one", "two"])
    begun[0]._process.send_signal(signal.SIGALRM)
    begun[0]._process.wait()
    assert list(corpus.read(None)) == ["one", "two"]
    assert len(begun) == 2
    begun[1]._process.send_signal(signal.SIGALRM)
    begun[1]._process.wait()
    (tmp_path / "a.jsonl").write_text(lines(["three"]))
    with pytest.raises(UserError, match=r"The dataset .* was changed since it was opened"):
        list(corpus.read(None))


def test_a_reading_that_is_interrupted_is_begun_again(tmp_path, monkeypatch):
    corpus = write_dataset(tmp_path / "a.jsonl", ["one", "two"])
    loads = json.loads

    def interrupted(text):
        monkeypatch.setattr("gptlite.machine.bounded.json.loads", loads)
        raise KeyboardInterrupt

    monkeypatch.setattr("gptlite.machine.bounded.json.loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(corpus.read(None))
    assert list(corpus.read(None)) == ["one", "two"]


def test_a_system_without_alarms_reads_as_others_do(tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "SIGALRM", raising=False)
    corpus = write_dataset(tmp_path / "a.jsonl", ["one", "two"])
    for _ in range(2):
        assert list(corpus.read(None)) == ["one", "two"]


def test_entries_of_the_path_that_are_no_strings_are_left_out(tmp_path, monkeypatch):
    """Python imports nothing from them, and JSON has none."""
    monkeypatch.setattr(bounded, "subprocess", subprocess)  # a new one
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    assert list(write_dataset(tmp_path / "a.jsonl", ["one"]).read(None)) == ["one"]


def test_two_readings_do_not_disturb_each_other(tmp_path):
    corpus = write_dataset(tmp_path / "a.jsonl", [str(i) for i in range(3000)])
    one, other = corpus.read(None), corpus.read(None)
    assert [next(one), next(other), next(one), next(other)] == ["0", "0", "1", "1"]
    place = corpus.state()
    del one
    assert [next(other) for _ in range(2)] == ["2", "3"]
    assert list(corpus.read(place)) == [str(i) for i in range(2, 3000)]


def test_every_kind_of_text_that_parquet_has_is_text(tmp_path):
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        table = pa.table({"text": pa.array(["one", "two"], kind)})
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        assert list(documents(tmp_path / "a.parquet").read(None)) == ["one", "two"]


@pytest.mark.parametrize(("text", "n"), [(None, 2000), ("", 2000), ("a", 2000), ("a" * 999, 200)])
def test_rows_and_characters_are_compared_with_the_size_of_the_files(
    tmp_path, monkeypatch, text, n
):
    """Files of a few bytes may have any number of either: it is told before all are read."""
    monkeypatch.setattr(dataset_worker, "FREE", 2**16)
    rows = pa.table({"text": pa.array([text] * n, pa.string())})
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet", write_statistics=False)
    parts = dataset_worker.Dataset(str(tmp_path / "a.parquet")).parts({"state": None, "skip": 0})
    assert (tmp_path / "a.parquet").stat().st_size < 1500
    with pytest.raises(UserError, match="more than 100 characters for each byte of its files"):
        list(parts)
    (tmp_path / "a.jsonl").write_text(lines([text or "", *"ab" * n]))
    parts = dataset_worker.Dataset(str(tmp_path / "a.jsonl")).parts({"state": None, "skip": 0})
    assert sum(len(part["texts"]) for part in parts) == 2 * n + bool(text)


def test_parquet_files_may_differ_in_all_but_the_texts(tmp_path):
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.null()]
    for i, kind in enumerate(kinds):
        texts = pa.nulls(1) if pa.types.is_null(kind) else pa.array([f"text {i}"]).cast(kind)
        other = {"n": pa.array([i]) if i % 2 else pa.array(["a"])}
        table = pa.table(other | {"text": texts} if i > 1 else {"text": texts} | other)
        pyarrow.parquet.write_table(table, tmp_path / f"{i}.parquet")
    assert list(documents(tmp_path).read(None)) == ["text 0", "text 1", "text 2"]
    pyarrow.parquet.write_table(pa.table({"story": ["a"]}), tmp_path / "9.parquet")
    with pytest.raises(UserError, match=r"9\.parquet has no column text"):
        list(documents(tmp_path).read(None))


def test_csv_files_may_differ_in_all_but_the_texts(tmp_path):
    for name, content in {
        "a": "n,text\n1,one\n",
        "b": "text,m,k\ntwo,2,3\n",
        "c": "text\n",
    }.items():
        (tmp_path / f"{name}.csv").write_text(content)
    assert list(documents(tmp_path).read(None)) == ["one", "two"]
    (tmp_path / "d.csv").write_text("story\na\n")
    with pytest.raises(UserError, match=r"d\.csv has no column text"):
        list(documents(tmp_path).read(None))


def test_json_files_may_differ_in_all_but_the_texts(tmp_path):
    for name, rows in {
        "a": '{"n": 1, "text": "one"}\n',
        "b": '{"m": 2}\n{"text": null}\n{"text": "two"}\n',
        "c": "",
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(rows)
    assert list(documents(tmp_path).read(None)) == ["one", "two"]
    (tmp_path / "d.jsonl").write_text('{"story": "a"}\n')
    with pytest.raises(UserError, match=r"d\.jsonl has no column text"):
        list(documents(tmp_path).read(None))


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.arrow is none of the files .* \.parquet, \.csv"):
        documents(tmp_path / "a.arrow")


def test_a_dataset_of_another_kind_is_refused(tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "a.xml").write_text("<a>text</a>")
    with pytest.raises(UserError, match="is of the kind xml: gptlite reads csv, json"):
        documents(folder)


def test_files_of_a_folder_that_are_left_out_are_told(folder, capsys):
    documents(folder)
    assert "Left out" not in capsys.readouterr().out
    (folder / ".hidden.csv").touch()
    for name in ("b.csv", "c.txt"):
        (folder / name).touch()
        documents(folder)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"Of {folder}, the json files are read. Left out: {folder / 'b.csv'}."
    assert (
        second == f"Of {folder}, the json files are read. Left out: {folder / 'b.csv'} and 1 more."
    )


def test_a_folder_whose_name_is_a_pattern_is_refused(tmp_path):
    (tmp_path / "a[1]").mkdir()
    (tmp_path / "a[1]" / "a.jsonl").write_text('{"text": "a"}')
    with pytest.raises(UserError, match="in its name for a pattern"):
        documents(tmp_path / "a[1]")
    assert list(documents(tmp_path / "a[1]" / "a.jsonl").read(None)) == ["a"]
    (tmp_path / "a[1]").rename(tmp_path / "a *?:]b")
    assert list(documents(tmp_path / "a *?:]b").read(None)) == ["a"]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs Linux")
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_file_of_no_size_is_not_read(tmp_path, suffix):
    """Some never end, and some wait for ever."""
    (tmp_path / f"a.{suffix}").write_text("one" if suffix == "txt" else lines(["one"]))
    (tmp_path / f"b.{suffix}").symlink_to("/proc/self/cmdline")
    assert "".join(documents(tmp_path).read(None)).strip() == "one"


@pytest.mark.parametrize("card", [False, True])
def test_files_behind_a_link_to_a_folder_are_in_no_dataset(tmp_path, card):
    (tmp_path / "outside").mkdir()
    write_file(tmp_path / "outside" / "train-00000-of-00001.jsonl", ["secret"])
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "data").symlink_to("../outside")
    if card:
        settings = '---\nconfigs:\n- config_name: default\n  data_files: "data/*.jsonl"\n---\n'
        (tmp_path / "inside" / "README.md").write_text(settings)
    with pytest.raises(UserError, match=r"data/train\S*\.jsonl, which is not in its folder"):
        documents(tmp_path / "inside")


def test_a_folder_with_links_to_itself_is_read(tmp_path):
    """Which have 2^40 paths."""
    write_file(tmp_path / "a.jsonl", ["one"])
    for name in ("b", "c"):
        (tmp_path / name).symlink_to(".")
    assert list(documents(tmp_path).read(None)) == ["one"]


def test_a_link_in_a_folder_is_told(folder, tmp_path, capsys):
    (tmp_path / "other.jsonl").write_text(lines(["other"]))
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl").symlink_to(tmp_path / "other.jsonl")
    assert list(documents(folder).read(None)) == ["other"]
    assert "train.jsonl is read, which is a link to" in capsys.readouterr().out
