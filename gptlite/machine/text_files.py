"""Files of text, read in pieces."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gptlite.errors import UserError, require

# Bytes of a file that are read at once, and characters of a text that are encoded at once, about:
# few enough to stay in a core's cache.
PIECE = 2**20


def read_file(path: Path) -> Iterator[str]:
    """`read_text` of a file. No more is read than the file has at the beginning: files of the
    system's, such as those in /proc, may have no end.

    **Raises:** `UserError` as `read_text` does.
    """
    try:
        with path.open("rb") as file:
            yield from read_text(file, str(path), path.stat().st_size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read(file: BinaryIO, n: int) -> bytes:
    """`n` bytes, or what there is: one that comes over a network gives what has arrived."""
    content = bytearray()
    while len(content) < n and (part := file.read(n - len(content))):
        content += part
    return bytes(content)


def read_text(file: BinaryIO, name: str, most: int | None = None) -> Iterator[str]:
    """A UTF-8 file without its byte-order mark. Line ends are not changed. `most`: bytes that are
    read.

    **Raises:** `UserError` if it is no such text; `OSError`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    while True:
        content = _read(file, PIECE if most is None else min(PIECE, most - place))
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        require(place > 0 or not is_utf16, f"{name} is UTF-16 text: save it as UTF-8.")
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            wrong, value = place - pending + error.start, error.object[error.start]
            raise UserError(
                f"{name} is not UTF-8 text: byte {wrong} is 0x{value:02x}. If it is in another "
                "encoding, such as Latin-1, save it as UTF-8."
            ) from error
        if 0 in content:
            raise UserError(f"{name} is not text: byte {place + content.index(0)} is 0x00.")
        yield text.removeprefix("\ufeff") if place == 0 else text
        place += len(content)
        if not content:
            return
