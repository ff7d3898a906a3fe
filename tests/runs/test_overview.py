"""The list of runs, and their curves, read while they are trained."""

import json
import os
import threading
import time

import numpy as np
import pytest
from conftest import TEXT, run_script

from gptlite.config import UserError
from gptlite.files import is_locked, lock
from gptlite.runs.folder import RunFolder
from gptlite.runs.overview import list_runs, read_curves, thinned

SMALL = (
    "--model.n-layers 1 --model.n-heads 2 --model.d-model 16 --model.context-length 16 "
    "--training.batch-size 8 --training.accumulation 1 --training.steps 6 --training.log-every 2 "
    "--training.eval-every 2 --training.sample-tokens 0 --data.corpus text.txt"
)


@pytest.fixture(name="runs", scope="module")
def fixture_runs(tmp_path_factory):
    """A folder with a run that is done."""
    folder = tmp_path_factory.mktemp("overview")
    (folder / "text.txt").write_text(TEXT)
    assert run_script("train.py", *SMALL.split(), "--run", "small", folder=folder).code == 0
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
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "config.json").write_bytes((runs / "small" / "config.json").read_bytes())
    (linked / "metrics.jsonl").symlink_to(runs / "small" / "metrics.jsonl")
    (linked / "last.safetensors").write_bytes(b"\xff" * 100)
    (linked / "best.safetensors").write_bytes(b"")
    (found,) = list_runs(tmp_path)
    assert found.name == "linked"
    assert (found.step, found.parameters, found.best_loss) == (0, None, None)
    with pytest.raises(OSError, match="link"):
        read_curves(linked, 0, 0, 100)


def test_curves_are_read_on_from_where_they_ended(runs, tmp_path):
    content = (runs / "small" / "metrics.jsonl").read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content[:-20])  # the last line is being written
    first = read_curves(tmp_path, 0, 0, 100)
    assert first.complete
    path.write_bytes(content)  # the same file goes on
    second = read_curves(tmp_path, first.file, first.end, 100)
    for name, key in (("train", "train_loss"), ("validation", "val_loss")):
        parts = getattr(first, name), getattr(second, name)
        steps, losses = (np.concatenate(both) for both in zip(*parts, strict=True))
        expected = [(line["step"], line[key]) for line in lines if key in line]
        assert list(zip(steps, losses, strict=True)) == expected
    assert len(second.train[0]) == 1
    # A run that is resumed begins another file.
    new = tmp_path / "new"
    new.write_bytes(content)
    os.replace(new, path)
    assert len(read_curves(tmp_path, second.file, second.end, 100).train[0]) == len(lines)


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "train_loss": 2.5}\n[]\n{"step": "2", "train_loss": 1}\n\xff\n'
        b'{"step": 3, "train_loss": NaN}\n'
        b'{"step": 99999999999999999999, "train_loss": 1}\n{"step": 4, "train_loss": 1e300}\n'
        + b"["
        * 9000
        + b"\n"
        b'{"step": 5, "train_loss": 1.5, "val_loss": 2}\n{"step": 6'
    )
    found = read_curves(tmp_path, 0, 0, 100)
    assert [x.tolist() for x in found.train] == [[1, 5], [2.5, 1.5]]
    assert [x.tolist() for x in found.validation] == [[5], [2.0]]


def test_a_file_without_lines_has_an_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"a" * (2**22 + 10))
    first = read_curves(tmp_path, 0, 0, 100)
    assert not first.complete
    second = read_curves(tmp_path, first.file, first.end, 100)
    assert second.complete
    assert second.end == first.end


def test_thinning_keeps_the_extremes_in_order():
    generator = np.random.default_rng(0)
    steps, values = np.arange(10_000), generator.normal(size=10_000)
    fewer, kept = thinned(steps, values, 1000)
    assert len(fewer) <= 1000
    assert np.all(np.diff(fewer) > 0)
    np.testing.assert_array_equal(values[fewer], kept)
    assert values.max() in kept
    assert values.min() in kept
    for begin in range(0, 10_000, 2500):  # everywhere
        assert np.sum((fewer >= begin) & (fewer < begin + 2500)) > 200
