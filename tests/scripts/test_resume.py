"""Stopping train.py in every way, and going on; faults of the disk."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TEXT, run_script
from support.kill_loop import ROOT, compare, kill_loop, metrics, settings, start

import gptlite
from gptlite.errors import UserError
from gptlite.runs.display import Display
from gptlite.runs.find import list_steps
from gptlite.runs.stored import best_step
from gptlite.scripts import train
from gptlite.training.step import TrainSteps

STEPS = 150


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a run, `whole`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    done = run_script("train.py", *settings(STEPS), "--run", "whole", folder=folder)
    assert done.code == 0, done.err
    return folder


@pytest.mark.processes
def test_a_run_killed_at_random_ends_as_if_nothing_had_happened(tmp_path):
    counts = kill_loop(tmp_path, kills=1, steps=STEPS)
    assert counts["too late"] == 0, counts
    compare(tmp_path)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "I/O error")])
def test_a_run_whose_output_is_gone_is_saved(error, place, monkeypatch):
    """Of a pipe whose reader has ended, and of a terminal that was closed."""
    update = Display.update

    def gone(display, line, steps):
        update(display, line, steps)
        if line["step"] == 44:  # a line without a save
            raise error

    monkeypatch.setattr(Display, "update", gone)
    done = run_script("train.py", *settings(STEPS), "--run", f"gone{error.errno}", folder=place)
    assert done.code == (141 if error.errno == 32 else 2)
    assert done.err == ("" if error.errno == 32 else "error: [Errno 5] I/O error.\n")
    assert list_steps(place / "runs" / f"gone{error.errno}")[0] > 44


def refusal(words: list[str], folder: Path, monkeypatch, capsys) -> str:
    """What train.py says, in this process, when it refuses; and that it left all as it was."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    files = [path for path in folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(SystemExit) as stop:
        train.main()
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert stop.value.code == 2
    assert "Traceback" not in error
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in files} == before
    return error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--training.seed", "1"], "training.seed (0, got 1)"),
        (
            ["--training.batch-size", "8", "--model.d-model", "32"],
            "d_model (16, got 32)",
        ),
        (["--optimizer.learning-rate", "0.5"], "learning_rate (0.02, got 0.5)"),
        (["--training.steps", "150"], "has done 150 steps; to extend it"),
        (["--training.steps", "10"], "above that, got 10"),
        (["--run", "other"], "leave --run out"),
        (["--overwrite"], "leave --overwrite out"),
        (["--data.corpus", "other.txt"], "not the text that this run was trained on"),
        (["--data.corpus", "absent.txt"], "no corpus absent.txt"),
        (["--training.keep", "0"], "training.keep must be at least 1"),
    ],
)
def test_what_may_not_change_is_refused_by_name(place, words, said, monkeypatch, capsys):
    (place / "other.txt").write_text(TEXT.replace("miller", "baker "))
    words = [*words, "--resume", "runs/whole"]
    if "--data.corpus" not in words:
        words += ["--data.corpus", "text.txt"]
    if "150" not in words and "10" not in words:
        words += ["--training.steps", "160"]
    assert said in refusal(words, place, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "absent"], "There is no run absent"),
        (["--resume", "hf:a"], "no run that can be resumed: --init-from hf:a begins a run"),
        (["--training.init-from", "a"], "did you mean --init-from?"),
        (["--resume", ""], "no run named ''"),
        (["quick", "--resume", "whole"], "leave the preset quick out"),
        (["--resume"], "resume"),
        # Only the user decides which files are read.
        (["--resume", "whole"], "read only if the command names it: --data.corpus text.txt"),
    ],
)
def test_what_cannot_be_resumed_is_named(place, words, said, monkeypatch, capsys):
    assert said in refusal(words, place, monkeypatch, capsys)


