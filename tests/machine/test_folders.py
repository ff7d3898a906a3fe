from pathlib import Path

import pytest

from gptlite.machine import folders


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Away from a clone."""
    monkeypatch.setattr(folders, "ROOT", tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_a_clone_keeps_its_texts_itself(tmp_path, monkeypatch):
    assert folders.DATA_FOLDER == folders.ROOT / "data"
    assert (folders.DATA_FOLDER / "README.md").is_file()


def test_an_installed_package_keeps_texts_among_the_users_caches(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders.cache_folder() == tmp_path / "gptlite"
    assert folders.data_folder() == tmp_path / "gptlite" / "data"


def test_a_user_without_a_home_has_no_caches(installed, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert folders.cache_folder() is None
    assert folders.data_folder() == Path("data")
