"""Tokenizers in Hugging Face's format, both ways."""

import itertools
import json
import os

import numpy as np
import pytest
import tiktoken
import tokenizers
from conftest import TEXT, own_encoding
from hypothesis import given, strategies as st

from gptlite.config import SamplingConfig
from gptlite.errors import UserError
from gptlite.generation.text import TextStream
from gptlite.hugging_face.components import _LLAMA3, KNOWN_SPLITS
from gptlite.hugging_face.hub import FILES
from gptlite.hugging_face.tokenizer import HFTokenizer, to_hf_tokenizer
from gptlite.runs.tokenizers import make_tokenizer, tokenizer_from_json
from gptlite.serving.text import Piece, ServedText, TextScores
from gptlite.text.corpus import documents, text_corpus
from gptlite.text.tokenizer import (
    PATTERNS,
    ByteTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    n_bytes,
)
from gptlite.text.tokens import encode_pieces, split_corpus

CHAR = make_tokenizer("char", text_corpus(TEXT + "é🙂\r\n"))
OWN = TiktokenTokenizer(own_encoding())


def exported(tokenizer: Tokenizer) -> HFTokenizer:
    return HFTokenizer(to_hf_tokenizer(tokenizer), tokenizer.vocab_size)


def check_same(theirs: HFTokenizer, ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert theirs.encode(text).tolist() == ids.tolist()
    assert theirs.decode(ids) == ours.decode(ids)


BYTE, TIK = exported(ByteTokenizer()), exported(OWN)
# One with each of the ways to split a text, which joins any two characters of SPACES.
SPACES = " \n\t\r\u3000"
PAIRS = {(a + b).encode(): 256 + i for i, (a, b) in enumerate(itertools.product(SPACES, SPACES))}
RANKS = {bytes([i]): i for i in range(256)} | {b"\xe3\x80": 300} | {"\u3000".encode(): 301} | PAIRS
BY_PATTERN = [
    TiktokenTokenizer(
        tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=RANKS, special_tokens={})
    )
    for pattern in PATTERNS
]
EXPORTED_BY_PATTERN = [exported(tokenizer) for tokenizer in BY_PATTERN]


@given(st.text() | st.text(alphabet=SPACES + "a1'st.é中"))
def test_any_text_gets_the_same_ids(text):
    check_same(BYTE, ByteTokenizer(), text)
    check_same(TIK, OWN, text)
    for theirs, ours in zip(EXPORTED_BY_PATTERN, BY_PATTERN, strict=True):
        check_same(theirs, ours, text)


@given(st.text(alphabet=CHAR.characters))  # pyright: ignore[reportAttributeAccessIssue]
def test_any_text_of_known_characters_gets_the_same_ids(text):
    check_same(exported(CHAR), CHAR, text)


def test_gpt2s_tokens_are_tiktokens(tiktoken_gpt2, shakespeare):
    ours = TiktokenTokenizer(tiktoken_gpt2)
    theirs = exported(ours)
    check_same(theirs, ours, shakespeare[:100_000])
    for i in range(0, ours.vocab_size, 97):
        assert theirs.token_bytes(i) == ours.token_bytes(i)
    for text in (
        "don't  stop\n\n\n now 12345 !?\r\n\t x",
        "<|endoftext|> é🙂 中文 ' 's",
        " \n" * 9,
    ):
        check_same(theirs, ours, text)


def test_it_survives_json_and_a_model_may_have_more_rows():
    tokenizer = HFTokenizer(to_hf_tokenizer(OWN), 400)
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    check_same(tokenizer, again, "the cat and a hat\n")
    assert (again.vocab_size, again.padded_vocab_size) == (400, 400)
    assert again.token_bytes(399) == b""


def test_pieces_of_a_text_are_cut_where_no_token_changes():
    pieces = [TEXT[i : i + 11] for i in range(0, len(TEXT), 11)]
    parts = list(encode_pieces(TIK, iter(pieces)))
    assert len(parts) > 1
    np.testing.assert_array_equal(np.concatenate(parts), TIK.encode(TEXT))
    metaspace = sentencepiece()
    (whole,) = encode_pieces(metaspace, iter(pieces))
    np.testing.assert_array_equal(whole, metaspace.encode(TEXT))


