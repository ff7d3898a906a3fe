"""Time from typing a command to its first result: `python benchmarks/startup.py`.

`train.py quick` to the first step done, `sample.py` with model S to its first character; without
and with the programs that an earlier run compiled. The peer, Hugging Face's GPT-2 of shape S in a
bare script, does one training step, or one token (sample.py computes 32 before it shows any).
By turns. Last, `import gptlite`, and `import transformers` by turns with it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import print_machine, print_table, spread

ROOT = Path(__file__).resolve().parents[1]


def first_step(folder: Path, caches: Path) -> float:
    """Seconds until `train.py quick` has logged its first step."""
    shutil.rmtree(folder / "runs" / "first", ignore_errors=True)
    metrics = folder / "runs" / "first" / "metrics.jsonl"
    one_step = ("--training.steps", "2", "--training.log-every", "1")
    command = [str(ROOT / "train.py"), "quick", *one_step, "--run", "first"]
    start = time.perf_counter()
    process = _start(command, folder, caches)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            sys.exit(f"train.py ended with {process.returncode} before its first step")
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    process.communicate()
    return seconds


def first_character(folder: Path, caches: Path) -> float:
    """Seconds until `sample.py` has written a character."""
    return _to_first_byte(
        [str(ROOT / "sample.py"), "--run", "s", "--prompt", "KING"], folder, caches
    )


def _to_first_byte(command: list[str], folder: Path, caches: Path) -> float:
    start = time.perf_counter()
    process = _start(command, folder, caches)
    assert process.stdout is not None
    if not process.stdout.read(1):
        sys.exit(f"{command} ended without a word")
    seconds = time.perf_counter() - start
    process.communicate()
    return seconds


def _start(command: list[str], folder: Path, caches: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(caches), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
    )


def of_import(package: str) -> float:
    """Milliseconds."""
    code = f"import time; s = time.perf_counter(); import {package}; print(time.perf_counter() - s)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return 1000 * float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print_machine()
    peer = str(ROOT / "benchmarks" / "huggingface.py")
    with tempfile.TemporaryDirectory() as name:
        folder, caches = Path(name), Path(name) / "caches"
        two_steps = ("--training.steps", "2", "--run", "s")
        prepared = _start([str(ROOT / "train.py"), "s", *two_steps], folder, caches)
        prepared.communicate()
        if prepared.returncode:
            sys.exit("train.py s failed")
        kinds = {
            "train.py quick, first step": (first_step, "train"),
            "sample.py, model S, first character": (first_character, "sample"),
        }
        rows = []
        for kind, (measure, peer_does) in kinds.items():
            cold, warm, theirs = [], [], []
            for _ in range(rounds):
                shutil.rmtree(caches, ignore_errors=True)
                cold.append(measure(folder, caches))
                warm.append(measure(folder, caches))
                theirs.append(_to_first_byte([peer, peer_does], folder, caches))
            rows.append([kind, *(spread(times, ".1f") for times in (cold, warm, theirs))])
    print_table(["seconds", "nothing compiled", "compiled before", "Hugging Face"], rows)
    pairs = [(of_import("gptlite"), of_import("transformers")) for _ in range(rounds)]
    ours, theirs = (spread(times, ".0f") for times in zip(*pairs, strict=True))
    print(f"import gptlite: {ours} ms; import transformers: {theirs} ms")


if __name__ == "__main__":
    main()
