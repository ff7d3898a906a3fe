"""The command `gptlite`, the scripts of a clone, and what their imports take."""

import subprocess
import sys

import pytest
from conftest import ROOT, run_script

import gptlite
from gptlite.scripts import SCRIPTS


def test_the_command_lists_its_scripts(tmp_path):
    done = run_script("gptlite", "--help", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    for name, text in SCRIPTS.items():
        assert f" {name} " in done.out
        assert text in done.out
    assert run_script("gptlite", folder=tmp_path).out == done.out
    assert run_script("gptlite", "--version", folder=tmp_path).out == (
        f"gptlite {gptlite.__version__}\n"
    )


@pytest.mark.parametrize("word", ["trian", "--versoin", "a\x1bb", ""])
def test_a_word_that_is_no_script_is_refused(word, tmp_path):
    done = run_script("gptlite", word, folder=tmp_path)
    assert done.code == 2
    assert "check-block" in done.err
    assert "\x1b" not in done.err


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_has_its_help(name, tmp_path):
    done = run_script("gptlite", name, "--help", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert f"usage: gptlite {name} [-h]" in done.out


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.py")))
def test_a_clone_has_the_same_scripts(name, tmp_path):
    done = run_script(f"{name}.py", "--help", folder=tmp_path)
    same = run_script("gptlite", name, "--help", folder=tmp_path)
    usage, _, rest = done.out.partition("\n\n")
    assert f"{name}.py [-h]" in usage
    assert rest == same.out.partition("\n\n")[2]


def test_the_package_is_imported_without_waiting():
    """The checks of shapes come with the first module that has any."""
    program = (
        "import sys, gptlite\n"
        "assert not {'jaxtyping', 'beartype', 'numpy', 'jax', 'tyro'} & set(sys.modules)\n"
        "from gptlite.text.batches import Batches\n"
        "assert 'jaxtyping' in sys.modules\n"
        "try:\n"
        "    Batches(1, 2, 3, 4, None)\n"
        "except Exception as error:\n"
        "    assert type(error).__name__ == 'TypeCheckError', error\n"
        "else:\n"
        "    raise AssertionError('nothing was checked')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