def sentencepiece() -> HFTokenizer:
    """As Llama 2's: a sign for spaces, and bytes for unknown characters."""
    characters = sorted({*TEXT.replace(" ", "▁"), "▁"})
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    vocabulary = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return HFTokenizer(made.to_str(), len(names))


def test_a_tokenizer_as_llama_2s_round_trips():
    tokenizer = sentencepiece()
    for text in ("the miller 🙂 counts", TEXT[:200], "é\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_is_cut_only_where_no_added_token_may_lie():
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    made.add_tokens([tokenizers.AddedToken("New York", normalized=False)])
    tokenizer = HFTokenizer(made.to_str(), 400)
    (whole,) = encode_pieces(tokenizer, iter(["I was in New Yor", "k then"]))
    np.testing.assert_array_equal(whole, tokenizer.encode("I was in New York then"))
    for call in (tokenizer.boundary, tokenizer.encode):
        with pytest.raises(UserError, match="more than 16,777,216 characters needs too much mem"):
            call("a b " * 2**22 + "c")


@pytest.mark.parametrize("digits", ["", "{1,3}"])
def test_texts_are_cut_for_the_tokenizers_of_llama_3_and_qwen(digits):
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    split = _LLAMA3.replace("{1,3}", digits)
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = HFTokenizer(made.to_str(), 400)
    text = "é the 1234 cats.\nDon't\n\n go" * 9
    pieces = list(encode_pieces(tokenizer, iter(text[i : i + 7] for i in range(0, len(text), 7))))
    assert len(pieces) > 9
    np.testing.assert_array_equal(np.concatenate(pieces), tokenizer.encode(text))


def test_added_tokens_decode_as_in_the_library():
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    made.add_tokens(["Ġx", "a b", "é中"])
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel()])
    tokenizer = HFTokenizer(made.to_str(), 400)
    made = tokenizers.Tokenizer.from_str(made.to_str())  # which gives added tokens other ids
    for token in ("Ġx", "a b", "é中"):
        i = made.get_vocab()[token]
        assert tokenizer.decode(np.array([i])) == made.decode([i])


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##"}}, "decoder has 'WordPiece'"),
        ({"decoder": None}, r"decoder has the steps \[\]"),
        ({"decoder": {"type": "Sequence", "decoders": [LEVEL] * 2}}, "the steps"),
        (
            {"decoder": {"type": "Replace", "pattern": {"Regex": "\\d"}, "content": "b"}},
            "decoder has",
        ),
        ({"model": {"type": "BPE"}}, "cannot be read"),
        ({"version": "9"}, "cannot be read"),
    ],
)
def test_a_tokenizer_that_gptlite_cannot_use_is_refused(change, words):
    record = json.loads(to_hf_tokenizer(OWN)) | change
    with pytest.raises((UserError, ValueError), match=words):
        HFTokenizer(json.dumps(record), 400)
    with pytest.raises(ValueError, match="has the id 300, and the model 258 rows"):
        HFTokenizer(to_hf_tokenizer(OWN), 258)


def test_a_tokenizer_knows_what_begins_and_what_ends_a_text():
    assert (TIK.start_ids, TIK.end_ids) == ((), ())
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    made.add_special_tokens(["<begin>", "<end>"])
    start, end = made.token_to_id("<begin>"), made.token_to_id("<end>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", start)]
    )
    tokenizer = HFTokenizer(made.to_str(), 400, [end])
    again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert (again.start_ids, again.end_ids) == ((start,), (end,))
    assert again.encode("the cat").tolist() == OWN.encode("the cat").tolist()
    stream = TextStream(again)
    assert stream.feed(np.array([*again.encode("the cat"), end, *again.encode(" sat")])) == (
        "the cat"
    )
    assert (stream.stopped, stream.feed(again.encode(" on")), stream.finish()) == (True, "", "")
    for wrong in ([400], [-1], ["2"], [True], [None]):
        with pytest.raises(ValueError, match="its end_ids must be ids"):
            HFTokenizer(made.to_str(), 400, wrong)


