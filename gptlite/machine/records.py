"""Records: JSON from a file, or from the net, which may come from a stranger. What a record may
hold is said by its type, and checked when it is read."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gptlite.machine.files import MAX_JSON, read_bounded, write_atomically

T = TypeVar("T")


def read_record(path: Path, kind: type[T], limit: int = MAX_JSON) -> T:
    """The JSON in `path`, of at most `limit` bytes, as an object of `kind`: a type that msgspec
    knows.

    **Raises:** `OSError`, as `read_bounded` does; `ValueError` if the file holds no such object.
    """
    return parse_record(read_bounded(path, limit), kind)


def parse_record(content: bytes | str, kind: type[T]) -> T:
    """`read_record` of the content of a file, or of a request.

    **Raises:** `ValueError`, which says what is wrong.
    """
    try:
        # As a string, because msgspec does not check that the fields it skips are UTF-8.
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_record(path: Path, record: Any) -> None:
    """Write what `read_record` reads.

    **Raises:** `OSError`.
    """
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
