"""Kill a run at random moments, inside and between saves, and resume it each time. Then let it end,
and compare it with an uninterrupted run.

    python tests/soak/kill_loop.py --kills 60

The suite runs a short one (tests/scripts/test_resume.py).
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from support.kill_loop import compare, kill_loop

    with tempfile.TemporaryDirectory() as folder:
        steps = 60 * arguments.kills
        counts = kill_loop(Path(folder), arguments.kills, steps, arguments.seed)
        compare(Path(folder))
    if counts["too late"]:
        sys.exit(f"the run ended before all kills: {counts}")
    print(f"{arguments.kills} kills of a run of {steps} steps: {counts}")
    print("parameters, optimizer state, metrics and weights are those of an uninterrupted run")


if __name__ == "__main__":
    main()
