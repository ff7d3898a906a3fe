"""Comparisons in which nothing differs, run in many ways: they must find nothing.

    python benchmarks/nulls.py

Each variant is the base's own MLP from other first parameters (`planted.py`), so every "better" and
every "worse" is wrong. The model has one layer, or is that of the options after `--`, which are
those of `gptlite compare`. Where a machine is said to be loaded, another process computes and
rests by turns, half a second each on average.

In a temporary folder. It takes some minutes.
"""

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, compare, corpus_of, print_table

PLANTED = ROOT / "benchmarks" / "planted.py"
SMALL = (
    "--model.n-layers 1 --model.n-heads 1 --model.d-model 64 --model.context-length 64 "
    "--training.batch-size 4 --training.steps 100 --training.eval-every 50 "
    "--data.validation-tokens 20000"
)


@dataclass(frozen=True)
class Way:
    """How variants are compared: so many `at_a_time`, each portion by a command of its own."""

    words: str
    name: str
    variants: range
    at_a_time: int
    options: str
    is_loaded: bool = False


# Other variants in each, since the same one would give the same losses again.
WAYS = (
    Way("all at once", "at-once", range(1, 21), 20, "--seeds 12"),
    Way("the first of them again, alone", "at-once", range(1, 2), 1, "--seeds 12"),
    Way("all again, with more seeds", "at-once", range(1, 21), 20, "--seeds 18"),
    Way("one by one", "one-by-one", range(21, 36), 1, "--seeds 12"),
    Way("a look after each 2 seeds", "looks", range(36, 46), 10, "--seeds 12 --seeds-at-once 2"),
    Way("`--equal flops`", "flops", range(46, 56), 10, "--seeds 6 --equal flops"),
    Way("`--equal parameters`", "parameters", range(56, 66), 10, "--seeds 6 --equal parameters"),
    Way(
        "`--equal time`, a loaded machine", "time", range(66, 72), 6, "--seeds 6 --equal time", True
    ),
    Way("`--tune`", "tune", range(72, 77), 5, "--seeds 12 --tune optimizer.learning_rate"),
)


def burst() -> None:
    """Load that comes and goes."""
    random, square = np.random.default_rng(), np.ones((1024, 1024), np.float32)
    while True:
        end = time.perf_counter() + random.exponential(0.5)
        while time.perf_counter() < end:
            np.dot(square, square)
        time.sleep(random.exponential(0.5))


@contextlib.contextmanager
def loaded(is_loaded: bool) -> Iterator[None]:
    process = multiprocessing.Process(target=burst, daemon=True)
    if is_loaded:
        process.start()
    try:
        yield
    finally:
        if is_loaded:
            process.terminate()
            process.join()


def verdicts(folder: Path, way: Way, options: Sequence[str]) -> list[dict[str, Any]]:
    """The verdicts on the variants of a way, after its last command."""
    records = []
    for first in way.variants[:: way.at_a_time]:
        variants = range(first, first + way.at_a_time)
        values = ",".join(f"{PLANTED}:Planted:n={n}" for n in variants)
        vary = ["--vary", f"model.mlp={values}", "--name", way.name]
        with loaded(way.is_loaded):
            records = compare(folder, *options, *way.options.split(), *vary)
    names = tuple(f":n={n}" for n in way.variants)
    return [record for record in records if record["variant"].endswith(names)]


def row(words: str, records: Sequence[dict[str, Any]]) -> list[str]:
    found = sum(record["verdict"] in ("better", "worse") for record in records)
    behind = sum(record["verdict"].startswith("stopped") for record in records)
    known = [record for record in records if record["difference_margin"]]
    nearest = max(abs(record["difference"]) / record["difference_margin"] for record in known)
    counts = len(records), max(record["seeds"] for record in records), found, behind
    return [words, *map(str, counts), f"{nearest:.2f}"]


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [-- OPTIONS OF gptlite compare]",
    )
    parser.parse_args(sys.argv[1:end])
    options = sys.argv[end + 1 :] or SMALL.split()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Path("data").mkdir(exist_ok=True)
        (folder / "data").symlink_to(Path("data").resolve())
        for way in WAYS:
            records = verdicts(folder, way, options)
            rows.append(row(way.words, records))
            print(*rows[-1], flush=True)
            if "more seeds" in way.words:
                known = [record for record in records if record["difference"] is not None]
                lowest = min(known, key=lambda record: record["difference"])["variant"]
                words = ["confirm", way.name, lowest, "--custom", str(PLANTED)]
                (it,) = compare(folder, *words, *corpus_of(options))
                it |= {"verdict": it["confirmed"], "seeds": len(it["seeds"])}
                rows.append(row("`confirm` of the lowest of them", [it]))
                print(*rows[-1], flush=True)
    print()
    counts = ["variants", "seeds, at most", "better or worse", "stopped in the middle"]
    print_table(["how", *counts, "largest difference, as a share of its margin"], rows)


if __name__ == "__main__":
    main()
