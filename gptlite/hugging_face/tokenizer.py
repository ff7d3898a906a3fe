"""Tokenizers in the format of Hugging Face's `tokenizers`: read, and written for others."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Array, Integer

from gptlite.errors import UserError, require, told
from gptlite.hugging_face.components import (
    KNOWN_SPLITS,
    MAX_START,
    SPLITS,
    check_components,
    decoders,
    normalizer_growth,
    normalizers,
    pre_tokenizers,
)
from gptlite.machine.characters import character_at, utf8
from gptlite.machine.files import behind_links, read_bounded
from gptlite.machine.records import read_record
from gptlite.text.tokenizer import (
    BETWEEN_WORDS,
    END_OF_TEXT,
    MAX_TOKENIZER,
    ByteTokenizer,
    CharTokenizer,
    Decoding,
    Ids,
    TiktokenTokenizer,
    Tokenizer,
    as_ids,
)

# Tokens that end a text, where only the class of a tokenizer says it: the defaults of the classes
# in `transformers`, without `Tokenizer` and `TokenizerFast` at their ends.
CLASS_ENDS = {
    **dict.fromkeys(("GPT2", "GPTNeoX", "CodeGen", "Qwen2"), END_OF_TEXT),
    **dict.fromkeys(("Llama", "CodeLlama", "Bloom"), "</s>"),
    "Gemma": "<eos>",
}
# Where no file names the class, that of a model's type. (Of `llama`, it has none.)
TYPE_CLASSES = {
    **dict.fromkeys(("gpt2", "codegen", "phi", "starcoder2", "opt"), "GPT2"),
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen2"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "Gemma"),
    "gpt_neox": "GPTNeoX",
}
# Bytes of a token (those of models have some hundreds), and of all together (Gemma's: 2 million).
MAX_TOKEN, MAX_TOKENS = 2**16, 2**26
# Characters that are encoded at once, also after the normalizer. The library needs 160 bytes for
# each, and 300 where it splits the text at each.
MAX_WHOLE = 2**24
# How many times as long a text may become by the normalizer. (Korean becomes three times as long.)
# A short one costs little.
MAX_GROWN, SHORT = 4, 2**16


class HFTokenizer(Decoding):
    """A tokenizer of Hugging Face. A special token's text is encoded as plain text."""

    def __init__(
        self, content: str, vocab_size: int | None = None, end_ids: Sequence[Any] | str = ()
    ):
        """`content`: of its `tokenizer.json`. `vocab_size`: of the model, which may have more.
        None: as many as the tokenizer has. `end_ids`: ids that say that a text ends, or the text
        of the token that does.

        **Raises:** `ValueError` if it is no tokenizer, `UserError` if it has a part that gptlite
        does not know.
        """
        record = json.loads(content)
        check_components(record)
        model = record["model"]
        # Without a type, the library would try one model after another. With dropout, a text would
        # have other ids each time.
        changes = {} if "type" in model else {"type": "BPE"}
        changes |= {"dropout": None} if model.get("dropout") else {}
        if changes:
            model |= changes
            content = json.dumps(record, ensure_ascii=False)
        self._content = content
        self.library = library_tokenizer(content)
        self.library.encode_special_tokens = True
        ids = self.library.get_vocab(with_added_tokens=True)
        last = max(ids.values(), default=0)
        # Each id below the largest one gets a row of the embedding.
        require(
            last < 2 * len(ids) + 64, f"The tokenizer has {len(ids):,} tokens, and the id {last:,}."
        )
        self._bytes = _bytes_of_tokens(ids, decoders(record))
        self._vocab_size = last + 1 if vocab_size is None else vocab_size
        # A model may have no row for a token that was added later, such as one for padding.
        n_trained = len(self.library.get_vocab(with_added_tokens=False))
        beyond = sorted(i for i in ids.values() if i >= self._vocab_size)
        added = {token.get("id") for token in record.get("added_tokens") or ()}
        if not added.issuperset(beyond) or n_trained > self._vocab_size:
            raise ValueError(f"it has the id {last}, and the model {self._vocab_size} rows")
        if isinstance(end_ids, str):
            named = end_ids or None  # a token may be empty
            end_ids = [i for token, i in ids.items() if token == named and i < self._vocab_size]
        if not all(type(i) is int and 0 <= i < self._vocab_size for i in end_ids):
            raise ValueError(f"its end_ids must be ids, got {str(end_ids)[:100]}")
        self._end_ids = tuple(dict.fromkeys(end_ids))
        self._cuts_between_words = _splits_at_words(record)
        self._growth, self._split_at = normalizer_growth(record), 0
        if any(step["type"] == "Prepend" for step in normalizers(record)):
            # What is put before a text is also put behind each of these tokens.
            tokens = [x for x in record.get("added_tokens") or () if not x.get("normalized")]
            lengths = [len(x["content"]) for x in tokens if x["content"] and not x.get("special")]
            self._split_at = min(lengths, default=0)
        prefixes = {step.get("add_prefix_space") for step in _byte_level_steps(record)}
        self.is_without_prefix_space = prefixes == {False}
        self._find_prefix()

    def _find_prefix(self) -> None:
        """What the tokenizer puts before every text: a space, ids."""
        self._start_ids: tuple[int, ...] = ()
        self._adds_space = False
        # A letter that it knows, in tokenizers of characters.
        letter = next((x for x in ("a", *map(self._text, self._bytes)) if self._knows(x)), None)
        if letter is None:
            return
        bare, whole = (self._ids(letter, with_special=x) for x in (False, True))
        self._adds_space = self._joined(bare) == b" " + letter.encode()
        # Llama 3 puts <|begin_of_text|> there. Others put an id behind, too.
        places = range(len(whole) - len(bare) + 1)
        place = next((i for i in places if whole[i : i + len(bare)] == bare), 0)
        require(
            place <= MAX_START,
            f"The tokenizer puts {place:,} ids before a text: at most {MAX_START} are allowed.",
        )
        self._start_ids = tuple(whole[:place])
        fit = all(i < self._vocab_size for i in self._start_ids)
        require(fit, f"The tokenizer puts ids before a text that the model lacks: {whole[:place]}.")

    def _text(self, token: int) -> str:
        return self._bytes[token].decode("utf-8", errors="ignore")

    def _knows(self, letter: str) -> bool:
        """Whether a letter comes back from its ids."""
        if len(letter) != 1 or not letter.isalnum():
            return False
        return self._joined(self._ids(letter)) in (letter.encode(), b" " + letter.encode())

    def _ids(self, text: str, *, with_special: bool = False) -> list[int]:
        with told("The tokenizer cannot encode this text"):
            return library_ids(self.library, text, with_special=with_special)

    def _joined(self, ids: Sequence[int]) -> bytes:
        # The library may give an id that it does not list: of two tokens with one text, the first.
        return b"".join(map(self.token_bytes, ids))

    @property
    def start_ids(self) -> tuple[int, ...]:
        return self._start_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids

    @property
    def adds_space(self) -> bool:
        return self._adds_space

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    padded_vocab_size = vocab_size

    def _check_length(self, text: str) -> None:
        require(
            self._cuts_between_words or len(text) <= MAX_WHOLE,
            f"This tokenizer takes a text only as a whole, which for more than {MAX_WHOLE:,} "
            "characters needs too much memory: give a shorter text, or another tokenizer.",
        )

    def _check_growth(self, text: str) -> None:
        most = min(MAX_WHOLE, MAX_GROWN * len(text) + SHORT)
        if self._growth * len(text) <= most or self.library.normalizer is None:
            return
        pieces = (text[i : i + SHORT] for i in range(0, len(text), SHORT))
        normalized = self.library.normalizer.normalize_str
        grown = sum(len(normalized(piece)) for piece in pieces)
        if self._split_at:
            grown += len(text) // self._split_at * len(normalized("a"))
        require(
            grown <= most,
            f"The tokenizer makes {grown:,} characters of the {len(text):,} of this text, which "
            "needs too much memory.",
        )

    def encode(self, text: str) -> Ids:
        self._check_length(text)
        self._check_growth(text)
        content = utf8(text)
        ids = self._ids(text)
        found = self._joined(ids)
        found = found.removeprefix(b" ") if self._adds_space else found
        if found != content:
            raise UserError(_lost(text, found))
        last = max(ids, default=0)
        require(last < self._vocab_size, f"The model has no row for the id {last} of this text.")
        return as_ids(ids)

    def decode(self, ids: Integer[Array | np.ndarray, " tokens"]) -> str:
        text = super().decode(ids)
        return text.removeprefix(" ") if self._adds_space else text

    def boundary(self, text: str) -> int:
        if not self._cuts_between_words:
            self._check_length(text)  # before all of it is in memory
            return 0
        ends = [match.end() for match in BETWEEN_WORDS.finditer(text, max(0, len(text) - 10_000))]
        return ends[-1] if ends else len(text) if len(text) > 2**23 else 0

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")  # rows of the model without a token

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "hf",
            "tokenizer": self._content,
            "vocab_size": self._vocab_size,
            "end_ids": list(self._end_ids),
        }


