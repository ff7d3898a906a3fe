import pytest

from gptlite.errors import UserError
from gptlite.machine.files import lock, write_atomically, write_json


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, [1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_until_its_block_ends(tmp_path):
    with lock(tmp_path / "new" / "lock", "busy"), pytest.raises(UserError, match="busy"):
        lock(tmp_path / "new" / "lock", "busy")
    with lock(tmp_path / "new" / "lock", "busy"):
        pass
