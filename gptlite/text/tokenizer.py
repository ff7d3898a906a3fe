"""Text to ids and back.

A tokenizer encodes text to ids, returns the bytes of an id, and says where a long text may be cut.
Its JSON holds the whole vocabulary, so a run never downloads it again.
"""

import base64
import contextlib
import functools
import re
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tiktoken
from jaxtyping import Array, Integer

from gptlite.errors import UserError, require, told
from gptlite.machine.characters import character_at, code_points, utf8

# A letter before a space and another letter; a line's end after something, before a letter.
BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])|\S\n(?=[A-Za-z])")

# How tiktoken's encodings split a text before they look up tokens: gpt2, r50k, p50k; cl100k; o200k.
# A pattern of a stranger could take any time, or end the process, or split where `boundary` cuts.
PATTERNS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# Bytes of a `tokenizer.json`. That of Llama 3 has 9 million, that of Gemma 3 33 million.
MAX_TOKENIZER = 2**26

# The token that tiktoken's encodings put between documents.
END_OF_TEXT = "<|endoftext|>"

Ids = Integer[np.ndarray, " tokens"]


@runtime_checkable
class Tokenizer(Protocol):
    """The methods that the package asks of a tokenizer."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that a model expects before a prompt."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that say that a generated text ends."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids."""
        ...

    @property
    def padded_vocab_size(self) -> int:
        """Rows that the embedding should have."""
        ...

    @property
    def adds_space(self) -> bool:
        """Whether a space that is not in a text is part of its first id, as Llama 2 has it."""
        ...

    def encode(self, text: str) -> Ids:
        """`text` as ids, from which it comes back unchanged.

        **Raises:** `UserError` if it would not: if a character is not in the vocabulary.
        """
        ...

    def decode(self, ids: Integer[Array | np.ndarray, " tokens"]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 (which a model may generate) become U+FFFD.

        **Raises:** `UserError` if one is not below `vocab_size`."""
        ...

    def boundary(self, text: str) -> int:
        """The last place found in `text` where it may be cut: the ids before it do not depend on
        what follows. 0 if there is none."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes (not always whole characters) of one id."""
        ...

    def to_json(self) -> dict[str, Any]:
        """All that `tokenizer_from_json` needs."""
        ...


def as_ids(ids: list[int]) -> Ids:
    """`ids` as an array."""
    return np.array(ids, np.int32)


@functools.lru_cache(maxsize=8)
def _byte_lengths(tokenizer: Tokenizer) -> Integer[np.ndarray, " vocab"]:
    lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    for i in tokenizer.end_ids:
        length, lengths[i] = lengths[i], 0
        with contextlib.suppress(UserError):  # a text may have it, too: as a line's end
            lengths[i] = length * (i in tokenizer.encode(tokenizer.decode(as_ids([i]))))
    return np.array(lengths)


def n_bytes(tokenizer: Tokenizer, ids: Integer[Array | np.ndarray, " tokens"]) -> int:
    """UTF-8 bytes of the text of `ids`, from its beginning. What only says that a text ends is none
    of them, nor is a space that the tokenizer adds.

    **Raises:** `UserError` if one is no id of the tokenizer."""
    ids = _known(tokenizer, ids)
    added = len(ids) > 0 and tokenizer.adds_space and tokenizer.token_bytes(int(ids[0]))[:1] == b" "
    return int(_byte_lengths(tokenizer)[ids].sum()) - added


def _known(tokenizer: Tokenizer, ids: Integer[Array | np.ndarray, " tokens"]) -> np.ndarray:
    ids, last = np.asarray(ids), tokenizer.vocab_size - 1
    for i in ids[(ids < 0) | (ids > last)][:1]:
        raise UserError(f"{i} is no id of the tokenizer, which has the ids from 0 to {last:,}.")
    return ids


class Decoding:
    """What tokenizers share that are cut anywhere, and have no id for the start of a text."""

    start_ids, adds_space = (), False

    def decode(self: Tokenizer, ids: Integer[Array | np.ndarray, " tokens"]) -> str:
        content = map(self.token_bytes, _known(self, ids).tolist())
        return b"".join(content).decode("utf-8", errors="replace")

    def boundary(self, text: str) -> int:
        return len(text)


class CharTokenizer(Decoding):
    """One id per character: the sorted distinct characters of a text, as in nanoGPT."""

    end_ids = ()

    def __init__(self, characters: str):
        """`characters`: the vocabulary, sorted and distinct.

        **Raises:** `ValueError` if they are not, there are none, or one is no character.
        """
        utf8(characters)
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError("the characters must be sorted and distinct, and at least one")
        self.characters = characters
        codes = code_points(characters)
        # The id of each code point, -1 for those that are not in the vocabulary.
        self._ids = np.full(int(codes[-1]) + 2, -1, np.int32)
        self._ids[codes] = np.arange(len(codes))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    padded_vocab_size = vocab_size

    def encode(self, text: str) -> Ids:
        ids = np.take(self._ids, code_points(text), mode="clip")
        if len(ids) and ids.min() < 0:
            raise UserError(
                f"{character_at(text, int(np.argmin(ids)))} is not in the vocabulary: it never "
                f"occurred in the corpus of this char tokenizer, which knows {self.vocab_size} "
                "characters. (--data.tokenizer byte knows all.)"
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8")

    def to_json(self) -> dict[str, Any]:
        return {"kind": "char", "characters": self.characters}


class ByteTokenizer(Decoding):
    """One id per byte of the UTF-8 text."""

    end_ids = ()
    vocab_size = padded_vocab_size = 256

    def encode(self, text: str) -> Ids:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def to_json(self) -> dict[str, Any]:
        return {"kind": "byte"}


class TiktokenTokenizer(Decoding):
    """One of tiktoken's byte-pair encodings. A special token's text is encoded as plain text.

    **Raises:** `UserError` if it splits a text by none of `PATTERNS`.
    """

    def __init__(self, encoding: tiktoken.Encoding):
        check_pattern(encoding._pat_str)
        self.encoding = encoding

    @property
    def end_ids(self) -> tuple[int, ...]:
        end = self.encoding._special_tokens.get(END_OF_TEXT)
        return () if end is None else (end,)

    @property
    def vocab_size(self) -> int:
        return self.encoding.n_vocab

    @property
    def padded_vocab_size(self) -> int:
        # Matrix units work in tiles: a head of 50,304 columns is faster than one of 50,257.
        return -(-self.vocab_size // 64) * 64

    def encode(self, text: str) -> Ids:
        utf8(text)  # or an error
        # tiktoken searches for blanks by their number in memory that ends at about a million.
        with told("tiktoken cannot encode this text"):
            # The ids of `encode_ordinary`, without a list of Python's numbers.
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def boundary(self, text: str) -> int:
        # Every encoding splits before a space between letters, and between a newline and a letter.
        # A cut there changes no token.
        ends = [match.end() for match in BETWEEN_WORDS.finditer(text, max(0, len(text) - 10_000))]
        # A text without such places is cut anywhere, before it fills the memory.
        return ends[-1] if ends else len(text) if len(text) > 2**23 else 0

    def token_bytes(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # some encodings leave ids below n_vocab unused
            return b""

    def to_json(self) -> dict[str, Any]:
        encoding = self.encoding
        return {
            "kind": "tiktoken",
            "name": encoding.name,
            "pattern": encoding._pat_str,
            "special_tokens": encoding._special_tokens,
            "ranks": {
                base64.b64encode(token).decode("ascii"): rank
                for token, rank in encoding._mergeable_ranks.items()
            },
        }


def check_pattern(pattern: str) -> None:
    """**Raises:** `UserError` if `pattern` is not in `PATTERNS`."""
    require(
        pattern in PATTERNS,
        f"The tokenizer splits a text by a pattern that gptlite does not know: {pattern[:200]!r}.",
    )
