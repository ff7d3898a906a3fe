"""Records: JSON from a file, or from the net, which may come from a stranger. The type of a
record says what it may hold, and is checked when it is read."""

import json
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from gptlite.machine.fields import MAX_INT32
from gptlite.machine.files import MAX_JSON, MAX_NUMBER, read_bounded, write_json

T = TypeVar("T")

# A number that training could have written: finite, and so small that a few do not overflow.
Number = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=MAX_NUMBER)]
"""Such as a time or a loss."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]


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
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    try:
        # Not by msgspec, which takes no halves of surrogate pairs: a text may have them.
        record = json.loads(text)
        return msgspec.convert(record, kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write what `read_record` reads.

    **Raises:** `OSError`.
    """
    write_json(path, msgspec.to_builtins(record))
