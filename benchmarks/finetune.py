"""Fine-tuning a pretrained model in full and with adapters: loss, time, memory.

    python benchmarks/finetune.py SmolLM2-135M/

Each way is a process of its own, with the same batches. What follows `--` goes to train.py.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common import print_table

from gptlite.runs.find import checkpoint_of, list_steps

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "all parameters": ["--optimizer.learning-rate", "1e-4"],
    "all but the embedding": [
        *("--training.freeze", "embedding.*"),
        *("--optimizer.learning-rate", "1e-4"),
    ],
    "adapters of rank 8": ["--model.lora", "8", "--optimizer.learning-rate", "1e-3"],
}


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options] MODEL [-- OPTIONS OF train.py]"
    )
    parser.add_argument("model", help="a folder in Hugging Face's format, or a name on the hub")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args(sys.argv[1:end])
    model = arguments.model
    model = os.path.abspath(model) if os.path.isdir(model) else model
    steps = str(arguments.steps)
    words = [
        *("--init-from", f"hf:{model}", "--optimizer.name", "adamw"),
        *("--model.context-length", "256", "--training.batch-size", "4"),
        *("--training.steps", steps, "--training.eval-every", steps),
        *("--training.sample-tokens", "0", "--data.validation-tokens", "8192"),
        *sys.argv[end + 1 :],
    ]
    rows = [[way, *tune([*words, *WAYS[way]])] for way in arguments.ways]
    print_table(
        [
            "trained",
            "numbers",
            "bits per byte before",
            "after",
            "training, s",
            "peak memory, MiB",
            "a checkpoint, MB",
        ],
        rows,
    )


def tune(words: list[str]) -> list[str]:
    """Numbers that are trained, bits per byte before and after, seconds of steps, memory of the
    process, and megabytes of a checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, str(ROOT / "train.py"), *words, "--run", "tuned"]
        process = subprocess.Popen(command, cwd=name, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{' '.join(command)} failed")
        run = Path(name) / "runs" / "tuned"
        newest = checkpoint_of(run, list_steps(run)[0])
        sizes = [file.stat().st_size for file in newest.rglob("*") if file.is_file()]
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        result = json.loads((run / "result.json").read_text())
        (before,) = re.findall(r"\((\S+) bits per byte\)\n", said)[:1]
        trained = re.findall(r"of which ([\d,]+) are trained", said)
        return [
            trained[0] if trained else f"{result['parameters']:,}",
            before,
            f"{result['val_bits_per_byte']:.4f}",
            f"{last['step_seconds']:.0f}",
            f"{used.ru_maxrss / 1024:,.0f}",
            f"{sum(sizes) / 1e6:,.1f}",
        ]


if __name__ == "__main__":
    main()
