"""Validation loss of a preset over seeds, and the time it takes, start to finish:
`python benchmarks/quality.py PRESET --seeds 0 1 2`. What follows `--` goes to train.py as it is."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import print_table

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("train_arguments", nargs="*", help="after --, for train.py")
    arguments = parser.parse_args()
    rows, losses, times = [], [], []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as name:
            run = f"quality-{Path(name).name}"
            command = [sys.executable, "train.py", arguments.preset, "--run", run]
            command += ["--training.seed", str(seed), *arguments.train_arguments]
            start = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        result = json.loads((ROOT / "runs" / run / "result.json").read_text(encoding="utf-8"))
        losses.append(result["final_val_loss"])
        speed = f"{result['tokens_per_second']:,.0f}"
        rows.append([str(seed), f"{losses[-1]:.4f}", f"{times[-1]:.0f}", speed])
        print(f"seed {seed}: {losses[-1]:.4f} in {times[-1]:.0f} s", flush=True)
    mean = statistics.fmean(losses)
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    rows.append(["mean", f"{mean:.4f} ± {deviation:.4f}", f"{statistics.fmean(times):.0f}", ""])
    print()
    print_table(["seed", "final validation loss", "seconds, whole process", "tokens/s"], rows)


if __name__ == "__main__":
    main()