def test_what_a_stop_string_may_begin_with_is_shown_when_the_text_ends():
    tokenizer = HFTokenizer(to_hf_tokenizer(ByteTokenizer()), 257, [256])
    stream = TextStream(tokenizer, ["stop"])
    assert stream.feed(np.array([*b"a sto", 256, *b"p"], np.int32)) == "a sto"
    assert stream.stopped
    stream = TextStream(tokenizer)  # in the middle of a character
    assert stream.feed(np.array([0x61, 0xC3, 256], np.int32)) == "a\ufffd"


def test_a_character_that_the_vocabulary_lacks_is_refused():
    with pytest.raises(UserError, match=r"'ß' \(U\+00DF\) in 'the ß' does not come"):
        exported(CHAR).encode("the ß")


def test_a_new_model_gets_no_token_before_its_texts(tmp_path):
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 300)]
    )
    write_folder(tmp_path, made.to_str(), {})
    assert HFTokenizer(made.to_str()).start_ids == (300,)
    tokenizer = make_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.start_ids == ()
    assert tokenizer.encode("the cat").tolist() == OWN.encode("the cat").tolist()


def write_folder(folder, content, settings):
    (folder / "tokenizer.json").write_text(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("eos", ["<|end|>", {"content": "<|end|>"}, None, "<|other|>", 7])
def test_a_folder_with_a_tokenizer_is_one(eos, tmp_path):
    write_folder(tmp_path, to_hf_tokenizer(OWN), {"eos_token": eos})
    tokenizer = make_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.vocab_size == OWN.vocab_size
    named = eos not in (None, "<|other|>", 7)
    assert tokenizer.end_ids == ((300,) if named else ())
    (tmp_path / "tokenizer_config.json").unlink()
    assert make_tokenizer(f"hf:{tmp_path}").end_ids == ()


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ("{", {}, r"tokenizer\.json cannot be read"),
        ("[" * 200_000, {}, r"tokenizer\.json cannot be read"),
        ("[]", {}, r"tokenizer\.json cannot be used: A tokenizer.json is a JSON object"),
        ('{"model": {}}', {}, r"tokenizer\.json cannot be used"),
        (to_hf_tokenizer(OWN), [], "Expected `object`, got `array`"),
        (to_hf_tokenizer(OWN), {"add_prefix_space": True}, "gptlite reads the second"),
    ],
)
def test_a_folder_with_no_proper_tokenizer_is_refused(content, settings, words, tmp_path):
    write_folder(tmp_path, content, settings)
    with pytest.raises(UserError, match=words):
        make_tokenizer(f"hf:{tmp_path}")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        make_tokenizer(f"hf:{tmp_path}")
    with pytest.raises(UserError, match="is no folder, and no name"):
        make_tokenizer(f"hf:{tmp_path}/none/at/all")


# -- laws ----------------------------------------------------------------------------------------


def changed(tokenizer: Tokenizer, **parts: object) -> str:
    """A tokenizer.json with other parts."""
    return json.dumps(json.loads(to_hf_tokenizer(tokenizer)) | parts)


