"""Tokenizers in the format of Hugging Face's `tokenizers`: read, and written for others."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from gptlite.errors import UserError, require
from gptlite.machine.files import read_bounded
from gptlite.machine.records import read_record
from gptlite.text.tokenizer import (
    BETWEEN_WORDS,
    MAX_TOKENIZER,
    PATTERNS,
    ByteTokenizer,
    CharTokenizer,
    Decoding,
    Ids,
    TiktokenTokenizer,
    Tokenizer,
    as_ids,
)

# Characters that are encoded at once. The library needs 170 bytes for each.
MAX_WHOLE = 2**24


class HFTokenizer(Decoding):
    """A tokenizer of Hugging Face. A special token's text is encoded as plain text."""

    def __init__(self, content: str, vocab_size: int | None = None, end_ids: Sequence[Any] = ()):
        """`content`: of its `tokenizer.json`. `vocab_size`: of the model, which may have more.
        None: as many as the tokenizer has.

        **Raises:** `ValueError` if it is no tokenizer, `UserError` if the bytes of its tokens are
        not known.
        """
        record = json.loads(content)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # `tokenizers` raises no other
            raise ValueError(f"it cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._content = content
        self._cuts_between_words = _splits_at_words(record)
        prefixes = {step.get("add_prefix_space") for step in _byte_level_steps(record)}
        self.is_without_prefix_space = prefixes == {False}
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        to_bytes = _bytes_of(record.get("decoder"))
        self._bytes = {i: to_bytes(token) for token, i in ids.items()}
        last = max(ids.values(), default=0)
        vocab_size = last + 1 if vocab_size is None else vocab_size
        if last >= vocab_size:
            raise ValueError(f"it has the id {last}, and the model {vocab_size} rows")
        if not all(type(i) is int and 0 <= i < vocab_size for i in end_ids):
            raise ValueError(f"its end_ids must be ids, got {str(end_ids)[:100]}")
        self._vocab_size, self._end_ids = vocab_size, tuple(end_ids)
        # Tokens that it puts before every text, such as Llama 3's <|begin_of_text|>.
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=x).ids for x in (False, True))
        self._start_ids = tuple(whole[: len(whole) - len(bare)]) if _ends(whole, bare) else ()
        # Without bytes to fall back on, unknown characters would be left out.
        only_characters = (record.get("decoder") or {}).get("type") == "Fuse"
        self._characters = frozenset("".join(ids)) if only_characters else None

    @property
    def start_ids(self) -> tuple[int, ...]:
        return self._start_ids

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids

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

    def encode(self, text: str) -> Ids:
        self._check_length(text)
        # Halves of surrogate pairs cannot be handed over.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        unknown = self._characters is not None and sorted(set(whole) - self._characters)
        if unknown:
            raise UserError(
                f"The character {unknown[0]!r} (U+{ord(unknown[0]):04X}) is not in the vocabulary."
            )
        return as_ids(self._tokenizer.encode(whole, add_special_tokens=False).ids)

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
    - `end_ids`: ids that say that a generated text ends. Default: the `eos_token` in
      `tokenizer_config.json`, if there is one.
    - `for_training`: whether a new model will be trained, which never sees what the tokenizer puts
      before a text. It is left out.

    **Raises:** `UserError` if a file cannot be read, or has what gptlite does not have.
    """
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    try:
        content = read_bounded(path.resolve(), MAX_TOKENIZER).decode("utf-8")
        fields = read_record(settings.resolve(), dict[str, Any]) if settings.exists() else {}
        record = json.loads(content)
        end_ids = _eos(fields, record) if end_ids is None else end_ids
        if for_training:
            content = json.dumps(record | {"post_processor": None}, ensure_ascii=False)
        tokenizer = HFTokenizer(content, vocab_size, end_ids)
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    require(
        not (fields.get("add_prefix_space") is True and tokenizer.is_without_prefix_space),
        f"add_prefix_space is true in {settings} and false in {path}: gptlite reads the second.",
    )
    return tokenizer


def _eos(settings: Mapping[str, Any], record: Mapping[str, Any]) -> list[int]:
    """The id of the token that ends a text; none if the settings name none."""
    eos = settings.get("eos_token")
    name = eos.get("content") if isinstance(eos, dict) else eos
    return [token["id"] for token in record.get("added_tokens") or () if token["content"] == name]


def _ends(ids: Sequence[int], end: Sequence[int]) -> bool:
    return list(ids[len(ids) - len(end) :]) == list(end)


def _bytes_of(decoder: Any) -> Callable[[str], bytes]:
    """From a token to its UTF-8 bytes.

    **Raises:** `UserError` if `decoder` is of a kind that gptlite does not know.
    """
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    steps: list[Any] = decoder["decoders"] if kind == "Sequence" else [decoder]
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if kinds == ["ByteLevel"]:
        table = {character: byte for byte, character in BYTE_CHARACTERS.items()}

        def from_characters(token: str) -> bytes:
            known = all(character in table for character in token)
            return bytes(table[x] for x in token) if known else token.encode()

        return from_characters
    known = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
    is_plain = all("String" in s["pattern"] for s in steps if s and s.get("type") == "Replace")
    require(
        is_plain and set(kinds) <= set(known),
        f"The tokenizer's decoder is {str(decoder)[:200]}: gptlite knows ByteLevel, Metaspace, "
        "Fuse, and sequences of Replace, ByteFallback, Fuse and Strip.",
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
    steps = _pre_tokenizers(record)
    return any(
        (step.get("type") == "ByteLevel" and step.get("use_regex", True))
        or (step.get("type") == "Split" and step.get("pattern", {}).get("Regex") in KNOWN_SPLITS)
        for step in steps
    ) and not any(step.get("add_prefix_space") for step in steps)


def _pre_tokenizers(record: Mapping[str, Any]) -> list[Any]:
    first = record.get("pre_tokenizer")
    return first.get("pretokenizers", [first]) if isinstance(first, dict) else []


def _byte_level_steps(record: Mapping[str, Any]) -> list[Any]:
    return [step for step in _pre_tokenizers(record) if step.get("type") == "ByteLevel"]


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte (Radford et al., 2019, `bytes_to_unicode`)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + place) for place, byte in enumerate(hidden)
    }


BYTE_CHARACTERS = _byte_characters()
# PATTERNS without possessive quantifiers, which the other library reads differently. They only make
# the search faster.
SPLITS = {
    PATTERNS[0]: r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    PATTERNS[1]: (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s+\z|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    PATTERNS[2]: PATTERNS[2],
}
# Those of Llama 3 and of Qwen 2 differ in their numbers.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_SPLITS = {*SPLITS.values(), _LLAMA3, _LLAMA3.replace("{1,3}", "")}


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
