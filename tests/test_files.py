import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptlite.files import json_from_bytes, json_to_bytes, write_atomically

RECORD = {"a": [1, 2.5, None, "é\ud800🙂"], "b": {"c": "0" * 64}}
SEALED = json_to_bytes(RECORD)


def test_a_record_survives():
    assert json_from_bytes(SEALED) == RECORD
    assert json_from_bytes(b'{"by": "hand"}', sealed=False) == {"by": "hand"}
    with pytest.raises(ValueError, match="no checksum"):
        json_from_bytes(b'{"by": "hand"}')


@given(place=st.integers(0, len(SEALED) - 1), byte=st.integers(0, 255))
def test_no_changed_byte_goes_unnoticed(place, byte):
    damaged = bytearray(SEALED)
    damaged[place] = byte
    try:
        record = json_from_bytes(bytes(damaged), sealed=False)
    except ValueError:
        return
    # Left: the byte was that already; or the checksum's name is another, for the reader to refuse.
    assert record == RECORD or record.keys() - RECORD.keys()
    assert (record == RECORD) == (damaged == SEALED)


@given(st.integers(0, len(SEALED) - 2))
def test_no_missing_end_goes_unnoticed(length):
    with pytest.raises(ValueError, match=r"."):
        json_from_bytes(SEALED[:length])


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, [1, 2])  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
