import contextlib
import errno
import os
import sys
from pathlib import Path

import pytest

from gptlite.errors import UserError
from gptlite.machine.files import is_locked, lock, write_atomically, write_json
from gptlite.machine.progress import sentence_of


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


@pytest.mark.skipif(sys.platform == "win32", reason="its locks are others")
@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK])
def test_a_folder_without_locks_has_none(tmp_path, monkeypatch, reason):
    """Nor is a file that another process left taken for one."""

    def flock(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / "lock").write_text("")
    with lock(tmp_path / "lock", "busy"):
        pass
    assert not is_locked(tmp_path / "lock")


@pytest.mark.skipif(sys.platform == "win32", reason="a folder in use cannot be removed")
def test_a_working_folder_that_is_gone_is_told(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with contextlib.chdir(place):
        place.rmdir()
        with pytest.raises(FileNotFoundError) as error:
            Path.cwd()
    assert sentence_of(error.value) == "The working folder does not exist any more."
    with pytest.raises(FileNotFoundError) as error:
        (place / "a").read_text()
    assert str(place / "a") in str(sentence_of(error.value))
