"""A corpus as ids: in memory or in a file, in one piece or in many, the same."""

import concurrent.futures
import contextlib
import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiktoken
from conftest import ROOT, TEXT
from filelock import FileLock
from hypothesis import given, strategies as st

from gptlite.errors import UserError
from gptlite.hugging_face.tokenizer import HFTokenizer, to_hf_tokenizer
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.text import tokens
from gptlite.text.corpus import Corpus, documents, text_corpus
from gptlite.text.tokenizer import ByteTokenizer, TiktokenTokenizer
from gptlite.text.tokens import encode_pieces, split_corpus


def in_pieces(text: str, length: int) -> Corpus:
    return text_corpus(lambda: (text[i : i + length] for i in range(0, len(text), length)))


def test_the_split_is_by_characters():
    corpus = text_corpus("ab" * 45 + "é" * 10)
    split = split_corpus(corpus, make_tokenizer("byte"))
    assert bytes(split.train.tolist()).decode() == "ab" * 45
    assert bytes(split.validation.tolist()).decode() == "é" * 10
    assert split.validation_bytes == 19  # without the first, which nothing predicts
    assert split_corpus(corpus, make_tokenizer("char", corpus)).validation_bytes == 18
    nothing = split_corpus(documents(["a", "b"]), make_tokenizer("byte"))
    assert np.isnan(nothing.bits_per_byte(1.0))


def test_validation_tokens_bounds_the_validation_text():
    corpus = text_corpus(TEXT)
    tokenizer = make_tokenizer("char", text_corpus(TEXT))
    split = split_corpus(corpus, tokenizer, 50)
    whole = split_corpus(corpus, tokenizer)
    np.testing.assert_array_equal(split.validation, whole.validation[:50])
    np.testing.assert_array_equal(split.train, whole.train)
    assert split.validation_bytes == 49


@given(length=st.integers(1, 2000), tokens=st.integers(2, 200))
def test_a_file_of_ids_holds_what_memory_would(length, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer = make_tokenizer("char", text_corpus(TEXT))
    words = {"folder": folder, "in_memory": 0}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        split = split_corpus(in_pieces(TEXT, length), tokenizer, tokens, **words)
        again = split_corpus(in_pieces(TEXT, length), tokenizer, tokens, **words)
    whole = split_corpus(text_corpus(TEXT), tokenizer, tokens)
    assert isinstance(split.train, np.memmap)
    assert split.train.dtype == np.uint16
    assert said.getvalue().count("encoding") == 1
    for one in (split, again):
        np.testing.assert_array_equal(one.train, whole.train)
        np.testing.assert_array_equal(one.validation, whole.validation)
        assert one.validation.dtype == np.int32  # as `generate` takes it
        assert one.validation_bytes == whole.validation_bytes


def files(folder):
    return sorted(path.suffix for path in folder.iterdir() if path.suffix != ".lock")


def test_another_text_or_tokenizer_is_noticed_and_damage_is_mended(tmp_path, capsys):
    def encode(text, tokenizer):
        return split_corpus(text_corpus(text), tokenizer, folder=tmp_path, in_memory=0)

    def encoded():
        return capsys.readouterr().out.count("encoding")

    encode(TEXT, ByteTokenizer())
    encode(TEXT.replace("miller", "tiller"), ByteTokenizer())
    encode(TEXT, make_tokenizer("char", text_corpus(TEXT)))
    encode(TEXT, make_tokenizer("char", text_corpus(TEXT + "é")))
    assert encoded() == 4
    encode(TEXT, ByteTokenizer())
    assert encoded() == 0
    expected = split_corpus(text_corpus(TEXT), ByteTokenizer())
    for damage in (
        lambda path: path.write_bytes(path.read_bytes()[:-2]),
        lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
        lambda path: path.unlink(),
    ):
        for path in tmp_path.glob("*.train"):
            damage(path)
        np.testing.assert_array_equal(encode(TEXT, ByteTokenizer()).train, expected.train)
        assert encoded() == 1
    for path in tmp_path.glob("*.json"):
        path.write_text("{")
    np.testing.assert_array_equal(encode(TEXT, ByteTokenizer()).train, expected.train)


@pytest.mark.parametrize("content", ["{", '{"counts": [3, 3]}', '{"is_finished": true}'])
def test_files_that_another_process_trains_on_are_left_as_they_are(content, tmp_path):
    """The journal is damaged, and a new process encodes the text again."""
    first = split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path, in_memory=0)
    (journal,) = tmp_path.glob("*.json")
    journal.write_text(content)
    again = split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path, in_memory=0)
    np.testing.assert_array_equal(again.train, first.train)
    assert bytes(first.train.tolist()).decode() == TEXT[: len(first.train)]
    (path,) = tmp_path.glob("*.train")
    before, after = first.train, again.train
    assert isinstance(before, np.memmap)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert not np.any(after)
    assert np.all(before)