def word_level(**parts: object) -> str:
    """A tokenizer.json of three words."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2}, "unk_token": "<unk>"}
    return json.dumps(
        json.loads(to_hf_tokenizer(CHAR)) | {"model": model, "added_tokens": []} | parts
    )


PREPEND = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


def as_llama2(**parts: object) -> str:
    """As that of Llama 2, which begins each text with a space."""
    record = json.loads(sentencepiece().to_json()["tokenizer"])
    record["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return json.dumps(record | parts)


TOKENIZERS = {
    "char": CHAR,
    "byte": ByteTokenizer(),
    "tiktoken": OWN,
    "as llama 2": HFTokenizer(as_llama2(normalizer=PREPEND)),
    "metaspace": HFTokenizer(as_llama2(normalizer=None, pre_tokenizer=METASPACE)),
    "no bytes": HFTokenizer(changed(CHAR)),
    "words": HFTokenizer(word_level()),
    **{
        kind: HFTokenizer(changed(OWN, normalizer={"type": kind}))
        for kind in ("NFC", "NFD", "NFKC", "Lowercase")
    },
    "added space": HFTokenizer(
        changed(
            OWN, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        )
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text() | st.text(alphabet=" \nabAé\u0301ﬁ▁🙂") | st.sampled_from(["a", " a", "", "▁"]))
def test_a_text_comes_back_from_its_ids_or_is_refused(name, text):
    tokenizer = TOKENIZERS[name]
    try:
        ids = tokenizer.encode(text)
    except UserError:
        return
    assert tokenizer.decode(ids) == text
    assert n_bytes(tokenizer, ids) == len(text.encode())


@pytest.mark.parametrize("name", ["as llama 2", "metaspace"])
def test_a_space_that_is_added_is_no_part_of_the_text(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the cat")
    assert (tokenizer.adds_space, tokenizer.token_bytes(int(ids[0]))[:1]) == (True, b" ")
    assert (tokenizer.decode(ids), n_bytes(tokenizer, ids)) == ("the cat", 7)


@pytest.mark.parametrize("name", ["as llama 2", "metaspace"])
@pytest.mark.parametrize("is_prompt", [True, False])
def test_a_space_that_is_added_has_no_place_in_what_is_generated(name, is_prompt):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("the cat").tolist()
    places = [len(tokenizer.decode(np.array(ids[:i], np.int32))) for i in range(len(ids))]
    zeros = np.zeros((len(ids), 1))
    scores = TextScores(zeros[:, 0], zeros, zeros.astype(int))
    pieces: list[Piece] = []
    text = ServedText(
        ids if is_prompt else [],
        tokenizer,
        sampling=SamplingConfig(),
        max_new_tokens=len(ids),
        n_best=0,
        echo="the cat" if is_prompt else None,
        deliver=pieces.append,
    )
    text.prompt_read(scores if is_prompt else None)
    if is_prompt:
        assert [token.offset for token in pieces[0].tokens] == places
        places = [7 + len(" the cat"[:i]) for i in map(len, _begun(tokenizer, ids))]
    text.ids += ids
    text.add(ids, scores)
    whole = "".join(piece.text for piece in pieces)
    assert whole == ("the cat the cat" if is_prompt else "the cat")
    assert [token.offset for token in pieces[-1].tokens] == places


def _begun(tokenizer: HFTokenizer, ids: list[int]) -> list[bytes]:
    """The bytes before each id."""
    return [b"".join(map(tokenizer.token_bytes, ids[:i])) for i in range(len(ids))]


def test_a_document_that_begins_the_validation_text_has_its_own_bytes(tmp_path):
    """Behind the end of another one, which nothing predicts."""
    tokenizer, found = TOKENIZERS["as llama 2"], 0
    for n in range(20, 90):
        texts = ["c" * n, "the cat"]
        split = split_corpus(documents(texts), tokenizer, folder=tmp_path)
        if split.validation[0] == tokenizer.encode("\n")[-1] and len(split.validation) > 1:
            assert split.validation_bytes == len("the cat")
            found += 1
    assert found


@pytest.mark.parametrize("n", [5, 40])
def test_no_space_is_added_between_documents(n, tmp_path):
    texts = [f"the miller counts {i}" for i in range(n)]
    splits = [
        split_corpus(documents(texts), tokenizer, folder=tmp_path)
        for tokenizer in (ByteTokenizer(), TOKENIZERS["as llama 2"])
    ]
    # The first id is not predicted: a letter of bytes, a space that was added.
    assert splits[0].validation_bytes + 1 == splits[1].validation_bytes
    ids = np.concatenate([splits[1].train, splits[1].validation])
    parts = TOKENIZERS["as llama 2"].decode(ids).split("\n")
    assert sorted(part.lstrip() for part in parts[:-1]) == sorted(texts)
    assert not any(part.endswith(" ") for part in parts)


def test_a_library_that_would_lose_a_character_silently_is_not_believed(tmp_path):
    """A byte-level encoding that was trained without all bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(["nave caf, "] * 9, tokenizers.trainers.BpeTrainer(vocab_size=300))
    write_folder(tmp_path, made.to_str(), {})
    tokenizer = make_tokenizer(f"hf:{tmp_path}")
    assert tokenizer.decode(tokenizer.encode("nave caf, ")) == "nave caf, "
    with pytest.raises(UserError, match=r"'ï' \(U\+00EF\) in 'naïve café, 3'"):
        tokenizer.encode("naïve café, 3")