def test_a_run_is_extended_from_elsewhere_with_the_same_text(place, tmp_path):
    (tmp_path / "moved.txt").write_text(TEXT)
    words = ["--training.steps", "160", "--training.eval-every", "80", "--training.keep", "1"]
    path = Path(shutil.copytree(place / "runs" / "whole", tmp_path / "runs" / "longer"))
    words = ["--resume", str(path), "--data.corpus", "moved.txt", *words]
    done = run_script("train.py", *words, folder=tmp_path)
    assert done.code == 0, done.err
    assert "from step 150" in done.out
    records = metrics(path)
    assert records[: len(metrics(place / "runs" / "whole"))] == metrics(place / "runs" / "whole")
    assert records[-1]["step"] == 160
    assert json.loads((path / "result.json").read_text())["steps"] == 160


@pytest.mark.processes
def test_a_signal_saves_and_says_how_to_resume(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = [*settings(100_000), "--training.save-seconds", "1000", "--run", "one"]
    process = start([*words, "--training.eval-every", "100000"], tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "run folder" in line:
            break
    while not list(tmp_path.glob("runs/one/metrics.jsonl")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    assert process.wait() == 130
    assert "Traceback" not in said
    assert "gptlite train --resume runs/one --data.corpus text.txt" in said
    (step,) = list_steps(tmp_path / "runs" / "one")
    assert f"stopped at step {step} of 100000" in said
    # And what it said works.
    words = ["--resume", "runs/one", "--data.corpus", "text.txt"]
    words += ["--training.steps", str(step + 3)]
    done = run_script("train.py", *words, folder=tmp_path)
    assert done.code == 0, done.err
    assert f"from step {step}" in done.out


def test_a_stop_before_the_first_step_replaces_no_run(place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    compile_steps = TrainSteps.compile

    def stopped(self, *arguments):
        compile_steps(self, *arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainSteps, "compile", stopped)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = [*settings(STEPS), "--run", "whole", "--overwrite"]
    done = run_script("train.py", *words, folder=tmp_path)
    assert done.code == 130
    assert "nothing has been written" in done.out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_sample_that_fails_loses_no_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)

    def generate(*arguments, **options):
        raise UserError("no sample")

    monkeypatch.setattr(gptlite, "generate", generate)
    words = [*settings(STEPS), "--training.sample-tokens", "5", "--run", "one"]
    done = run_script("train.py", *words, folder=tmp_path)
    assert done.code == 2
    assert "no sample" in done.err
    assert len(list_steps(tmp_path / "runs" / "one")) == 1
    assert best_step(tmp_path / "runs" / "one") is not None


@pytest.mark.processes
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path):
    """A limit on the size of files, which fails as a full disk does: in the middle of a write."""
    (tmp_path / "text.txt").write_text(TEXT)
    wide = [*settings(150), "--model.d-model", "64", "--run", "one"]  # arrays of 64 kB
    assert run_script("train.py", *wide, folder=tmp_path).code == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    words = ["--resume", "one", "--data.corpus", "text.txt", "--training.steps", "200"]
    process = subprocess.run(
        ["bash", "-c", 'ulimit -f 20; exec "$@"', "-", sys.executable, ROOT / "train.py", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stderr
    error, command, *more = process.stderr.splitlines()
    assert not more, process.stderr
    assert "cannot be written: File too large. To resume from step 150:" in error
    assert command.strip() == "gptlite train --resume runs/one --data.corpus text.txt"
    kept = tmp_path / "runs" / "one" / "checkpoints" / "150"
    assert all(p.read_bytes() == before[p] for p in kept.rglob("*") if p.is_file())


def test_a_loss_that_is_not_finite_saves_the_batch_and_keeps_the_last_good_checkpoint(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    words = "--optimizer.name adamw --optimizer.schedule linear --optimizer.learning-rate 1e25"
    words = [*settings(100), *words.split(), "--run", "one"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    for word in ("diverged at step", "grad_norm", "learning_rate", "on-nonfinite skip"):
        assert word in error
    report = json.loads((tmp_path / "runs" / "one" / "nonfinite.json").read_text())
    assert isinstance(report["learning_rate"], float)
    assert len(report["text"]) == 4
    assert all(text in TEXT for text in report["text"])
    for step in list_steps(tmp_path / "runs" / "one"):
        assert step < report["step"]
