"""Validation loss of a preset over seeds, and the time it takes, start to finish, nothing compiled
before: `python benchmarks/quality.py PRESET --seeds 0 1 2`. What follows `--` goes to train.py."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import print_table

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [-h] PRESET [--seeds N ...] [-- OPTIONS OF train.py]"
    )
    parser.add_argument("preset", metavar="PRESET")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    arguments = parser.parse_args(sys.argv[1:end])
    rows, losses, times = [], [], []
    for seed in arguments.seeds:
        more = ("--training.seed", str(seed), *sys.argv[end + 1 :])
        result, _, seconds = train(arguments.preset, *more)
        losses.append(result["final_val_loss"])
        times.append(seconds)
        speed = f"{result['tokens_per_second']:,.0f}"
        best = f"{result['best_val_loss']:.4f}"
        rows.append([str(seed), f"{losses[-1]:.4f}", best, f"{seconds:.0f}", speed])
        print(f"seed {seed}: {losses[-1]:.4f} in {seconds:.0f} s", flush=True)
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    mean = f"{statistics.fmean(losses):.4f} ± {deviation:.4f}"
    rows.append(["mean", mean, "", f"{statistics.fmean(times):.0f}", ""])
    print()
    header = ["seed", "final validation loss", "best", "seconds, whole process", "tokens/s"]
    print_table(header, rows)


def train(*options: str) -> tuple[dict, list[dict], float]:
    """A run's result, its metrics, and the seconds that the whole process took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *options, "--run", "quality"],
            cwd=folder,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "caches")},
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            sys.exit(f"train.py {' '.join(options)} failed")
        run = folder / "runs" / "quality"
        metrics = (run / "metrics.jsonl").read_text().splitlines()
        return (
            json.loads((run / "result.json").read_text()),
            [json.loads(line) for line in metrics],
            seconds,
        )


if __name__ == "__main__":
    main()