@pytest.mark.parametrize(
    "model",
    [
        {"vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 10**9},  # WordPiece's
        {"vocab": [["a", 0.0]], "unk_id": None},  # Unigram's
        {"vocab": {"a": 0}, "merges": [["a", "b", "c"]]},
    ],
    ids=str,
)
def test_a_model_without_a_type_is_read_as_bpe_alone(model):
    """The library would try one after another, and find another one."""
    with pytest.raises(ValueError, match=r"cannot be read|vocab"):
        HFTokenizer(json.dumps({"version": "1.0", "model": model, "decoder": {"type": "Fuse"}}))
    record = json.loads(to_hf_tokenizer(OWN))
    del record["model"]["type"]  # as in files of 2020
    assert HFTokenizer(json.dumps(record)).encode("the").tolist() == OWN.encode("the").tolist()


def test_a_text_has_the_same_ids_each_time():
    record = json.loads(to_hf_tokenizer(OWN))
    record["model"]["dropout"] = 0.5
    tokenizer = HFTokenizer(json.dumps(record))
    for _ in range(20):
        assert (
            tokenizer.encode("the other a the").tolist() == OWN.encode("the other a the").tolist()
        )
    assert json.loads(tokenizer.to_json()["tokenizer"])["model"]["dropout"] is None


@pytest.mark.parametrize(
    ("settings", "named", "found"),
    [
        ({}, {"eos_token": "<|end|>"}, (256,)),
        ({}, {"eos_token": {"content": "<|end|>"}}, (256,)),
        ({"eos_token": None}, {"eos_token": "<|end|>"}, ()),
        ({"tokenizer_class": "GPT2Tokenizer"}, {}, (257,)),
        ({"tokenizer_class": "GPT2TokenizerFast"}, {}, (257,)),
        ({"tokenizer_class": "LlamaTokenizer"}, {}, ()),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}, ()),
        ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "a"}, {}, (97,)),
    ],
)
def test_the_end_of_a_text_is_found_where_transformers_finds_it(settings, named, found, tmp_path):
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(ByteTokenizer()))
    made.add_special_tokens(["<|end|>", "<|endoftext|>"])
    write_folder(tmp_path, made.to_str(), settings)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    assert make_tokenizer(f"hf:{tmp_path}").end_ids == found
    assert "special_tokens_map.json" in FILES  # so it is on the hub


@pytest.mark.parametrize(
    ("settings", "kind", "found"),
    [({}, "gpt2", (257,)), ({}, "gpt_neox", (257,)), ({}, "mamba", ()), ({}, "qwen2", (257,))],
)
def test_the_type_of_a_model_tells_the_end_of_a_text_where_nothing_else_does(
    settings, kind, found, tmp_path
):
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(ByteTokenizer()))
    made.add_special_tokens(["<|end|>", "<|endoftext|>"])
    write_folder(tmp_path, made.to_str(), settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert make_tokenizer(f"hf:{tmp_path}").end_ids == found
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert make_tokenizer(f"hf:{tmp_path}").end_ids == ()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["[]", "{", None])
def test_settings_that_cannot_be_read_are_named(name, content, tmp_path):
    write_folder(tmp_path, to_hf_tokenizer(ByteTokenizer()), {})
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path / name} cannot be read"):
        make_tokenizer(f"hf:{tmp_path}")


def template(single: list[dict], **special: dict) -> dict:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


def test_what_stands_before_a_text_is_found_where_something_stands_behind_it():
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(ByteTokenizer()))
    made.add_special_tokens(["<s>", "</s>"])
    start, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    assert HFTokenizer(made.to_str()).start_ids == (start,)


def test_a_token_for_padding_may_be_one_that_the_model_lacks():
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(ByteTokenizer()))
    made.add_special_tokens(["<pad>"])
    assert made.token_to_id("<pad>") == 256
    tokenizer = HFTokenizer(made.to_str(), 256)
    assert tokenizer.vocab_size == 256
    assert tokenizer.encode("<pad> the").tolist() == ByteTokenizer().encode("<pad> the").tolist()
    made.add_tokens(["the cat"])  # one that a text may have
    with pytest.raises(UserError, match="The model has no row for the id"):
        HFTokenizer(made.to_str(), 256).encode("the cat")


