"""The sbatch file of docs/scale.md, in a SLURM of this machine: stopped, requeued, resumed.

    python tests/soak/slurm.py

Needs `sbatch`, and a partition with two CPUs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

STEPS = 400


def sbatch_file() -> str:
    """The file, with two tasks on one node, and a small run."""
    from support.processes import OPTIONS

    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, flags=re.DOTALL)
    options = OPTIONS.replace("--training.eval-every 2", "--training.eval-every 50")
    small = f"quick --data.corpus text.txt {options} --training.steps {STEPS}"
    for old, new in (
        ("--nodes=2", "--nodes=1"),
        ("--ntasks-per-node=8", "--ntasks-per-node=2"),
        ("#SBATCH --gpus-per-node=8\n", ""),
        ('words="gpt2 ', f'words="{small} '),
        ("--resume runs/$run", "--resume runs/$run --data.corpus text.txt"),
        ("python train.py", f"{sys.executable} {ROOT / 'train.py'}"),
    ):
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(what: str, path: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    said = ""
    while what not in said:
        assert time.monotonic() < end, f"no {what!r} after {seconds} s:\n{said}"
        time.sleep(0.2)
        said = path.read_text(errors="replace") if path.exists() else ""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from conftest import TEXT

    os.environ["PYTHONPATH"] = str(ROOT)
    del os.environ["JAX_NUM_CPU_DEVICES"]  # of the tests
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        (folder / "train.sbatch").write_text(sbatch_file())
        os.chdir(folder)
        job = ask("sbatch", "--parsable", "train.sbatch")
        log = folder / f"gptlite-{job}.log"
        wait_for("\nstep ", log, 120)
        began = time.monotonic()
        ask("scancel", "--signal=TERM", job)
        wait_for("stopped at step", log, 60)
        print(f"stopped {time.monotonic() - began:.1f} s after the signal", flush=True)
        # SLURM waits before it starts a requeued job again.
        ask("scontrol", "release", job)
        wait_for("best validation loss", log, 400)
        while ask("squeue", "--noheader", "--job", job):
            time.sleep(0.5)
        lines = map(json.loads, (folder / f"runs/gpt2-{job}/metrics.jsonl").open())
        steps = [line["step"] for line in lines]
        assert steps == list(range(1, STEPS + 1)), steps
        said = log.read_text(errors="replace")
        assert said.count("on 2 cpu device(s)") == 2
        (found,) = re.findall(r"stopped at step (\d+) of", said)
        assert f", from step {found}" in said
        print(f"resumed from step {found} after a requeue, and done")
        # An error is said once, whoever finds it first.
        command = ["srun", "-n", "2", sys.executable, str(ROOT / "train.py"), "quick"]
        command += ["--data.corpus", "nowhere.txt"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2, done
        assert done.stderr.count("error: There is no corpus nowhere.txt") == 1, done.stderr
        print("an error under srun ends both tasks, with one message")


if __name__ == "__main__":
    main()
