"""Kill a run at random moments, inside and between saves, and resume it each time. Then let it end,
and compare it with an uninterrupted run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from conftest import ROOT, TEXT

from gptlite.runs.find import checkpoint_of, list_steps
from gptlite.runs.stored import best_step

# train.py, with a disk so slow that it is saving most of the time.
SLOW = """
import os, sys, time
def slowed(function, seconds):
    def slow(*args, **kwargs):
        time.sleep(seconds / 2)
        result = function(*args, **kwargs)
        time.sleep(seconds / 2)
        return result
    return slow
os.rename, os.replace = slowed(os.rename, 0.1), slowed(os.replace, 0.1)
os.fsync = slowed(os.fsync, 0.02)
from gptlite.scripts import train
train.main()
"""


def start(words: list[str], folder: Path, *, slow: bool = False) -> subprocess.Popen:
    """train.py in `folder`."""
    program = ["-c", SLOW] if slow else [str(ROOT / "train.py")]
    return subprocess.Popen(
        [sys.executable, *program, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run(words: list[str], folder: Path) -> str:
    """The output of train.py, which must succeed."""
    process = start(words, folder)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def settings(steps: int) -> list[str]:
    """The options of a tiny run that saves often."""
    return (
        "--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16 "
        "--model.context-length 16 --training.batch-size 4 --training.log-every 8 "
        f"--training.steps {steps} --training.eval-every 36 --training.sample-tokens 0 "
        "--training.save-seconds 1 --optimizer.name adamw"
    ).split()


def kill_loop(folder: Path, kills: int, steps: int, seed: int = 0) -> dict[str, int]:
    """Counts of kills by moment. The runs are `whole` and `killed` in `folder`/runs."""
    chance = random.Random(seed)
    (folder / "text.txt").write_text(TEXT)
    run([*settings(steps), "--run", "whole"], folder)
    path = folder / "runs" / "killed"
    counts = {"inside a save": 0, "between saves": 0, "before the first save": 0, "too late": 0}

    def resume_command() -> list[str]:
        if list_steps(path):
            return ["--resume", "runs/killed", "--data.corpus", "text.txt"]
        return [*settings(steps), "--run", "killed", "--overwrite"]

    for kill in range(3 * kills):
        # On a busy machine, all kills may come before the first save.
        if kill >= kills and counts["inside a save"] + counts["between saves"]:
            break
        began = time.time()
        process = start(resume_command(), folder, slow=True)
        assert process.stdout is not None
        said = []
        early = chance.random() < 0.1  # perhaps before the first step
        for line in process.stdout:
            said.append(line)
            if line.startswith("step ") or (early and "run folder" in line):
                break
        time.sleep(chance.uniform(0.0, 1.5))
        process.send_signal(signal.SIGKILL)
        said += process.communicate()[0]
        assert process.returncode in (-signal.SIGKILL, 0), "".join(said)
        # Unfinished files of an earlier kill stay until the first save.
        unfinished = [*path.glob("checkpoints/*tmp*"), *path.glob(".*.part")]
        during_save = any(file.stat().st_mtime > began for file in unfinished)
        if process.returncode == 0:
            counts["too late"] += 1
            break
        if during_save:
            counts["inside a save"] += 1
        elif list_steps(path):
            counts["between saves"] += 1
        else:
            counts["before the first save"] += 1
        print(f"kill {kill + 1}/{kills}: {counts}", flush=True)
    if not (path / "result.json").exists():
        run(resume_command(), folder)
    return counts


def compare(folder: Path) -> None:
    """**Raises:** `AssertionError` if the two runs differ in anything but times."""
    whole, killed = folder / "runs" / "whole", folder / "runs" / "killed"
    assert metrics(killed) == metrics(whole)
    assert best_step(killed) == best_step(whole)
    best = best_step(whole)
    assert best is not None
    newest = list_steps(whole)[0]
    assert list_steps(killed)[0] == newest
    for step in (newest, best.step):
        a, b = (arrays(checkpoint_of(path, step) / "state") for path in (whole, killed))
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].tobytes() == b[name].tobytes(), name


def put_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Put other arrays into a checkpoint."""
    shutil.rmtree(path)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(arrays))


def arrays(path: Path) -> dict[str, Any]:
    """The arrays of a checkpoint, read by Orbax alone."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = checkpointer.metadata(path).item_metadata.tree
        as_arrays = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(path, ocp.args.PyTreeRestore(restore_args=as_arrays))


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, times aside."""
    times = ("tokens_per_second", "step_seconds", "seconds")
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in times} for record in records]