# -- strangers -----------------------------------------------------------------------------------

SLOW = {"Regex": r"(?:.{0,200}){3}(?![\s\S])"}


def replaced(pattern: str, content: str) -> dict:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def many(name: str, step: dict, times: int) -> dict:
    return {name: {"type": "Sequence", f"{name.replace('_', '')}s": [step] * times}}


BPE = {"type": "BPE", "vocab": {"a": 0, "##b": 1}, "merges": []}
MANY_IDS = {"id": "x", "ids": [0] * 33, "tokens": ["a"] * 33}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pre_tokenizer": {"type": "Split", "pattern": SLOW}}, "pre_tok"),
        ({"normalizer": {"type": "Replace", "pattern": SLOW, "content": ""}}, "normalizer"),
        ({"normalizer": replaced("a", "a" * 2000)}, "2,000 characters of one"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "aaaa")] * 4}},
            "256 characters of one",
        ),
        ({"normalizer": replaced("", "a")}, "normalizer"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "'Precompiled'"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 101}}, "at most 100 characters"),
        ({"normalizer": {"type": "Sequence", "normalizers": 3}}, "sequence without steps"),
        ({"pre_tokenizer": {"type": "Metaspace", "replacement": 3}}, "at most 100 characters"),
        ({"post_processor": {"type": "Other"}}, "'Other'"),
        ({"model": {"type": "Other"}}, "'Other'"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "'WordPiece'"),
        (
            {"model": {"type": "Unigram", "vocab": [["a" * 129, 0.0]]}},
            "in characters is 129: at most 128",
        ),
        (
            {"model": {"type": "Unigram", "vocab": [["a" * 128, 0.0]] * (2**15 + 1)}},
            "in characters is 4,194,432: at most 4,194,304",
        ),
        (
            {"model": BPE | {"vocab": {str(i): i for i in range(2**20 + 1)}}},
            "number of tokens is 1,048,577: at most 1,048,576",
        ),
        (
            {"added_tokens": [{"id": 1, "content": "a" * 2**20}, {"id": 2, "content": "b"}]},
            "added tokens' length in characters is 1,048,577",
        ),
        ({"model": BPE | {"continuing_subword_prefix": "##"}}, "continuing_subword_prefix"),
        ({"model": BPE | {"end_of_word_suffix": "a" * 101}}, "at most 100 characters"),
        (many("decoder", replaced("a", "a" * 100), 5), "10,000,000,000 characters of one"),
        (many("pre_tokenizer", {"type": "ByteLevel"}, 2), "of the kind ByteLevel is 2: at most 1"),
        (many("pre_tokenizer", {"type": "Metaspace"}, 2), "of the kind Metaspace is 2: at most 1"),
        (
            {
                "normalizer": {"type": "NFKC"},
                "added_tokens": [{"id": 1, "content": "a" * 2**16, "normalized": True}],
            },
            "added tokens' length in characters is 1,179,648",
        ),
        (
            {"decoder": replaced("a", "é" * 32)}
            | {"model": BPE | {"vocab": {"a" * 1000 + str(i): i for i in range(1100)}}},
            "bytes in all tokens so far: at most",
        ),
        (many("normalizer", {"type": "NFC"}, 10_000), "normalizer has 10,000 steps"),
        (many("pre_tokenizer", {"type": "Whitespace"}, 65), "pre_tokenizer has 65 steps"),
        (
            {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 65}},
            "post_processor has 65 steps",
        ),
        (many("decoder", {"type": "Fuse"}, 65), "decoder has 65 steps"),
        ({"model": BPE | {"vocab": {"a" * 2**17: 0}}}, "a token of 131,072 bytes"),
        (
            {"post_processor": template([{"SpecialToken": {"id": "x", "type_id": 0}}], x=MANY_IDS)},
            "33 ids around a text",
        ),
        (  # here, too
            {"post_processor": template([{"Sequence": {"id": "B", "type_id": 0}}])},
            "post_processor",
        ),
        ({"added_tokens": [{"id": 4294967294, "content": "x"}]}, "cannot be read"),
        (  # the library would panic
            {"post_processor": template([{"SpecialToken": {"id": "<x>", "type_id": 0}}])},
            "post_processor",
        ),
    ],
)
def test_a_part_that_may_take_any_time_or_memory_is_refused(parts, words):
    with pytest.raises(UserError, match=words):
        HFTokenizer(changed(OWN, **parts))


