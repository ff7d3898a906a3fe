"""Training steps compiled for GPUs and TPUs that need not be there.

    python benchmarks/compile_for.py

Each row is a command, `gptlite estimate ... --for TARGET`. Options that this program does
not know go to all of them. It needs the compilers (`pip install "gptlite-jax[aot]"`), and an hour.
"""

import argparse
import re
import shlex
import subprocess
import sys

from common import print_table

BASE = "gpt2 --training.accumulation 1"
SCAN = "--model.stack scan --model.remat block"
MODELS = {
    "124M": BASE,
    "1.5B": f"{BASE} --model.n-layers 48 --model.n-heads 25 --model.d-model 1600",
    "7B": f"{BASE} --model.n-layers 32 --model.n-heads 32 --model.d-model 4096 --model.mlp swiglu "
    "--model.norm rms --model.positions rotary --model.no-bias --model.no-tied-head "
    f"--model.context-length 4096 {SCAN}",
}
# Model, rows of the batch, target and what else a user would choose for it.
ROWS = [
    ("124M", 32, "h100:1", ""),
    ("124M", 256, "h100:8", ""),
    ("124M", 2048, "h100:64", ""),
    ("124M", 64, "v5e:2x4", ""),
    ("124M", 2048, "v5e:16x16", ""),
    ("124M", 256, "v5p:2x2x2", ""),
    ("124M", 2048, "v5p:4x4x4", ""),
    ("124M", 8192, "v5p:8x16x16", ""),
    ("1.5B", 16, "h100:1", "--model.remat block"),
    ("1.5B", 128, "h100:8", "--mesh.fsdp 8"),
    ("1.5B", 1024, "h100:64", "--mesh.fsdp 8"),
    ("1.5B", 64, "v5e:2x4", f"{SCAN} --mesh.fsdp 8"),
    ("1.5B", 2048, "v5e:16x16", f"{SCAN} --mesh.fsdp 16"),
    ("1.5B", 128, "v5p:2x2x2", f"{SCAN} --mesh.fsdp 8"),
    ("1.5B", 1024, "v5p:4x4x4", f"{SCAN} --mesh.fsdp 16"),
    ("1.5B", 8192, "v5p:8x16x16", f"{SCAN} --mesh.fsdp 16"),
    ("7B", 1, "h100:1", ""),
    ("7B", 32, "h100:8", "--mesh.fsdp 8"),
    ("7B", 512, "h100:64", "--mesh.fsdp 64"),
    ("7B", 512, "h100:64", "--mesh.fsdp 8"),
    ("7B", 1024, "h100:1024", "--mesh.fsdp 8"),
    ("7B", 1024, "h100:1024", "--mesh.fsdp 64"),
    ("7B", 8, "v5e:2x4", "--mesh.fsdp 8 --optimizer.state-dtype bfloat16"),
    ("7B", 512, "v5e:16x16", "--mesh.fsdp 16"),
    ("7B", 512, "v5e:16x16", "--mesh.fsdp 256"),
    ("7B", 32, "v5p:2x2x2", "--mesh.fsdp 8"),
    ("7B", 256, "v5p:4x4x4", "--mesh.fsdp 64"),
    ("7B", 256, "v5p:4x4x4", "--mesh.fsdp 16"),
    ("7B", 4096, "v5p:8x16x16", "--mesh.fsdp 16"),
]
RECEIVED = ("gathered", "reduced", "other")
HEADER = ("rows", "devices", "options", "memory, GB", *RECEIVED, "links", "step", "MFU")
REDUCED = ("all-reduce", "reduce-scatter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--targets", help="only these: h100 for all of its rows, or h100:8")
    arguments, more = parser.parse_known_args()
    names = {name for *_, target, _ in ROWS for name in (target, target.partition(":")[0])}
    if arguments.targets not in {None, *names}:
        parser.error(f"--targets must be one of {', '.join(sorted(names))}")
    for model in arguments.models:
        table = []
        for name, rows, target, options in ROWS:
            wanted = (None, target, target.partition(":")[0])
            if name == model and arguments.targets in wanted:
                words = f"--training.batch-size {rows} {options} --for {target}"
                report = compile_for(f"{MODELS[model]} {words}", more)
                table.append([f"{rows:,}", target, f"`{options}`" * bool(options), *read(report)])
        print(f"\n{model}: `gptlite estimate {MODELS[model]}`\n")
        print_table(HEADER, table)


def compile_for(words: str, more: list[str]) -> str:
    """What `gptlite estimate` prints."""
    print(f"gptlite estimate {words}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "gptlite.estimate", *words.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stderr}")
    return done.stdout


def read(report: str) -> list[str]:
    """GB of a device's memory, and of what it receives; milliseconds; MFU."""

    def number(name: str) -> str:
        (found,) = re.findall(rf"^  {name} +([\d.e-]+)", report, flags=re.MULTILINE)
        return f"{float(found):.1f}"

    if "It does not fit: " in report:  # a TPU's compiler has refused it
        return ["does not fit", *[""] * 6]
    received = dict(re.findall(r"received, ([\w-]+) +([\d.e-]+)", report))
    size = {kind: float(gigabytes) for kind, gigabytes in received.items()}
    reduced = sum(size.get(kind, 0) for kind in REDUCED)
    gathered = size.get("all-gather", 0.0)
    other = sum(size.values()) - reduced - gathered
    (mfu,) = re.findall(r"MFU at most (\d+)%", report)
    memory = number("in all") + ": does not fit" * ("it does not fit" in report)
    exchanged = [f"{x:.1f}" if x >= 0.05 else "" for x in (gathered, reduced, other)]
    return [memory, *exchanged, number("links"), number("a step"), f"{mfu} %"]


if __name__ == "__main__":
    main()
