import functools
import json

import numpy as np
import pytest
import tiktoken
from conftest import own_encoding
from hypothesis import given, strategies as st
from tiktoken_ext import openai_public

from gptlite.errors import UserError
from gptlite.hugging_face.tokenizer import HFTokenizer, to_hf_tokenizer
from gptlite.runs.tokenizers import make_tokenizer, tokenizer_from_json
from gptlite.text.corpus import documents, text_corpus
from gptlite.text.tokenizer import (
    PATTERNS,
    ByteTokenizer,
    CharTokenizer,
    TiktokenTokenizer,
    n_bytes,
)


@given(st.text(min_size=1))
def test_char_round_trips(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert ids.min() >= 0
    assert ids.max() < tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(ids) == text


@given(st.text())
def test_byte_round_trips(text):
    tokenizer = make_tokenizer("byte")
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(st.text())
def test_tiktoken_round_trips(text):
    tokenizer = TiktokenTokenizer(own_encoding())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("the <|end|>" + text)) == "the <|end|>" + text


@pytest.mark.parametrize("text", ["", "the <|end|>"])
def test_tiktokens_ids_are_those_of_plain_text(text):
    encoding = own_encoding()
    ids = TiktokenTokenizer(encoding).encode(text)
    assert ids.tolist() == encoding.encode_ordinary(text)


of_each_kind = pytest.mark.parametrize(
    "tokenizer",
    [
        make_tokenizer("char", text_corpus("aé🙂\n")),
        ByteTokenizer(),
        TiktokenTokenizer(own_encoding()),
    ],
    ids=["char", "byte", "tiktoken"],
)


@of_each_kind
def test_a_tokenizer_survives_json(tokenizer):
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert type(again) is type(tokenizer)
    assert again.vocab_size == tokenizer.vocab_size
    text = "a🙂é\na"
    np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))
    assert again.decode(again.encode(text)) == text


@of_each_kind
def test_what_is_no_id_has_no_text_and_no_bytes(tokenizer):
    """-1 is what `beam_search` gives after the end; NumPy and Python would count from the end."""
    size = tokenizer.vocab_size
    for i in (-1, size, 2**31 - 1):
        for ask in (tokenizer.decode, functools.partial(n_bytes, tokenizer)):
            with pytest.raises(UserError, match=rf"^{i} is no id .* from 0 to {size - 1:,}\.$"):
                ask(np.array([0, i], np.int32))


def test_files_that_cannot_be_fetched_are_told(monkeypatch):
    def get_encoding(name):
        raise ValueError("Hash mismatch for data downloaded from a proxy's page")

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    with pytest.raises(UserError, match=r"tiktoken could not fetch the files of 'gpt2' \(ValueErr"):
        make_tokenizer("tiktoken:gpt2")


@pytest.mark.parametrize("record", [{}, {"kind": "word"}, {"kind": "char"}, {"kind": "tiktoken"}])
def test_json_that_is_no_tokenizer_is_refused(record):
    with pytest.raises(UserError, match="not a tokenizer"):
        tokenizer_from_json(record)


def tiktoken_record(change) -> dict:
    """A small tokenizer in JSON, after `change(ranks)`."""
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    encoding = tiktoken.Encoding(
        "x", pat_str=PATTERNS[0], mergeable_ranks=ranks, special_tokens={"<end>": 258}
    )
    record = TiktokenTokenizer(encoding).to_json()
    change(record["ranks"])
    return record


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ranks: ranks.update({"YWI=": 2**40}), "ids must be integers from 0"),
        (lambda ranks: ranks.update({"YWI=": -1}), "ids must be integers from 0"),
        (lambda ranks: ranks.update({"YWI=": "1"}), "Expected `int`, got `str`"),
        (lambda ranks: ranks.update({"YWI=": True}), "Expected `int`, got `bool`"),
        (lambda ranks: ranks.update({"YWI=": 97}), "two tokens have the same id"),
        (lambda ranks: ranks.update({"YWI=": 258}), "two tokens have the same id"),
        (lambda ranks: ranks.pop("YQ=="), "a token for some byte is missing"),
    ],
)
def test_ranks_that_tiktoken_would_panic_at_are_refused(change, words):
    assert tokenizer_from_json(tiktoken_record(lambda ranks: None)).encode("abc").tolist() == [
        256,
        99,
    ]
    with pytest.raises(UserError, match=words):
        tokenizer_from_json(tiktoken_record(change))