def library_ids(library: tokenizers.Tokenizer, text: str, *, with_special: bool) -> list[int]:
    """The ids of a text. (`encode` of the library takes four times as long, for places in the text
    that nobody asks for, and lets no other thread run.)"""
    return library.encode_batch_fast([text], add_special_tokens=with_special)[0].ids


def library_tokenizer(content: str) -> tokenizers.Tokenizer:
    """The tokenizer in `content`, which `check_components` has checked.

    **Raises:** `UserError` if it cannot be read.
    """
    with told("The tokenizer cannot be read"):
        made = tokenizers.Tokenizer.from_str(content)
    made.no_truncation()
    made.no_padding()
    return made


def _lost(text: str, found: bytes) -> str:
    """Which character of `text` did not come back."""
    content = text.encode()
    pairs = enumerate(zip(content, found, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(content), len(found)))
    place = len(content[:same].decode("utf-8", errors="ignore"))
    if place >= len(text):
        return f"The tokenizer adds {found[same:][:100]!r} to the end of the text."
    return (
        f"{character_at(text, place)} does not come back from its ids: it is not in the "
        "vocabulary, or the tokenizer changes it (as by another Unicode normalization)."
    )


def read_hf_tokenizer(
    folder: Path,
    vocab_size: int | None = None,
    end_ids: Sequence[int] | None = None,
    *,
    for_training: bool = False,
) -> HFTokenizer:
    """The tokenizer in a folder in Hugging Face's format.

    **Arguments:**

    - `vocab_size`: of a model. Default: that of the tokenizer.
    - `end_ids`: ids that say that a generated text ends. Default: the `eos_token`, where
      `transformers` finds it: in `tokenizer_config.json`, in `special_tokens_map.json`, or the one
      that the `tokenizer_class` has, there or in `config.json`, or the class for a model's type.
    - `for_training`: whether a new model will be trained, which never sees what the tokenizer puts
      before a text. It is left out.

    **Raises:** `UserError` if a file cannot be read, or has what gptlite does not have.
    """
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    fields, named, model = (
        read_fields(file) if os.path.lexists(file) else {}
        for file in (settings, folder / "special_tokens_map.json", folder / "config.json")
    )
    try:
        content = read_bounded(behind_links(path), MAX_TOKENIZER).decode("utf-8")
        record = json.loads(content)
        check_components(record)
        if for_training:
            record["post_processor"] = None
            content = json.dumps(record, ensure_ascii=False)
        ends = _eos(fields, named, model) if end_ids is None else end_ids
        tokenizer = HFTokenizer(content, vocab_size, ends)
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    require(
        not (fields.get("add_prefix_space") is True and tokenizer.is_without_prefix_space),
        f"add_prefix_space is true in {settings} and false in {path}: gptlite reads the second.",
    )
    return tokenizer


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of an object in JSON.

    **Raises:** `UserError` if there is none.
    """
    try:
        return read_record(behind_links(path), dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _eos(settings: Mapping[str, Any], named: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The text of the token that ends a text; empty if nothing names one."""
    of_model = TYPE_CLASSES.get(str(model.get("model_type")))
    kind = str(settings.get("tokenizer_class") or model.get("tokenizer_class") or of_model)
    kind = kind.removesuffix("Fast").removesuffix("Tokenizer")
    eos = settings.get("eos_token", named.get("eos_token", CLASS_ENDS.get(kind)))
    name = eos.get("content") if isinstance(eos, dict) else eos
    return name if isinstance(name, str) else ""