@pytest.mark.parametrize(
    ("normalizer", "letter", "times"),
    [(replaced("é", "a" * 32), "é", 32), ({"type": "NFKC"}, "\ufdfa", 18)],
)
def test_a_text_that_grows_is_encoded_up_to_a_length_after_its_growth(normalizer, letter, times):
    made = HFTokenizer(changed(OWN, normalizer=normalizer))
    assert made.decode(made.encode("a" * 10**5)) == "a" * 10**5
    short, long = 2**16 // times, 2**16
    with pytest.raises(UserError, match="does not come back from its ids"):
        made.encode(letter * short)
    with pytest.raises(UserError, match=rf"makes {times * long:,} characters of the 65,536"):
        made.encode(letter * long)
    with pytest.raises(
        UserError, match=rf"makes {times * 2**20 + 100_010:,} characters of the 1,1"
    ):
        made.encode("a" * 10 + letter * 2**20 + "a" * 10**5)


def test_a_token_without_a_text_is_not_the_end():
    model = {"type": "Unigram", "unk_id": None, "vocab": [["", -1.0], ["a", -2.0]]}
    assert HFTokenizer(changed(OWN, model=model, decoder={"type": "Fuse"}), None, "").end_ids == ()


def test_an_id_that_the_library_does_not_list_has_no_text():
    """Of two tokens with one text it lists the last, and gives the first for what is unknown."""
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["a", 0.0]]}
    tokenizer = HFTokenizer(changed(OWN, model=model, decoder={"type": "Fuse"}))
    with pytest.raises(UserError, match=r"'T' \(U\+0054\) in 'The' does not come back"):
        tokenizer.encode("The")
    assert tokenizer.token_bytes(0) == b""


def test_what_is_put_before_each_part_of_a_text_counts():
    """The library puts it behind each token that was added, too."""
    library = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    library.add_tokens([tokenizers.AddedToken("b", normalized=False)])
    library.normalizer = tokenizers.normalizers.Prepend("a" * 10)
    made = HFTokenizer(library.to_str())
    with pytest.raises(UserError, match="does not come back from its ids"):
        made.encode("ab" * 1000)
    with pytest.raises(UserError, match=r"makes 2,400,040 characters of the 200,000"):
        made.encode("ab" * 10**5)


def test_korean_may_be_normalized():
    made = HFTokenizer(changed(OWN, normalizer={"type": "NFKD"}))
    with pytest.raises(UserError, match="does not come back"):
        made.encode("한국어" * 10**5)


def test_ids_are_compared_with_the_number_of_tokens():
    record = json.loads(to_hf_tokenizer(OWN))
    record["model"]["vocab"]["zz"] = 4294967294
    with pytest.raises(UserError, match="and the id 4,294,967,294"):
        HFTokenizer(json.dumps(record))


def test_many_ids_before_a_text_are_refused():
    made = tokenizers.Tokenizer.from_str(to_hf_tokenizer(OWN))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> " * 17 + "$A", special_tokens=[("<|end|>", 300)]
    )
    with pytest.raises(UserError, match="puts 17 ids before a text"):
        HFTokenizer(made.to_str())


def test_an_error_while_a_text_is_encoded_is_told_in_a_sentence():
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    tokenizer = HFTokenizer(word_level(model=model))
    assert tokenizer.encode("a").tolist() == [0]
    with pytest.raises(UserError, match="The tokenizer cannot encode this text"):
        tokenizer.encode("b")


@pytest.mark.parametrize(
    "pattern", [*sorted(KNOWN_SPLITS), r"\d", r"\p{N}{1,3}", "[一-龥]+", r" ?[^(\s|)]+"]
)
def test_known_patterns_are_accepted(pattern):
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = [
        split,
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False},
    ]
    record = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    text = "It's 12,345 naïve 中文 \n\n  x"
    tokenizer = HFTokenizer(changed(OWN, **record))
    assert tokenizer.decode(tokenizer.encode(text)) == text
