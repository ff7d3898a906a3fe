"""The list of runs, read while they are trained."""

import json
import os
import shutil
import threading
import time

import jax
import pytest
from conftest import TEXT, TINY, run_script, tiny_run

import gptlite as gl
from gptlite.errors import UserError
from gptlite.machine.files import is_locked, lock
from gptlite.runs.find import checkpoint_of, list_steps
from gptlite.runs.folder import RunFolder
from gptlite.serving.overview import list_runs


@pytest.fixture(name="runs", scope="module")
def fixture_runs(tmp_path_factory):
    """A folder with a run that is done."""
    folder = tmp_path_factory.mktemp("overview")
    (folder / "text.txt").write_text(TEXT)
    assert run_script("train.py", *tiny_run(), "--run", "small", folder=folder).code == 0
    return folder / "runs"


def test_a_run_in_the_list(runs):
    (found,) = list_runs(runs)
    result = json.loads((runs / "small" / "result.json").read_text())
    assert (found.name, found.state, found.preset) == ("small", "done", None)
    assert (found.step, found.steps) == (6, 6)
    assert found.parameters == result["parameters"]
    assert found.best_loss == result["best_val_loss"]
    assert found.began <= found.changed <= time.time()


def test_the_states_of_a_run(runs, tmp_path):
    for name in ("done", "stopped", "diverged", "running", "none"):
        (tmp_path / name).mkdir()
    for name in ("done", "stopped", "diverged", "running"):
        for file in ("config.json", "metrics.jsonl"):
            (tmp_path / name / file).write_bytes((runs / "small" / file).read_bytes())
    (tmp_path / "done" / "result.json").write_text("{}")
    (tmp_path / "diverged" / "nonfinite.json").write_text("{}")
    with RunFolder(tmp_path / "running") as run:
        run.lock()
        states = {run.name: run.state for run in list_runs(tmp_path)}
        with pytest.raises(UserError, match="being trained"), RunFolder(run.path) as other:
            other.lock()
    assert states == {name: name for name in ("done", "stopped", "diverged", "running")}
    assert {run.state for run in list_runs(tmp_path)} == {"done", "stopped", "diverged"}


def test_a_model_that_was_trained_in_python(tmp_path, monkeypatch):
    """It has a checkpoint, and no metrics."""
    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("char", TEXT)
    model = gl.make_model(TINY, tokenizer, key=jax.random.key(0))
    gl.save_run("mine", model, tokenizer, gl.TrainingConfig(steps=7))
    (found,) = list_runs(tmp_path / "runs")
    assert (found.state, found.step, found.steps, found.best_loss) == ("done", 7, 7, None)


def test_a_run_that_diverges_later(runs, tmp_path):
    """After its last line of metrics."""
    shutil.copytree(runs / "small", tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    assert list_runs(tmp_path)[0].state == "stopped"
    for content, state in (
        ("{}", "diverged"),
        ('{"step": 1000000}', "diverged"),
        ('{"step": 1}', "stopped"),  # and went on since then
        ('{"step": "1"}', "diverged"),
    ):
        (tmp_path / "run" / "nonfinite.json").write_text(content)
        assert list_runs(tmp_path)[0].state == state


def test_a_run_that_is_extended_began_when_it_began(runs, tmp_path):
    for name, age in (("first", 2000), ("second", 1000)):
        shutil.copytree(runs / "small", tmp_path / name)
        began = time.time() - age
        os.utime(tmp_path / name / "tokenizer.json", (began, began))
    (tmp_path / "first" / "config.json").touch()  # `--resume` with more steps writes it
    assert [run.name for run in list_runs(tmp_path)] == ["second", "first"]


def test_a_look_does_not_disturb_training_that_begins(tmp_path):
    """A lock that is held for a moment is waited for."""
    path, begun = tmp_path / ".run.lock", threading.Event()

    def look():
        with lock(path, "held"):
            begun.set()
            time.sleep(0.3)

    thread = threading.Thread(target=look)
    thread.start()
    assert begun.wait(10)
    assert is_locked(path)
    with RunFolder(tmp_path / "run") as run:
        run.lock()
        assert is_locked(path)
    thread.join()
    assert not is_locked(path)


def test_runs_that_cannot_be_read(runs, tmp_path):
    """A stranger's run: what is wrong in it is left out, and nothing outside of it is read."""
    for name, content in {
        "no-json": "{",
        "other": "[]",
        "deep": "[" * 100_000,
        "unknown": '{"model": {"colour": 1}}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    shutil.copytree(runs / "small", tmp_path / os.fsdecode(b"no-unicode\xff"))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_bytes((runs / "small" / "config.json").read_bytes())
    (linked / "metrics.jsonl").symlink_to(runs / "small" / "metrics.jsonl")
    (linked / "checkpoints" / "3").mkdir(parents=True)
    checkpoint = checkpoint_of(runs / "small", list_steps(runs / "small")[0])
    (linked / "checkpoints" / "3" / "record").symlink_to(checkpoint / "record")
    (linked / "checkpoints" / checkpoint.name).symlink_to(checkpoint)
    (linked / "checkpoints" / "2" / "record").mkdir(parents=True)
    (linked / "checkpoints" / "2" / "record" / "metadata").write_bytes(b"\xff" * 100)
    (found,) = list_runs(tmp_path)
    assert found.name == "linked"
    assert (found.step, found.parameters, found.best_loss) == (0, None, None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_among_the_files_is_not_waited_for(runs, tmp_path):
    """Nothing ever writes to it."""
    run = tmp_path / "pipes"
    run.mkdir()
    (run / "config.json").write_bytes((runs / "small" / "config.json").read_bytes())
    (run / "checkpoints" / "6" / "record").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoints/6/record/metadata", "result.json"):
        os.mkfifo(run / name)
    (found,) = list_runs(tmp_path)
    assert (found.step, found.parameters, found.best_loss) == (0, None, None)
