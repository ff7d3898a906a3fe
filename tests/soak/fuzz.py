"""Hostile input, at random, as `tests/support/fuzzing.py` describes it.

    python tests/soak/fuzz.py --minutes 60

Exit code 1 if there is a finding. The suite has a short version, tests/scripts/test_fuzz.py.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("fuzz"))
    arguments = parser.parse_args()
    from support.fuzzing import fuzz

    seconds = 60 * arguments.minutes
    found = fuzz(arguments.folder, arguments.seed, lambda done, passed: passed < seconds)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
