"""Twenty variants, of which one is better: what a comparison finds, and a simpler rule.

    python benchmarks/one_gain.py

The variants are those of `planted.py`: MLPs without an effect, and one that learns faster. They are
compared, in comparisons/one-gain/, and what was found to be better is confirmed. (Before that, the
same call goes on where it was stopped.) Beside it the rule of autoresearch on the same losses: a
run of each, in this order, and keep what is lower, once for each seed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import compare, corpus_of, print_table

PLANTED = os.path.relpath(Path(__file__).with_name("planted.py"))
OPTIONS = "--training.steps 300 --training.eval-every 100 --seeds 10 --no-again"


def keep_if_lower(base: dict[str, Any], variants: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each seed, which variants are kept, and what that seems to gain."""
    rows = []
    for seed, loss in base["losses"].items():
        best, kept = loss, []
        for record in variants:
            if record["losses"].get(seed, np.inf) < best:
                best = record["losses"][seed]
                kept.append(record["variant"].removeprefix(f"mlp={PLANTED}:Planted:"))
        rows.append([seed, ", ".join(kept), f"{loss - best:.4f}"])
    return rows


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--variants N] [-- OPTIONS OF compare.py]",
    )
    parser.add_argument("--variants", type=int, default=20, metavar="N")
    arguments = parser.parse_args(sys.argv[1:end])
    options = sys.argv[end + 1 :] or OPTIONS.split()
    values = [*(f"n={n}" for n in range(1, arguments.variants)), "sine=true"]
    vary = "model.mlp=" + ",".join(f"{PLANTED}:Planted:{value}" for value in values)
    base, *variants = compare(Path(), "--name", "one-gain", "--vary", vary, *options)
    print_table(["seed", "kept if lower", "seems to gain"], keep_if_lower(base, variants))
    for record in variants:
        if record["verdict"] == "better":
            words = ["confirm", "one-gain", record["variant"], "--custom", PLANTED]
            compare(Path(), *words, *corpus_of(options))


if __name__ == "__main__":
    main()
