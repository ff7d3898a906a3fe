"""The tokenizer of a run: made as the config says, or read from the run's folder.

Those that need a library of Hugging Face's are imported when they are named: it takes time.
"""

import base64
from pathlib import Path
from typing import Any

import msgspec
import tiktoken

from gptlite.errors import UserError, require
from gptlite.machine.characters import scan
from gptlite.machine.names import parse_bpe
from gptlite.machine.records import read_record
from gptlite.text.corpus import Corpus, text_corpus
from gptlite.text.tokenizer import (
    MAX_TOKENIZER,
    ByteTokenizer,
    CharTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    check_pattern,
)


def make_tokenizer(name: str, corpus: Corpus | str | None = None) -> Tokenizer:
    """The tokenizer that `--data.tokenizer` names.

    **Arguments:**

    - `name`: `char`, `byte`, `bpe:SIZE`, `tiktoken:NAME`, `hf:FOLDER` or `hf:NAME`: see
      `DataConfig.tokenizer`.
    - `corpus`: what `char` and `bpe` are made from. It may be a text.

    **Raises:** `UserError` if there is none of that name, its files cannot be read or fetched, or
    it needs a corpus and none is given.
    """
    if isinstance(corpus, str):
        corpus = text_corpus(corpus)
    kind, _, rest = name.partition(":")
    if name == "byte":
        return ByteTokenizer()
    if kind == "hf" and rest:
        from gptlite.hugging_face.hub import find_folder
        from gptlite.hugging_face.tokenizer import read_hf_tokenizer

        return read_hf_tokenizer(find_folder(rest), for_training=True)
    if kind == "tiktoken" and rest in tiktoken.list_encoding_names():
        return _fetch_tiktoken(rest)
    if name != "char" and kind != "bpe":
        encodings = ", ".join(tiktoken.list_encoding_names())  # which takes time
        raise UserError(
            f"There is no tokenizer {name!r}: give `char`, `byte`, `bpe:SIZE`, `hf:FOLDER` or "
            f"`tiktoken:NAME` with NAME one of {encodings}."
        )
    size = parse_bpe(name) if kind == "bpe" else 0
    require(corpus is not None, f"The tokenizer {name} is made from a text: give a corpus.")
    assert corpus is not None
    if name == "char":
        return CharTokenizer(corpus.alphabet or _alphabet(corpus))
    from gptlite.hugging_face.bpe import train_bpe

    return train_bpe(corpus, size)


def _alphabet(documents: Corpus) -> str:
    """The distinct characters of a dataset, and the end of a line, which follows each document."""
    _, _, characters = scan(documents.read(None))
    return "".join(sorted({*characters, "\n"}))


def _fetch_tiktoken(name: str) -> TiktokenTokenizer:
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # of requests, or because the answer was something else
        raise UserError(
            f"tiktoken could not fetch the files of {name!r} ({type(error).__name__}). It "
            "needs the network once; or set TIKTOKEN_CACHE_DIR to a folder that has them."
        ) from error
    return TiktokenTokenizer(encoding)


class _Char(msgspec.Struct, tag_field="kind", tag="char", forbid_unknown_fields=True):
    characters: str

    def tokenizer(self) -> Tokenizer:
        return CharTokenizer(self.characters)


class _Byte(msgspec.Struct, tag_field="kind", tag="byte", forbid_unknown_fields=True):
    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()


class _Tiktoken(msgspec.Struct, tag_field="kind", tag="tiktoken", forbid_unknown_fields=True):
    name: str
    pattern: str
    special_tokens: dict[str, int]
    ranks: dict[str, int]

    def tokenizer(self) -> Tokenizer:
        mergeable_ranks = {base64.b64decode(token): rank for token, rank in self.ranks.items()}
        _check_ranks(mergeable_ranks, self.special_tokens)
        check_pattern(self.pattern)
        return TiktokenTokenizer(
            tiktoken.Encoding(
                self.name,
                pat_str=self.pattern,
                mergeable_ranks=mergeable_ranks,
                special_tokens=self.special_tokens,
            )
        )


class _HF(msgspec.Struct, tag_field="kind", tag="hf", forbid_unknown_fields=True):
    content: str = msgspec.field(name="tokenizer")
    vocab_size: int
    end_ids: list[int]

    def tokenizer(self) -> Tokenizer:
        from gptlite.hugging_face.tokenizer import HFTokenizer

        return HFTokenizer(self.content, self.vocab_size, self.end_ids)


def tokenizer_from_json(record: Any) -> Tokenizer:
    """The inverse of `to_json`.

    **Raises:** `UserError` if `record` is none of ours.
    """
    try:
        return msgspec.convert(record, _Char | _Byte | _Tiktoken | _HF).tokenizer()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"This is not a tokenizer of gptlite: {error}.") from error


def _check_ranks(ranks: dict[bytes, Any], special_tokens: dict[str, Any]) -> None:
    """Check what tiktoken's Rust code takes for granted.

    **Raises:** `ValueError`.
    """
    ids = [*ranks.values(), *special_tokens.values()]
    # A few ids may be unused. Each below the largest one gets a row of the embedding.
    most = 2 * len(ids)
    if not all(type(i) is int and 0 <= i < most for i in ids):
        raise ValueError(f"ids must be integers from 0 to {most - 1}")
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("a token for some byte is missing")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the run in the folder `path`.

    **Raises:** `UserError` if it is missing or damaged.
    """
    try:
        record = read_record(path / "tokenizer.json", dict[str, Any], 2 * MAX_TOKENIZER)
        return tokenizer_from_json(record)
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
