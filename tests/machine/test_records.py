"""Records: what is read is what was written, or is refused with a reason."""

from typing import Annotated, Any

import msgspec
import pytest

from gptlite.machine.files import write_json
from gptlite.machine.records import Natural, Number, parse_record, read_record, write_record


class Point(msgspec.Struct, forbid_unknown_fields=True):
    step: Natural
    losses: list[Number | None]
    name: Annotated[str, msgspec.Meta(max_length=3)] = ""


def test_a_record_is_read_as_it_was_written(tmp_path):
    point = Point(3, [1.5, None, -2.0], "é\ud800🙂")
    write_record(tmp_path / "file", point)
    assert read_record(tmp_path / "file", Point) == point
    record = {"a": [1, 2.5, None, "é\ud800🙂"], "b": {"c": "d"}}
    write_json(tmp_path / "file", record)
    assert read_record(tmp_path / "file", dict[str, Any]) == record


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"step": ', "Expecting value"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"step": 1}', "missing required field `losses`"),
        (b'{"step": -1, "losses": []}', "step"),
        (b'{"step": true, "losses": []}', "got `bool`"),
        (b'{"step": 1, "losses": [NaN]}', "losses"),
        (b'{"step": 1, "losses": [1e300]}', "losses"),
        (b'{"step": 1, "losses": [], "name": "long"}', "length <= 3"),
        (b'{"step": 1, "losses": [], "more": 1}', "unknown field `more`"),
    ],
)
def test_what_is_no_such_record_is_refused(content, words, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_record(tmp_path / "file", Point)
    with pytest.raises(ValueError, match=words):
        parse_record(content, Point)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b" " * 100)
    with pytest.raises(OSError, match="at most 99"):
        read_record(tmp_path / "file", dict[str, Any], 99)
