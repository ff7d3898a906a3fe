"""A byte-pair encoding that is trained on a text, against the algorithm written out."""

import contextlib
import io
import itertools
import json
from collections import Counter

import numpy as np
import pytest
import regex
from conftest import TEXT

from gptlite.errors import UserError
from gptlite.hugging_face.bpe import PATTERN, train_bpe
from gptlite.hugging_face.tokenizer import BYTE_CHARACTERS, HFTokenizer, to_hf_tokenizer
from gptlite.runs.tokenizers import make_tokenizer, tokenizer_from_json
from gptlite.text.corpus import text_corpus

CORPUS = text_corpus(TEXT)
TRAINING = TEXT[: int(0.9 * len(TEXT))]


def merges(text: str, count: int) -> list[bytes]:
    """The tokens that the most frequent pairs make, one after the other (Sennrich et al., 2016,
    algorithm 1). Of equally frequent pairs, the one with the smaller ids."""
    tokens = [bytes([byte]) for byte in sorted(BYTE_CHARACTERS, key=BYTE_CHARACTERS.__getitem__)]
    ids = {token: i for i, token in enumerate(tokens)}
    words = Counter(
        tuple(ids[bytes([byte])] for byte in word.encode()) for word in regex.findall(PATTERN, text)
    )
    for _ in range(count):
        pairs = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        tokens.append(tokens[best[0]] + tokens[best[1]])
        merged = Counter()
        for word, times in words.items():
            new = []
            for i in word:
                if new and (new[-1], i) == best:
                    new[-1] = len(tokens) - 1
                else:
                    new.append(i)
            merged[tuple(new)] += times
        words = merged
    return tokens


@pytest.mark.parametrize("size", [257, 300, 350])
def test_the_tokens_are_those_of_the_algorithm(size):
    tokenizer = train_bpe(CORPUS, size)
    expected = merges(TRAINING, size - 1 - 256)
    assert [tokenizer.token_bytes(i) for i in range(size - 1)] == expected
    assert tokenizer.end_ids == (size - 1,)
    assert tokenizer.token_bytes(size - 1) == b"<|endoftext|>"
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size % 64) == (size, 0)


def test_256_tokens_are_the_bytes_alone():
    tokenizer = train_bpe(CORPUS, 256)
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([i]) for i in range(256)}
    assert (tokenizer.vocab_size, tokenizer.end_ids) == (256, ())


def test_only_the_training_part_is_read():
    secret = text_corpus(TEXT + "xyzzy " * (len(TEXT) // 60))
    assert "xyzzy" not in secret.text[: int(0.9 * len(secret.text))]
    tokens = json.dumps(train_bpe(secret, 350).to_json())
    again = text_corpus(secret.text.replace("xyzzy", "plugh"))
    assert json.dumps(train_bpe(again, 350).to_json()) == tokens


def test_the_same_text_gives_the_same_tokens(monkeypatch):
    found = set()
    for threads in ("true", "false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
        found.add(json.dumps(train_bpe(CORPUS, 350).to_json()))
    assert len(found) == 1


def test_a_run_and_other_libraries_encode_alike():
    tokenizer = make_tokenizer("bpe:350", CORPUS)
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    theirs = HFTokenizer(to_hf_tokenizer(tokenizer))
    text = TEXT + "Ünïcode, 12345 <|endoftext|>\r\n\t"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 2
    np.testing.assert_array_equal(again.encode(text), ids)
    np.testing.assert_array_equal(theirs.encode(text), ids)


def test_a_text_with_few_words_gives_fewer_tokens_and_says_so(capsys):
    tokenizer = train_bpe(text_corpus("ab " * 100), 1000)
    assert tokenizer.vocab_size < 300
    assert tokenizer.end_ids == (tokenizer.vocab_size - 1,)
    said = capsys.readouterr().out
    assert f"more than {tokenizer.vocab_size} tokens" in said


def test_of_a_long_text_pieces_from_all_of_it_are_read():
    """The last tenth of the training part has words of its own. The pieces are short here, so that
    some of them are taken."""
    texts = ["one two three " * 10] * 90 + ["seven eight " * 10] * 20
    corpus = text_corpus(lambda: iter(texts))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        tokenizer = train_bpe(corpus, 280, sample=len(corpus.text) // 4)
    assert f"{len(corpus.text) // 4:,} of {int(0.9 * len(corpus.text)):,} characters" in (
        said.getvalue()
    )
    found = {tokenizer.token_bytes(i) for i in range(279)}
    assert {b" three", b" eight"} <= found


@pytest.mark.parametrize("name", ["bpe", "bpe:", "bpe:255", "bpe:0300", "bpe:x", "bpe:1048577"])
def test_a_size_out_of_range_is_refused(name):
    with pytest.raises(UserError, match=r"from 256 to 1048576, .* got 'bpe"):
        make_tokenizer(name, CORPUS)
    with pytest.raises(UserError, match="is made from a text"):
        make_tokenizer("bpe:300")