def _bytes_of_tokens(
    ids: Mapping[str, int], steps: Sequence[Mapping[str, Any]]
) -> dict[int, bytes]:
    """The bytes of each id.

    **Raises:** `UserError` if one has too many, or all together, or a step is not known.
    """
    to_bytes, found, total = _bytes_of(steps), {}, 0
    for token, i in ids.items():
        size = len(token)
        if size <= MAX_TOKEN:  # else its bytes, which may be more, are not made
            found[i] = to_bytes(token)
            size = max(size, len(found[i]))
        total += size
        require(
            size <= MAX_TOKEN and total <= MAX_TOKENS,
            f"The tokenizer has a token of {size:,} bytes, {token[:20]!r}, and {total:,} bytes in "
            f"all tokens so far: at most {MAX_TOKEN:,} and {MAX_TOKENS:,} are allowed.",
        )
    return found


def _bytes_of(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """From a token to its UTF-8 bytes, by the steps of the decoder.

    **Raises:** `UserError` if they are others than gptlite knows.
    """
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        table = {character: byte for byte, character in BYTE_CHARACTERS.items()}

        def from_characters(token: str) -> bytes:
            known = all(character in table for character in token)
            return bytes(table[x] for x in token) if known else token.encode()

        return from_characters
    require(
        bool(kinds) and "ByteLevel" not in kinds,
        f"The tokenizer's decoder has the steps {kinds}: gptlite knows ByteLevel, Metaspace, Fuse, "
        "and sequences of Replace, ByteFallback, Fuse and Strip.",
    )
    replaced = [
        (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
    ] + [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    fallback = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(token: str) -> bytes:
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


def _splits_at_words(record: Mapping[str, Any]) -> bool:
    """Whether every text is split between words, so that it may be cut there."""
    # (Between a letter and a space, or a line's end and a letter, NFC changes nothing.)
    if (record.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:
        return False
    for token in record.get("added_tokens") or ():
        spaces = token["content"] != "".join(token["content"].split())
        around = any(token.get(name) for name in ("lstrip", "rstrip", "single_word"))
        if not token.get("special") and (spaces or around):
            return False  # it may lie across a cut
    steps = pre_tokenizers(record)
    return any(
        (step.get("type") == "ByteLevel" and step.get("use_regex", True))
        or (step.get("type") == "Split" and step.get("pattern", {}).get("Regex") in KNOWN_SPLITS)
        for step in steps
    ) and not any(step.get("add_prefix_space") for step in steps)


def _byte_level_steps(record: Mapping[str, Any]) -> list[Any]:
    return [step for step in pre_tokenizers(record) if step.get("type") == "ByteLevel"]


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte (Radford et al., 2019, `bytes_to_unicode`)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }


BYTE_CHARACTERS = _byte_characters()


def to_hf_tokenizer(tokenizer: Tokenizer) -> str:
    """The content of a `tokenizer.json` that encodes and decodes as `tokenizer` does."""
    match tokenizer:
        case HFTokenizer():
            return tokenizer.to_json()["tokenizer"]
        case CharTokenizer():
            vocabulary = {character: i for i, character in enumerate(tokenizer.characters)}
            made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
            made.decoder = tokenizers.decoders.Fuse()
        case ByteTokenizer():
            vocabulary = {character: byte for byte, character in BYTE_CHARACTERS.items()}
            made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
            made.pre_tokenizer = byte_level()
            made.decoder = tokenizers.decoders.ByteLevel()
        case TiktokenTokenizer():
            made = _from_tiktoken(tokenizer)
        case _:
            raise UserError(f"{type(tokenizer).__name__} cannot be written for others.")
    return made.to_str(pretty=True)


def byte_level() -> Any:
    """The pre-tokenizer that brings a text into `BYTE_CHARACTERS`, and splits nothing."""
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> tokenizers.Tokenizer:
    encoding = tokenizer.encoding
    ranks = encoding._mergeable_ranks

    def shown(token: bytes) -> str:
        return "".join(BYTE_CHARACTERS[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        # Each way to put the token together, in the order in which they would be merged.
        ways = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [way for way in ways if way[0] in ranks and way[1] in ranks]
        known.sort(key=lambda way: (ranks[way[0]], ranks[way[1]]))
        merges += [(shown(left), shown(right)) for left, right in known]
    vocabulary = {shown(token): rank for token, rank in ranks.items()}
    vocabulary |= encoding._special_tokens  # so that they keep their ids
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    )
    split = tokenizers.Regex(SPLITS[encoding._pat_str])
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(split, "isolated"), byte_level()]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(
        [tokenizers.AddedToken(token, special=True) for token in encoding._special_tokens]
    )
    return made