def test_ids_of_another_version_are_not_used(tmp_path, monkeypatch, capsys):
    for module, name in ((tokens, "ENCODING"), (tiktoken, "__version__")):
        split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path, in_memory=0)
        monkeypatch.setattr(module, name, "another")
        split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path, in_memory=0)
    assert capsys.readouterr().out.count("encoding") == 3


def test_one_process_encodes_and_the_others_wait_as_long_as_it_takes(tmp_path, capsys):
    def encode():
        return split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path, in_memory=0)

    first = encode()
    (path,) = tmp_path.glob(".*.lock")
    with FileLock(path):  # what is finished needs no lock
        np.testing.assert_array_equal(encode().train, first.train)
        (journal,) = tmp_path.glob("*.json")
        journal.unlink()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(encode)
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
            path.unlink()  # as the message says
            np.testing.assert_array_equal(waiting.result(60).train, first.train)
    out = capsys.readouterr().out
    assert (
        f"waiting for another process that encodes this text (if there is none, delete {path}"
        in out
    )


def test_many_distinct_ids_take_four_bytes(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    corpus = text_corpus(text)
    tokenizer = make_tokenizer("char", corpus)
    split = split_corpus(corpus, tokenizer, folder=tmp_path, in_memory=0)
    assert split.train.dtype == np.uint32
    assert tokenizer.decode(split.train) == text[:63_000]


def test_an_interrupted_encoding_starts_again(tmp_path):
    program = """
import dataclasses, sys, time
from pathlib import Path
from test_tokens import TEXT, ByteTokenizer, in_pieces, split_corpus
corpus = in_pieces(TEXT, 10)
def slowly(state):
    for piece in corpus.read(state):
        time.sleep(0.05)
        yield piece
slow = dataclasses.replace(corpus, read=slowly)
split_corpus(slow, ByteTokenizer(), folder=Path(sys.argv[1]), in_memory=0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'text'}"},
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.train")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("*.json"))
    split = split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path, in_memory=0)
    assert bytes(split.train.tolist()).decode() == TEXT[: len(split.train)]
    assert files(tmp_path) == [".json", ".train", ".validation"]


@pytest.mark.parametrize("in_memory", [0, 10**6])
def test_a_text_that_changes_while_it_is_read_is_refused(in_memory, tmp_path):
    other = TEXT.replace("miller", "tiller")
    texts = iter([TEXT, other])
    corpus = text_corpus(lambda: iter([next(texts)]))
    with pytest.raises(UserError, match="was changed while it was read"):
        split_corpus(corpus, ByteTokenizer(), 5, folder=tmp_path, in_memory=in_memory)
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tokens").write_text("not a folder")
    with pytest.raises(UserError, match="tokens"):
        split_corpus(text_corpus(TEXT), ByteTokenizer(), folder=tmp_path / "tokens", in_memory=0)


WORDS = st.lists(
    st.sampled_from(
        ["the", "Word", "don't", "I'll", " ", "  ", "\n", "\n\n", "\r\n", "\t", "...", "?!", "12",
         "3456", "é", "中文字", "🙂", "'", "'s", "/", "-", "_", " a", " the", "\xa0", "x\ny", "A B"]
    ),
    max_size=60,
)  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "own"])
def test_pieces_are_cut_where_tiktoken_would_cut(name, tiktoken_gpt2):
    pattern = tiktoken_gpt2._pat_str
    if name == "own":  # the pattern of cl100k_base, whose file is not at hand
        pattern = (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++"
            r"[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
        )
    tokenizer = TiktokenTokenizer(
        tiktoken.Encoding(
            name,
            pat_str=pattern,
            mergeable_ranks=tiktoken_gpt2._mergeable_ranks,
            special_tokens={},
        )
    )

    @given(words=WORDS, length=st.integers(1, 50))
    def check(words, length):
        text = "".join(words)
        pieces = (text[i : i + length] for i in range(0, len(text), length))
        ids = [part for part in encode_pieces(tokenizer, pieces) if len(part)]
        assert np.concatenate([[], *ids]).tolist() == tokenizer.encode(text).tolist()

    check()


def test_a_text_without_words_is_cut_before_it_fills_the_memory(monkeypatch):
    pattern = r"[\s\S]{1,8}"  # others take long for a single word
    monkeypatch.setattr("gptlite.text.tokenizer.PATTERNS", (pattern,))
    tokenizer = TiktokenTokenizer(
        tiktoken.Encoding(
            "bytes",
            pat_str=pattern,
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={},
        )
    )
    pieces = ("ab" * 2**20 for _ in range(5))
    parts = [len(part) for part in encode_pieces(tokenizer, pieces)]
    assert parts == [9 * 2**20, 2**20]
    pieces = ["ab" * 9 * 2**20]
    assert [len(part) for part in encode_pieces(tokenizer, iter(pieces))] == [9 * 2**20] * 2


def test_a_long_piece_is_encoded_in_parts_that_change_no_token(tiktoken_gpt2):
    tokenizer, text = TiktokenTokenizer(tiktoken_gpt2), TEXT * (2**22 // len(TEXT))
    parts = list(encode_pieces(tokenizer, iter([text])))
    assert len(parts) == 4
    np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode(text))


DOCUMENTS = [f"{word}é" for word in TEXT.split()][:120]


@pytest.mark.parametrize("n", [120, 100, 5, 2])
@pytest.mark.parametrize("name", ["char", "byte", "bpe:256", "bpe:257", "bpe:300"])
def test_what_separates_documents_has_no_bytes(name, n, tmp_path):
    """Neither the end of a line nor a token's name, which has 13 letters."""
    texts = DOCUMENTS[:n] if n > 9 else TEXT.replace("\n", " ").split(".")[:n]
    corpus = documents(texts)
    tokenizer = make_tokenizer(name, corpus)
    split = split_corpus(corpus, tokenizer, folder=tmp_path)
    held_out = texts[9:n:10]
    if not held_out:  # the last tenth of the ids
        text = tokenizer.decode(np.concatenate([split.train, split.validation]))
        separator = "<|endoftext|>" if tokenizer.end_ids else "\n"
        assert text == "".join(text + separator for text in texts)
        held_out = [tokenizer.decode(split.validation).replace(separator, "")]
    first = len(tokenizer.token_bytes(int(split.validation[0])))
    assert split.validation_bytes == sum(len(word.encode()) for word in held_out) - first


def test_an_end_that_was_cut_off_is_none(tmp_path):
    """Of a document that is longer than what is wanted."""
    corpus, tokenizer = documents(["ab" * 40, "cd" * 40]), ByteTokenizer()
    split = split_corpus(corpus, tokenizer, max_tokens=50, folder=tmp_path)
    assert len(split.validation) == 5
    assert split.validation_bytes == 4  # without the first, which nothing predicts


@pytest.mark.parametrize("end", ["Ċ", "a"])
def test_an_end_that_a_text_may_have_has_bytes_in_it(end, tmp_path):
    """A model's `eos_token_id` may be the end of a line."""
    texts = [f"a b a\nab {i}" for i in range(40)]
    for corpus in (documents(texts), documents(texts[:5]), text_corpus("\n".join(texts))):
        tokenizers = [ByteTokenizer(), HFTokenizer(to_hf_tokenizer(ByteTokenizer()), None, end)]
        assert len(tokenizers[1].end_ids) == 1
        splits = [split_corpus(corpus, x, folder=tmp_path) for x in tokenizers]
        assert splits[0].validation_bytes == splits[1].validation_bytes > 0


def test_a_char_tokenizer_of_documents_knows_what_separates_them():
    assert make_tokenizer("char", documents(["ab", "cd"])).encode("a\nd").tolist() == [1, 0, 4]
