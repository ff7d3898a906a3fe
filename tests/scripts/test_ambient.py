"""What the scripts find on a user's machine: settings, places and file systems."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TEXT
from support.ambient import TINY

pytestmark = pytest.mark.processes

GPTLITE = "from gptlite.scripts import main; main()"

# Characters that the encodings of some consoles do not have are in all that is printed.
UNI = TEXT + "→é\n" * 20


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A text and a run."""
    place = tmp_path_factory.mktemp("ambient")
    (place / "text.txt").write_text(UNI)
    done = script("train.py", *TINY, "--run", "one", folder=place)
    assert done.returncode == 0, done.stderr
    return place


def script(
    name: str, *words: str, folder: Path, **settings: str | None
) -> subprocess.CompletedProcess:
    """`python name words...`, in an environment with these settings. None: without it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | settings
    return subprocess.run(
        [sys.executable, str(ROOT / name), *words],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        timeout=300,
    )


RIGHT = {"load": 0, "train": 0, "sample": 0, "compare": 0, "serve": 0}


@pytest.mark.parametrize(
    "settings",
    [
        # A redirection on Windows, in a notebook, of a user without a home.
        {
            "PYTHONIOENCODING": "cp1252",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "HOME": "/nonexistent",
            "JAX_COMPILATION_CACHE_DIR": None,
            "JAX_DEFAULT_PRNG_IMPL": "rbg",
            "JAX_RANDOM_SEED_OFFSET": "5",
            "PYTHONOPTIMIZE": "2",
        },
        {
            **{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            **{"MPLBACKEND": "no-such-backend", "COLUMNS": "20", "TERM": "dumb"},
            **{"XDG_CACHE_HOME": "/dev/null", "JAX_COMPILATION_CACHE_DIR": None},
            **{"JAX_ENABLE_X64": "1", "PYTHONSAFEPATH": "1"},
        },
        {"JAX_DEBUG_NANS": "1", "JAX_CHECK_TRACER_LEAKS": "1"},
        {"JAX_DISABLE_JIT": "1"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_all_scripts_run_under_any_settings(place, settings):
    done = script("tests/support/ambient.py", str(place), folder=place, **settings)
    assert json.loads(done.stderr.splitlines()[-1]) == RIGHT, done.stderr.decode()[-3000:]


def test_settings_that_forbid_what_every_run_does_are_not_for_the_scripts(place):
    strict = {
        "JAX_TRANSFER_GUARD": "disallow",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_ERROR_CHECKING_BEHAVIOR_NAN": "raise",
        "JAX_ERROR_CHECKING_BEHAVIOR_OOB": "raise",
        "JAX_ERROR_CHECKING_BEHAVIOR_DIVIDE": "raise",
    }
    for words in (["train.py", *TINY, "--run", "x"], ["sample.py", "--run", "x", "--prompt", "T"]):
        done = script(*words, folder=place, **strict)
        assert done.returncode == 0, done.stderr.decode()[-3000:]


@pytest.mark.parametrize("change", ["no home", "no locks"])
def test_all_scripts_run_on_unusual_machines(place, change):
    own = dict.fromkeys(("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME") if "home" in change else ())
    done = script("tests/support/ambient.py", str(place), change, folder=place, **own)
    assert json.loads(done.stderr.splitlines()[-1]) == RIGHT, done.stderr.decode()[-3000:]
    assert (b"has no locks" in done.stdout) == (change == "no locks")


@pytest.mark.parametrize("name", ["a b é→ 12:30", "-x=a'b\"c"])
def test_folders_may_have_any_name_that_checkpoints_can_have(place, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(place, folder)
    done = script("tests/support/ambient.py", str(folder), folder=folder)
    assert json.loads(done.stderr.splitlines()[-1]) == RIGHT, done.stderr.decode()[-3000:]


def test_a_folder_in_which_no_checkpoint_can_be_kept_is_named(place, tmp_path):
    folder = tmp_path / "a[1]"
    shutil.copytree(place, folder)
    for words in ([*TINY, "--run", "new"], ["--resume", "one", "--data.corpus", "text.txt"]):
        done = script("train.py", *words, folder=folder)
        assert done.returncode == 2
        assert b"the names of folders must be without [, ]" in done.stderr
    assert script("sample.py", "--run", "one", "--prompt", "T", folder=folder).returncode == 0


@pytest.mark.parametrize("name", ["train.py", "sample.py", "compare.py"])
def test_a_platform_that_is_not_there_is_named(place, name):
    words = {"sample.py": ["--prompt", "a"], "compare.py": ["--vary", "model.norm=layer"]}
    done = script(name, *words.get(name, []), folder=place, JAX_PLATFORMS="tpu")
    assert done.returncode == 2
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("error: JAX finds no device of the platform tpu, as JAX_PLATFORMS says")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"JAX_NUM_CPU_DEVICES": "two"},
            'JAX cannot be used: Invalid value "two" for JAX flag',
        ),
        (
            {"JAX_DEFAULT_DEVICE": "tpu"},
            "JAX finds no device of the platform cpu, as JAX_PLATFORMS says: Unknown backend",
        ),
        ({"EQX_ON_ERROR": "stop"}, "Equinox cannot be used: Unrecognised value for `EQX_ON_ERROR`"),
        ({"EQX_ON_ERROR": "breakpoint"}, "EQX_ON_ERROR must be raise, nan or off, got breakpoint."),
    ],
    ids=str,
)
def test_a_setting_that_jax_or_equinox_refuses_is_told_in_a_sentence(place, settings, sentence):
    done = script("sample.py", "--prompt", "T", folder=place, **settings)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert f"error: {sentence}" in done.stderr.decode()


def test_a_number_that_is_not_finite_is_told_where_that_is_an_error(place):
    adam = ["--optimizer.name", "adamw", "--optimizer.learning-rate", "3e38"]
    words = [*TINY, "--run", "huge", *adam]
    for more, traced in (([], False), (["--debug"], True)):
        done = script("train.py", *words, "--overwrite", *more, folder=place, JAX_DEBUG_NANS="1")
        assert done.returncode == 2
        assert b"error: a number is not finite, which JAX_DEBUG_NANS" in done.stderr
        assert (b"Traceback" in done.stderr) == traced


@pytest.mark.parametrize(
    "words",
    [
        ["check-block", "x.py:Block"],
        ["train", "--init-from", "hf:nowhere"],
        ["estimate", "--init-from", "hf:nowhere"],
    ],
    ids=str,
)
def test_a_setting_that_jax_refuses_is_told_wherever_jax_is_imported(place, words):
    done = subprocess.run(
        [sys.executable, "-c", GPTLITE, *words],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "maybe"},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: JAX cannot be used: ")


def test_runs_that_begin_in_the_same_second_have_names_of_their_own(place):
    words = [sys.executable, str(ROOT / "train.py"), *TINY]
    known = set((place / "runs").iterdir())
    while time.time() % 1 > 0.1:
        time.sleep(0.01)
    runs = [
        subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(3)
    ]
    for run in runs:
        out, _ = run.communicate(timeout=300)
        assert run.returncode == 0, out.decode()
    new = [run for run in set((place / "runs").iterdir()) - known if run.is_dir()]
    assert len(new) == 3
    assert all((run / "result.json").exists() for run in new)


@pytest.mark.parametrize("option", ["--prompt", "--stop", "--run"])
def test_words_that_are_no_text_in_the_locale_are_refused(place, option):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for word, found in (("é", ascii_only), (os.fsdecode(b"\xe9"), {"PYTHONUTF8": "1"})):
        done = script("sample.py", option, word, folder=place, **found)
        assert done.returncode == 2
        assert b"on the command line is no text in" in done.stderr
        assert b"Traceback" not in done.stderr


def test_a_run_is_a_function_of_its_config(place):
    """Not of what JAX is told about random numbers and their formats."""
    settings = {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0"}
    settings |= {"JAX_RANDOM_SEED_OFFSET": "5"}
    losses = []
    for found in ({}, settings | {"JAX_ENABLE_X64": "1"}):
        done = script("train.py", *TINY, "--run", "same", "--overwrite", folder=place, **found)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((place / "runs/same/result.json").read_bytes())["best_val_loss"])
    assert losses[0] == losses[1]


def test_python_and_a_script_make_the_same_text_under_x64(place):
    words = ["sample.py", "--run", "one", "--prompt", "T", "--seed", "3", "--max-new-tokens", "20"]
    text = script(*words, folder=place).stdout.decode()
    code = "import gptlite as gl; print(gl.load('one').generate('T', max_new_tokens=20, seed=3))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "1", "PYTHONUTF8": "1"},
        capture_output=True,
    )
    assert done.stdout.decode().strip() == text.strip(), done.stderr


@pytest.mark.parametrize("script", ["export", "check-block", "estimate"])
def test_ctrl_c_ends_the_command_from_the_first_moment(place, script):
    for delay in (0.2, 0.3, 0.4, 0.6, 0.9):
        process = subprocess.Popen(
            [sys.executable, "-c", GPTLITE, script, "a.py:B", "b"],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        if b"Fatal Python error: init_" in error:  # Python itself was starting
            continue
        assert b"KeyboardInterrupt" not in error, (delay, error)
        # Python itself was starting, or it had ended before.
        assert process.returncode in (130, -signal.SIGINT, 2), (delay, error)


@pytest.mark.parametrize("name", ["train.py", "sample.py"])
def test_ctrl_c_ends_a_script_from_the_first_moment(place, name):
    """Whatever it does: it imports, reads, compiles, trains."""
    long = [*TINY, "--training.steps", "1000000", "--training.eval-every", "1000000"]
    words = {"sample.py": ["--run", "one", "--prompt", "T", "--max-new-tokens", "100000000"]}
    for delay in (0.3, 0.5, 0.8, 1.1, 1.5, 2.0, 2.6, 3.3, 4.5, 6.0):
        process = subprocess.Popen(
            [sys.executable, str(ROOT / name), *words.get(name, long)],
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
        if b"Fatal Python error: init_" in error:  # Python itself was starting
            continue
        assert (process.returncode, b"Traceback" in error) == (130, False), (delay, out, error)
