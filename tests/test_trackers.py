"""Dashboards, read back with their own readers."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, needs

from gptlite import trackers
from gptlite.cli import LogConfig
from gptlite.config import Config
from gptlite.errors import UserError
from gptlite.trackers import Trackers, check_installed

CONFIG = Config()


def metrics(step: int, loss: float) -> dict[str, float | None]:
    return {"step": step, "train_loss": loss, "grad_norm": None}


SAMPLE = "<script>alert(1)</script> it's\n```a sample"


def track_twice(names: list[str], path: Path) -> None:
    """A run of 40 steps, resumed from step 20, and a failed evaluation."""
    with Trackers(names, path, CONFIG) as track:
        for step in (10, 20, 30, 40):
            track(step, metrics(step, step / 8))
    with Trackers(names, path, CONFIG) as track:
        for step in (30, 40, 50):
            more = {"val_loss": 0.5, "sample": SAMPLE} if step == 50 else {}
            track(step, metrics(step, step / 4) | more)


@needs("tensorboard")
def test_tensorboard_reads_a_run_and_its_continuation(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track_twice(["tensorboard"], tmp_path)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train_loss")]
    assert losses == [(10, 1.25), (20, 2.5), (30, 7.5), (40, 10.0), (50, 12.5)]
    assert [(event.step, event.value) for event in found.Scalars("val_loss")] == [(50, 0.5)]
    assert sorted(found.Tags()["scalars"]) == ["train_loss", "val_loss"]
    (sample,) = found.Tensors("sample")
    assert SAMPLE in sample.tensor_proto.string_val[0].decode()
    config = found.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert json.loads(config.strip("`\n")) == json.loads(json.dumps(dataclasses.asdict(CONFIG)))


# Packages with threads and processes of their own get a process of their own.
TRACK = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/runs")
from test_trackers import track_twice
track_twice([sys.argv[1]], Path(sys.argv[2]))
"""


def run_python(code: str, *words: object, **variables: object) -> str:
    given = {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **given},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def records(file: Path):
    """The protocol buffers in a file of W&B: 7 bytes, then LevelDB's log format, in which a record
    may be cut at the end of a block of 32,768 bytes."""
    # Its classes are made when it is imported, which pyright does not see.
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, place, record = file.read_bytes(), 7, b""
    while place < len(content):
        left = 32_768 - place % 32_768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield protocol.Record.FromString(record)
            record = b""


@needs("wandb")
def test_wandb_keeps_a_run_and_its_continuation_offline(tmp_path):
    path = tmp_path / "the-run"
    path.mkdir()
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "WANDB_SILENT": "true"}
    run_python(TRACK, "wandb", path, **offline)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    found = [record for file in files for record in records(file)]
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    name = f"the-run-{json.loads((path / 'tracked.json').read_text())['suffix']}"
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (name, "gptlite", "the-run")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["model"]["d_model"] == CONFIG.model.d_model
    lines = [
        {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    losses = [(int(line["step"]), float(line["train_loss"])) for line in lines]
    first = [(10, 1.25), (20, 2.5), (30, 3.75), (40, 5.0)]
    assert losses == [*first, (30, 7.5), (40, 10.0), (50, 12.5)]
    assert "grad_norm" not in lines[0]
    assert float(lines[-1]["val_loss"]) == 0.5
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; it&#x27;s\n```a sample" in page.read_text()


@needs("trackio")
def test_trackio_keeps_a_run_and_its_continuation(tmp_path):
    path = tmp_path / "the-run"
    path.mkdir()
    run_python(TRACK, "trackio", path, TRACKIO_DIR=tmp_path / "trackio")
    read = """
import json
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("gptlite")
print(json.dumps([name, SQLiteStorage.get_logs("gptlite", name)]))
"""
    name, lines = json.loads(run_python(read, TRACKIO_DIR=tmp_path / "trackio"))
    assert name == f"the-run-{json.loads((path / 'tracked.json').read_text())['suffix']}"
    losses = [(line["step"], line["train_loss"]) for line in lines if "train_loss" in line]
    first = [(10, 1.25), (20, 2.5), (30, 3.75), (40, 5.0)]
    assert sorted(losses) == sorted([*first, (30, 7.5), (40, 10.0), (50, 12.5)])
    (last,) = [line for line in lines if "val_loss" in line]
    assert (last["val_loss"], last["sample"]) == (0.5, SAMPLE)


class Recorder:
    """Fails at what it is told to."""

    def __init__(self, fails: str):
        self.fails, self.seen = fails, []
        self._maybe("start")

    def __call__(self, step, metrics):
        self._maybe(f"step {step}")
        self.seen.append((step, metrics))

    def close(self, *, failed):
        self._maybe("close")
        self.seen.append("failed" if failed else "closed")

    def _maybe(self, what: str) -> None:
        if what == self.fails:
            raise RuntimeError(f"no network at {what}\nand more lines")


@pytest.mark.parametrize("fails", ["start", "step 2", "close", ""])
def test_one_that_fails_is_named_once_and_the_others_go_on(fails, tmp_path, monkeypatch):
    made = {}

    def start(name: str):
        def of(path, run_name, config):
            assert (path, config["model"]["d_model"]) == (tmp_path, CONFIG.model.d_model)
            made[name] = Recorder(fails if name == "wandb" else "")
            return made[name]

        return of

    for name in trackers.START:
        monkeypatch.setitem(trackers.START, name, start(name))
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        Trackers(["wandb", "trackio"], tmp_path, CONFIG) as track,
    ):
        for step in (1, 2, 3):
            track(step, metrics(step, 2.0))
    seen = [(step, {"train_loss": 2.0}) for step in (1, 2, 3)]
    assert made["trackio"].seen == [*seen, "closed"]
    if fails == "step 2":
        assert made["wandb"].seen == seen[:1]
    warning = f"wandb does not show this run from here, and training goes on: no network at {fails}"
    assert said.getvalue() == (f"{warning}\n" if fails else "")


def test_a_run_that_fails_is_shown_as_failed(tmp_path, monkeypatch):
    recorder = Recorder("")
    monkeypatch.setitem(trackers.START, "wandb", lambda *_: recorder)
    with pytest.raises(UserError), Trackers(["wandb"], tmp_path, CONFIG):
        raise UserError("Training has diverged.")
    assert recorder.seen == ["failed"]


def test_a_name_that_cannot_be_kept_does_not_end_a_run(tmp_path, capsys):
    (tmp_path / "tracked.json").mkdir()
    with Trackers(["tensorboard"], tmp_path, CONFIG) as track:
        track(1, metrics(1, 2.0))
    assert "tensorboard does not show this run" in capsys.readouterr().out


def test_the_name_of_a_run_is_that_of_its_folder_and_a_number(tmp_path):
    name = trackers._run_name(tmp_path)
    assert trackers._run_name(tmp_path) == name
    assert name.startswith(f"{tmp_path.name}-")
    for strange in ('{"suffix": "../../x"}', '{"suffix": 7}', "{}", "[", '{"suffix": "ABCDEF01"}'):
        (tmp_path / "tracked.json").write_text(strange)
        assert trackers._run_name(tmp_path).removeprefix(f"{tmp_path.name}-").isalnum()
    assert trackers._run_name(tmp_path) != name


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch):
    assert LogConfig("trackio,wandb").names == ["trackio", "wandb"]
    assert LogConfig().names == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_installed([])
    with pytest.raises(UserError, match=r'needs a package: pip install "gptlite-jax\[trackio\]"'):
        check_installed(["trackio"])
