"""Several processes that train one run on this machine: their losses on all meshes and under Open
MPI, a file of ids that one makes for all, a loss that is not finite, a fault of one host's disk,
and kills of a random process at random moments, inside and between saves.

    python tests/soak/processes.py --kills 20

The suite runs the shortest of these (tests/machine/test_processes.py).
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

CORPUS = ["--data.corpus", "text.txt"]
MESHES = {
    (2, 1, 1): "2 processes, each with rows of its own",
    (2, 2, 1): "2 processes, fsdp 2",
    (2, 1, 2): "2 processes, tensor 2",
    (4, 1, 1): "4 processes, each with rows of its own",
    (4, 2, 2): "4 processes, fsdp 2, tensor 2",
    (4, 4, 1): "4 processes, fsdp 4",
}


def run(folder: Path, processes: int, words: list[str]) -> None:
    """**Raises:** `AssertionError` if a process fails."""
    from support.processes import Processes

    if processes == 1:
        command = [sys.executable, str(ROOT / "train.py"), *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    all_ = Processes(folder, *[words] * processes)
    assert all_.codes(400) == [0] * processes, all_.said(0)


def losses(folder: Path, name: str) -> list[float]:
    """Every loss and gradient norm of a run."""
    lines = map(json.loads, (folder / "runs" / name / "metrics.jsonl").open())
    return [x[key] for x in lines for key in ("train_loss", "val_loss", "grad_norm") if key in x]


def difference(folder: Path, name: str, other: str) -> float:
    """The largest relative difference of two runs' losses."""
    pairs = list(zip(losses(folder, name), losses(folder, other), strict=True))
    assert len(pairs) > 20
    return max(abs(a / b - 1) for a, b in pairs)


def meshes(folder: Path) -> None:
    """**Raises:** `AssertionError` if losses differ from those of one process by more than 1e-5."""
    from support.processes import SETTINGS

    command = ["quick", *CORPUS, *SETTINGS, "--training.steps", "12", "--run"]
    run(folder, 1, [*command, "one"])
    for (processes, fsdp, tensor), what in MESHES.items():
        name = f"mesh-{processes}-{fsdp}-{tensor}"
        mesh = ["--mesh.fsdp", str(fsdp), "--mesh.tensor", str(tensor)]
        run(folder, processes, [*command, name, *mesh])
        found = difference(folder, name, "one")
        print(f"{what}: relative difference {found:.1e}", flush=True)
        assert found < 1e-5
    # From 4 processes to 2, to 1, on meshes of other forms.
    for steps in ("18", "24"):
        run(folder, 1, ["--resume", "one", *CORPUS, "--training.steps", steps])
    name = "mesh-4-2-2"
    run(folder, 2, ["--resume", name, *CORPUS, "--training.steps", "18", "--mesh.tensor", "1"])
    last = ["--training.steps", "24", "--mesh.fsdp", "1", "--mesh.tensor", "2"]
    run(folder, 1, ["--resume", name, *CORPUS, *last])
    found = difference(folder, name, "one")
    print(f"4 processes, resumed by 2, then by 1: relative difference {found:.1e}", flush=True)
    assert found < 1e-5


# Files of process 1 end at 20 kB.
FULL_DISK = """
import pathlib, resource, sys
from gptlite.scripts import train
from gptlite.runs import saving
publish = saving.publish
def noted(sentence):
    pathlib.Path("failed").touch()
    publish(sentence)
saving.publish = noted
if sys.argv[-1] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
train.main()
"""


def full_disk(folder: Path) -> None:
    """**Raises:** `AssertionError` unless all end with one message where one cannot write."""
    from support.processes import SETTINGS, Processes

    words = ["quick", *CORPUS, *SETTINGS, "--run", "full", "--mesh.fsdp", "2"]
    wide = ["--model.d-model", "64"]
    all_ = Processes(folder, *[[*words, *wide]] * 2, program=["-c", FULL_DISK])
    assert all_.codes() == [2, 2], all_.said(0)
    seconds = time.time() - (folder / "failed").stat().st_mtime
    errors = [line for line in all_.said(0).splitlines() if line.startswith("error")]
    assert len(errors) == 1, errors
    reason = "error: A checkpoint in runs/full/checkpoints cannot be written: File too large."
    assert errors[0].startswith(reason), errors
    print(f"a full disk of one: all ended {seconds:.0f} s after it had failed to write")


def own_disks(folder: Path) -> None:
    """**Raises:** `AssertionError` unless a folder that is not shared is said."""
    from support.processes import SETTINGS, Processes

    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "text.txt").write_bytes((folder / "text.txt").read_bytes())
    program = (
        "import os, sys, train\n"
        "from gptlite.runs import folder\n"
        "folder.SEEN_SECONDS = 2.0\n"
        "if sys.argv[-1] == '1':\n"
        "    os.chdir('elsewhere')\n"
        "train.main()"
    )
    words = ["quick", *CORPUS, *SETTINGS, "--run", "own"]
    all_ = Processes(folder, *[words] * 2, program=["-c", program])
    assert all_.codes() == [2, 2], all_.said(0)
    errors = [line for line in all_.said(0).splitlines() if line.startswith("error")]
    assert len(errors) == 1, errors
    assert "elsewhere/runs/own is not shared by all processes" in errors[0], errors
    print("a disk that is not shared: all ended with one message", flush=True)


