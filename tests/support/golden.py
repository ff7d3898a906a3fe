"""Golden losses: the first losses of a few runs, kept in tests/golden.json.

    python tests/support/golden.py [--write]

Prints how far the losses of this machine are from the file's; with --write, replaces them, which is
right only if a change of the numbers is meant (and says so in its commit).
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from conftest import TEXT, TINY, VARIANTS, run_script  # noqa: E402

FILE = ROOT / "tests" / "golden.json"
STEPS = 20
TRAIN = (
    f"--training.steps {STEPS} --training.log-every 1 --training.eval-every {STEPS} "
    "--training.sample-tokens 0 --run golden --overwrite"
).split()
SMALL = dataclasses.asdict(TINY)
# What the tiny models have besides their blocks: random numbers, and every way to divide a batch.
MORE = {
    "gpt2-documents": "--model.dropout 0.1 --model.attention-dropout 0.1 --training.accumulation 2",
    "alibi-sliding-parallel": "--training.label-smoothing 0.1 --optimizer.clip-norm 1",
    "relative-experts-sandwich-scan": "--model.remat block --optimizer.weight-decay 0.1",
}
PRESETS = {
    "quick": "quick --training.compute-dtype bfloat16",
    "quick, float32, AdamW": "quick --training.compute-dtype float32 --optimizer.name adamw "
    "--optimizer.learning-rate 1e-3",
    "s": "s",
}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest relative difference of a loss, of the first step and of all."""

    first: float
    all: float


# A few times as much as the losses were apart on JAX 0.10 and 0.12, with one device and with two,
# with all instructions of a CPU and with SSE4 alone, with optimisations of XLA and without.
TOLERANCE = Tolerance(3e-6, 3e-6)
# bfloat16, in which Muon iterates, too: where float32's last place differs, a number may be rounded
# to its neighbour, 0.4 % away. A few steps later, that is everywhere.
TOLERANCES = {"quick": Tolerance(1e-5, 3e-2)}


def option(name: str, value: object) -> list[str]:
    """A field of the model as train.py takes it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--model.{flag}" if value else f"--model.no-{flag}"]
    return [f"--model.{flag}={value}"]


def commands() -> dict[str, list[str]]:
    """The words after `train.py` of each run."""
    found = {name: f"{words} --data.corpus text.txt".split() for name, words in PRESETS.items()}
    for name, changes in VARIANTS.items():
        given = {k: v for k, v in (SMALL | changes).items() if v is not None}
        words = [word for field in given.items() for word in option(*field)]
        apart = given.get("separate_documents")
        data = "hf:lines.jsonl --data.tokenizer bpe:260" if apart else "text.txt"
        words += f"--data.corpus {data} --optimizer.name adamw --training.batch-size 8".split()
        # From small numbers, because an epsilon counts beside those.
        words += ["--training.compute-dtype", "float32", "--model.init", "gpt2"]
        words += MORE.get(name, "").split()
        found[name] = words
    return found


def make_texts(folder: Path) -> None:
    """What the runs train on."""
    # The same bytes on Windows.
    (folder / "text.txt").write_text(TEXT, newline="\n")
    lines = [json.dumps({"text": line}) + "\n" for line in TEXT.splitlines() if line]
    (folder / "lines.jsonl").write_text("".join(lines), newline="\n")


def losses(name: str, folder: Path) -> list[float]:
    """The first losses of a run in `folder`."""
    done = run_script("train.py", *commands()[name], *TRAIN, folder=folder)
    assert done.code == 0, done.err
    lines = (folder / "runs" / "golden" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train_loss"] for line in lines]


def difference(found: list[float], wanted: list[float]) -> Tolerance:
    """The relative differences."""
    each = [abs(a / b - 1) for a, b in zip(found, wanted, strict=True)]
    return Tolerance(each[0], max(each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_texts(folder)
        for run in commands():
            found[run] = losses(run, folder)
            if FILE.exists() and run in (wanted := json.loads(FILE.read_text())):
                print(f"{run}: {difference(found[run], wanted[run])}", flush=True)
    if write:
        lines = [f"{json.dumps(run)}: {json.dumps(values)}" for run, values in found.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
