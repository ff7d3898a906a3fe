"""The tokenizer of a run: made as the config says, or read from the run's folder.

Those that need a library of Hugging Face's are imported when they are named: it takes time.
"""

import base64
from pathlib import Path
from typing import Any

import tiktoken

from gptlite.errors import UserError, require
from gptlite.machine.files import read_json
from gptlite.machine.names import parse_bpe
from gptlite.text.corpus import Corpus, scan
from gptlite.text.tokenizer import (
    MAX_TOKENIZER,
    ByteTokenizer,
    CharTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    check_pattern,
)


def make_tokenizer(name: str, corpus: Corpus | None = None) -> Tokenizer:
    """The tokenizer that `--data.tokenizer` names. `char` and `bpe` are made from `corpus`.

    **Raises:** `UserError` if there is none of that name, its files cannot be read or fetched, or
    it needs a corpus and none is given.
    """
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
        raise UserError(
            f"There is no tokenizer {name!r}: give `char`, `byte`, `bpe:SIZE`, `hf:FOLDER` or "
            f"`tiktoken:NAME` with NAME one of {', '.join(tiktoken.list_encoding_names())}."
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
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except OSError as error:  # requests' errors are OSErrors
        raise UserError(
            f"tiktoken could not fetch the files of {name!r} ({type(error).__name__}). It "
            "needs the network once; or set TIKTOKEN_CACHE_DIR to a folder that has them."
        ) from error


def tokenizer_from_json(record: Any) -> Tokenizer:
    """The inverse of `to_json`.

    **Raises:** `UserError` if `record` is none of ours.
    """
    try:
        match record:
            case {"kind": "char", "characters": str(characters), **rest} if not rest:
                return CharTokenizer(characters)
            case {"kind": "byte", **rest} if not rest:
                return ByteTokenizer()
            case {
                "kind": "tiktoken", "name": str(name), "pattern": str(pattern),
                "special_tokens": dict(special_tokens), "ranks": dict(ranks), **rest,
            } if not rest:  # fmt: skip
                mergeable_ranks = {base64.b64decode(t): rank for t, rank in ranks.items()}
                _check_ranks(mergeable_ranks, special_tokens)
                check_pattern(pattern)
                return TiktokenTokenizer(
                    tiktoken.Encoding(
                        name,
                        pat_str=pattern,
                        mergeable_ranks=mergeable_ranks,
                        special_tokens=special_tokens,
                    )
                )
            case {
                "kind": "hf", "tokenizer": str(content), "vocab_size": int(vocab_size),
                "end_ids": list(end_ids), **rest,
            } if not rest:  # fmt: skip
                from gptlite.hugging_face.tokenizer import HFTokenizer

                return HFTokenizer(content, vocab_size, end_ids)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"This is not a tokenizer of gptlite: {error!r}.") from error
    raise UserError(f"This is not a tokenizer of gptlite: {str(record)[:100]}.")


def _check_ranks(ranks: dict[bytes, Any], special_tokens: dict[str, Any]) -> None:
    """What tiktoken's Rust code takes for granted.

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
        return tokenizer_from_json(read_json(path / "tokenizer.json", 2 * MAX_TOKENIZER))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