def divergence(folder: Path) -> None:
    """**Raises:** `AssertionError` unless all end with one message, and the whole batch is kept."""
    from support.processes import SETTINGS, Processes

    words = ["quick", *CORPUS, *SETTINGS, "--training.steps", "12", "--mesh.fsdp", "2"]
    words += ["--optimizer.schedule", "linear", "--optimizer.learning-rate", "1e25", "--run"]
    command = [sys.executable, str(ROOT / "train.py"), *words, "diverged"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    all_ = Processes(folder, *[[*words, "diverged-2"]] * 2)
    assert all_.codes() == [2, 2], all_.said(0)
    errors = [line for line in all_.said(0).splitlines() if line.startswith("error")]
    assert len(errors) == 1, errors
    assert errors[0].startswith("error: Training has diverged at step "), errors
    reports = [
        json.loads((folder / "runs" / name / "nonfinite.json").read_text())
        for name in ("diverged", "diverged-2")
    ]
    for what in ("step", "ids", "text"):
        assert reports[0][what] == reports[1][what]
    print(f"divergence: all ended with one message, and {len(reports[1]['ids'])} rows are kept")


# A text of more than 100 characters goes to a file, which takes three seconds.
TOKEN_FILE = """
import functools, pathlib, time
from gptlite.scripts import train
from gptlite.text import tokens
encode = tokens._encode
def slow(*arguments):
    with open("writes.txt", "a") as file:
        file.write("written\\n")
    time.sleep(3)
    encode(*arguments)
tokens._encode = slow
tokens.split_corpus = functools.partial(
    tokens.split_corpus, in_memory=100, folder=pathlib.Path("tokens")
)
train.main()
"""


def token_files(folder: Path) -> None:
    """**Raises:** `AssertionError` unless one of the processes makes the file of ids, for all."""
    from support.processes import SETTINGS, Processes

    words = ["quick", *CORPUS, *SETTINGS, "--training.steps", "4", "--run", "from-file"]
    all_ = Processes(folder, *[words] * 4, program=["-c", TOKEN_FILE])
    assert all_.codes() == [0] * 4, all_.said(0)
    assert (folder / "writes.txt").read_text() == "written\n"
    assert len(list((folder / "tokens").glob("*.train"))) == 1
    print("4 processes: one has made the file of ids, the others have waited for it", flush=True)


def open_mpi(folder: Path) -> None:
    """**Raises:** `AssertionError` unless `mpirun` trains what one process does, and says an error
    once."""
    from support.processes import SETTINGS

    if shutil.which("mpirun") is None:
        print("mpirun is not installed: Open MPI is not tried")
        return

    def mpirun(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable]
        return subprocess.run(
            [*command, str(ROOT / "train.py"), "quick", *words],
            cwd=folder,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
            capture_output=True,
            text=True,
        )

    words = [*CORPUS, *SETTINGS, "--training.steps", "12", "--run"]
    run(folder, 1, ["quick", *words, "alone"])
    done = mpirun(*words, "mpi")
    assert done.returncode == 0, done.stderr
    found = difference(folder, "mpi", "alone")
    print(f"Open MPI: relative difference {found:.1e}", flush=True)
    assert found < 1e-5
    done = mpirun("--data.corpus", "nowhere.txt")
    assert done.returncode == 2, done
    assert done.stderr.count("error: There is no corpus nowhere.txt") == 1, done.stderr


def kill_loop(folder: Path, kills: int, processes: int, seed: int) -> None:
    """**Raises:** `AssertionError` if the others do not end in time, or the run cannot go on."""
    from support.kill_loop import SLOW, compare, settings
    from support.processes import Processes

    chance = random.Random(seed)
    missing = 5
    common = ["--distributed.missing-seconds", str(missing), "--mesh.fsdp", "2"]
    common += ["--training.batch-size", str(2 * processes), "--model.dropout", "0.1"]
    words = [*settings(40 * kills), *common]
    run(folder, processes, [*words, "--run", "whole"])
    checkpoints = folder / "runs" / "killed" / "checkpoints"
    took = []

    def command() -> list[str]:
        if any(path.name.isdecimal() for path in checkpoints.glob("*")):
            return ["--resume", "killed", *CORPUS, *common[:2]]
        return [*words, "--run", "killed", "--overwrite"]

    for kill in range(kills):
        all_ = Processes(folder, *[command()] * processes, program=["-c", SLOW])
        victim, early = chance.randrange(processes), chance.random() < 0.2
        if not early:
            all_.wait_for("step ")
        time.sleep(chance.uniform(0.0, 8.0 if early else 2.0))
        all_.all[victim].kill()
        began = time.monotonic()
        codes = all_.codes(120)
        took.append(time.monotonic() - began)
        said = [
            line for line in all_.said(0 if victim else 1).splitlines() if line.startswith("error")
        ]
        print(f"kill {kill + 1}: process {victim}; others after {took[-1]:.0f} s {codes}: {said}")
        sys.stdout.flush()
        assert 0 not in codes, "the run ended before all kills"
        if victim:
            who = ", ".join(str(i) for i in range(1, processes) if codes[i] == -9)
            assert len(said) == 1, said
            assert f"{who} of {processes}: not heard of for {missing} s" in said[0], said
        else:
            assert "because process 0 is gone" in said[-1], said
    run(folder, processes, command())
    compare(folder)
    print(
        f"{kills} kills of one of {processes} processes: the others ended after "
        f"{min(took):.0f} to {max(took):.0f} s (missing-seconds {missing})\n"
        "parameters, optimizer state, metrics and weights are those of an undisturbed run"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from conftest import TEXT

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        meshes(folder)
        open_mpi(folder)
        full_disk(folder)
        own_disks(folder)
        divergence(folder)
        token_files(folder)
        kill_loop(folder, arguments.kills, arguments.processes, arguments.seed)


if __name__ == "__main__":
    main()
