"""Texts as code points and as UTF-8."""

import hashlib
import sys
from collections.abc import Iterator

import numpy as np
from jaxtyping import Integer

from gptlite.errors import UserError
from gptlite.machine.progress import progress_bar


def scan(pieces: Iterator[str]) -> tuple[str, int, str]:
    """The sha256 of a text's UTF-8 bytes, the number of its characters, and the distinct ones,
    sorted."""
    checksum, characters = hashlib.sha256(), 0
    seen = np.zeros(sys.maxunicode + 1, bool)
    with progress_bar("reading", unit=" characters", delay=2.0) as bar:
        for piece in pieces:
            checksum.update(utf8(piece))
            seen[code_points(piece)] = True
            characters += len(piece)
            bar.update(len(piece))
    return checksum.hexdigest(), characters, "".join(map(chr, np.flatnonzero(seen)))


def utf8(text: str) -> bytes:
    """`text` in UTF-8.

    **Raises:** `UserError` if there is half of a surrogate pair in it, which is no character: JSON
    may have one, and a command line that is not in UTF-8.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        place, wrong = error.start, ord(text[error.start])
        raise UserError(
            f"{_around(text, place)!r} has half of a surrogate pair (U+{wrong:04X}), which is no "
            "character of UTF-8."
        ) from error


def character_at(text: str, place: int) -> str:
    """Names a character in a message, with what is around it: `text` may be a piece of a longer
    one."""
    return f"The character {text[place]!r} (U+{ord(text[place]):04X}) in {_around(text, place)!r}"


def _around(text: str, place: int) -> str:
    return text[max(0, place - 20) : place + 20]


def code_points(text: str) -> Integer[np.ndarray, " characters"]:
    """The Unicode code points of `text`, as unsigned integers."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