@pytest.mark.parametrize("pattern", ["(", "a*", r"(?:(?=x)x+)+y(?!q)", "(" * 100_000])
def test_a_pattern_of_a_stranger_is_refused(pattern):
    """`a*` would end in a panic, and the third one would take for ever."""
    record = tiktoken_record(lambda ranks: None) | {"pattern": pattern}
    with pytest.raises(UserError, match="by a pattern that gptlite does not know"):
        tokenizer_from_json(record)
    encoding = own_encoding()
    encoding._pat_str = pattern
    with pytest.raises(UserError, match="by a pattern that gptlite does not know"):
        TiktokenTokenizer(encoding)


def test_the_patterns_of_all_of_tiktokens_encodings_are_known(monkeypatch):
    for load in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):  # which need files
        monkeypatch.setattr(openai_public, load, lambda *_, **__: {})
    for make in openai_public.ENCODING_CONSTRUCTORS.values():
        assert make()["pat_str"] in PATTERNS


@pytest.mark.parametrize(
    "call",
    [
        lambda text: tokenizer_from_json({"kind": "char", "characters": text}),
        lambda text: text_corpus(text),
        lambda text: documents([text]),
        ByteTokenizer().encode,
        TiktokenTokenizer(own_encoding()).encode,
        HFTokenizer(to_hf_tokenizer(ByteTokenizer())).encode,
    ],
    ids=["vocabulary", "text", "documents", "byte", "tiktoken", "hf"],
)
def test_half_a_surrogate_pair_is_no_text(call):
    """No tokenizer would give it back."""
    with pytest.raises(UserError, match=r"'a\\ud800' has half of a surrogate pair"):
        call("a\ud800")


def test_what_tiktoken_cannot_search_is_told_in_a_sentence():
    with pytest.raises(UserError, match="tiktoken cannot encode this text"):
        TiktokenTokenizer(own_encoding()).encode(" " * 1_500_000 + "a")


def test_an_unseen_character_is_shown_with_what_is_around_it():
    with pytest.raises(UserError) as error:
        make_tokenizer("char", text_corpus("abc")).encode("abca🙂b")
    for words in ("'🙂'", "U+1F642", "in 'abca🙂b'"):
        assert words in str(error.value)


def test_bytes_that_are_no_text_become_the_replacement_character():
    assert ByteTokenizer().decode(np.array([97, 0xF0, 98])) == "a\ufffdb"


@pytest.mark.parametrize("name", ["chars", "tiktoken:gpt99", "tiktoken", ""])
def test_an_unknown_tokenizer_is_refused_with_the_choices(name):
    with pytest.raises(UserError, match="cl100k_base"):
        make_tokenizer(name, text_corpus("text"))


def test_a_fetch_that_fails_says_what_to_do(monkeypatch):
    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        make_tokenizer("tiktoken:gpt2")


def test_tiktoken_pads_the_vocabulary_to_64():
    tokenizer = TiktokenTokenizer(own_encoding())
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (301, 320)
    assert tokenizer.token_bytes(280) == b""


def test_the_preset_gpt2_has_the_shape_of_gpt2(tiktoken_gpt2, shakespeare):
    tokenizer = make_tokenizer("tiktoken:gpt2")
    assert (tokenizer.vocab_size, tokenizer.padded_vocab_size) == (50257, 50304)
    ids = tokenizer.encode(shakespeare[:20000])
    assert ids.tolist() == tiktoken_gpt2.encode(shakespeare[:20000])
    assert tokenizer.decode(ids) == shakespeare[:20000]


def test_char_on_shakespeare_is_nanogpts(shakespeare):
    tokenizer = make_tokenizer("char", text_corpus(shakespeare))
    assert tokenizer.vocab_size == 65
    assert tokenizer.encode("\n !").tolist() == [0, 1, 2]
    text = shakespeare[:100_000]
    assert tokenizer.decode(tokenizer.encode(text)) == text
