"""Run every command and every Python block in the README and in docs/, with small sizes.

    python tests/soak/docs.py [PAGE.md ...]

A command that matches no rule below is an error, so that a new command gets one.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from conftest import PLAY, TEXT  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = (
    "--model.n-layers 1 --model.n-heads 2 --model.d-model 16 --model.context-length 16 "
    "--training.batch-size 8 --training.accumulation 1 --training.steps 20 "
    "--training.eval-every 10 --training.sample-tokens 0"
)
TRAIN = f"{SMALL} --data.corpus text.txt"
# What is appended to a command that begins so; the first match applies. None: not run here, because
# it is an installation, or .ci/run types it as it stands.
RULES: dict[str, str | None] = {
    "pip install -e . && python train.py": TRAIN,
    'pip install -e ".[test]" && pytest': None,
    'pip install -e ".[bench]"': None,
    'pip install -e ".[tour]" && jupyter lab': None,
    'pip install -e ".[serve]" && python serve.py': "--port 0",
    'pip install -e ".[serve]" "transformers[serving]"': None,
    "python benchmarks/serve.py": "--clients 1 2 --seconds 1 --rounds 1",
    "python benchmarks/page.py": f'--train "{TRAIN.replace("text.txt", "$PWD/text.txt")}"',
    "python tests/soak/serve.py": "--requests 300",
    "python -m gptlite.research.check_block": "",
    "python train.py --resume runs/NAME": None,  # the next command, in general
    "python train.py --init-from": (
        "--data.corpus text.txt --model.context-length 8 --training.batch-size 8 "
        "--training.steps 4 --training.eval-every 2 --training.sample-tokens 4"
    ),
    # The prompts of benchmarks/pretrained.py and their continuations fit into the context.
    "python train.py portable": (
        f"{TRAIN.replace('context-length 16', 'context-length 160')} --data.tokenizer byte"
    ),
    "python -m gptlite.export": "",
    "python benchmarks/pretrained.py": "",
    "python train.py --resume": "--data.corpus text.txt --training.steps 30",
    "python train.py m --summary": "--data.corpus text.txt",
    "python train.py --data.corpus": SMALL,
    'pip install -e ".[cuda]"': None,
    'pip install -e ".[tensorboard,wandb,trackio]"': None,
    "python train.py gpt2 --distributed": None,  # waits for the other: see tests/test_processes.py
    # The preset's own batch, and a sample.
    "python train.py gpt2": (
        "--model.n-layers 1 --model.n-heads 2 --model.d-model 16 --model.context-length 16 "
        "--training.steps 3 --data.corpus text.txt --data.tokenizer byte"
    ),
    "python train.py": TRAIN,
    "python sample.py": "--max-new-tokens 5",
    "echo -n": "",
    "python compare.py --vary model.separate-documents": f"{SMALL} --seeds 2",
    "python compare.py": f"{TRAIN} --seeds 2",
    "python benchmarks/quality.py": TRAIN.replace("text.txt", "$PWD/text.txt"),
    "python benchmarks/gpu.py": (
        "--cpu --shapes S --rounds 1 --steps 2 --peak 0.5 --loss 9 "
        f"-- {TRAIN.replace('text.txt', '$PWD/text.txt')}"
    ),
    "python benchmarks/compile_for.py": (
        "--models 124M --targets h100:8 --model.n-layers 1 --model.n-heads 2 --model.d-model 16 "
        "--model.context-length 16 --data.corpus $PWD/text.txt --data.tokenizer byte"
    ),
    "python benchmarks/vocabulary.py": (
        "--corpora $PWD/text.txt --tokenizers char bpe:300 --seconds 1 -- --model.n-layers 1"
    ),
    "python benchmarks/finetune.py": (
        "--steps 2 -- --data.corpus $PWD/text.txt --model.context-length 8"
    ),
    "python benchmarks/docstrings.py": "",
    "python benchmarks/train_speed.py": "--shapes S --rounds 1",
    "python benchmarks/sample_speed.py": "--shapes S --batches 1 --rounds 1",
    "python benchmarks/startup.py": "--rounds 1",
    "python benchmarks/large_text.py": "--megabytes 2 --rounds 1",
    "python tests/soak/kill_loop.py": "--kills 2",
    "python tests/soak/processes.py": "--kills 1",
    "python tests/soak/slurm.py": None,  # needs a SLURM
    "python benchmarks/step_memory.py": "--preset quick",
    "python tests/soak/memory.py": "--steps 5000",
    "python tests/soak/fuzz.py": "--minutes 0.2",
    "python examples/masked.py": "--steps 2 --corpus play.txt",
    "python examples/reverse.py": "--steps 2",
    "python examples/": "--steps 2 --corpus words.txt",
}
# What the Python blocks take as given.
GIVEN = """
import dataclasses, jax, jax.numpy as jnp
from gptlite import GPT, ModelConfig, presets
from my_blocks import SineMLP
presets.VASWANI = dataclasses.replace(
    presets.VASWANI, n_layers=1, n_heads=2, d_model=16, context_length=16
)
vocab_size, key, words = 13, jax.random.key(0), ["one", "two", "three"]
ids = source = targets = jnp.arange(12).reshape(2, 6)
lengths, tokens = jnp.array([6, 4]), "abcdef"
"""
# The README's block, with an option.
LOW_RANK = """

class LowRankMLP(SineMLP):
    def __init__(self, config, *, rank: int = 4, key):
        super().__init__(dataclasses.replace(config, d_ff=rank), key=key)
"""


def commands(page: str) -> list[str]:
    """The commands on a page: indented lines, and those in tables."""
    found = re.findall(r"^    ((?:pip|python|echo) .*?)(?:  +#.*)?$", page, flags=re.MULTILINE)
    return found + re.findall(r"^\|.*?`(python [^`]*)` \|", page, flags=re.MULTILINE)


def shrink(command: str) -> str | None:
    """The command as it is run here.

    **Raises:** `LookupError` if there is no rule for it.
    """
    beginning = next(filter(command.startswith, RULES), None)
    if beginning is None:
        raise LookupError(f"There is no rule for: {command}")
    more = RULES[beginning]
    if more is None:
        return None
    command = command.removeprefix("pip install -e . && ")
    if command.endswith("python serve.py"):  # it must end as it is told to, with 0
        train = f"python train.py {TRAIN} --run NAME"
        command = f"{train} && timeout --preserve-status 30 python serve.py"
    command = command.replace("roneneldan/TinyStories", "./stories")
    if command.startswith("python benchmarks/serve.py"):  # needs a model's folder
        command = command.replace(" laptop SmolLM2-135M/", "")
    command = command.replace("SmolLM2-135M/", "portable-hf/")
    if beginning == "python benchmarks/quality.py":
        command, _, options = command.partition(" -- ")
        command = f"{command.removesuffix('--seeds 0').strip()} --seeds 0 -- {options}".strip()
    # An option is given once.
    for option in re.findall(r"--[\w.-]+", more):
        command = re.sub(rf"{re.escape(option)} \S+ ?", "", command)
    if command.startswith("echo"):
        command = command.replace("100", "5")
    if " -- " in command and " -- " in more:
        command, _, options = command.partition(" -- ")
        return f"{command} {more} {options}"
    return f"{command} {more}".strip()


def make_files(folder: Path) -> None:
    """What the commands and blocks read."""
    readme = PAGES[0].read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (folder / "my_blocks.py").write_text(f"import dataclasses\n{block}{LOW_RANK}")
    (folder / "text.txt").write_text(f"ROMEO: KING First {TEXT}")
    (folder / "play.txt").write_text(PLAY)
    syllables = [f"{a}{b}" for a in "bdfgklmnp" for b in "aeiou"]
    words = " ".join(f"{a}{b}" for a in syllables for b in syllables)
    (folder / "words.txt").write_text(words)
    (folder / "vectors.txt").write_text("one 1 2 3 4 5 6 7 8\ntwo 2 3 4 5 6 7 8 9\n")
    (folder / "my_notes").mkdir()
    (folder / "my_notes" / "a.txt").write_text(TEXT)
    (folder / "stories").mkdir()
    for split in ("train", "validation"):
        (folder / "stories" / f"{split}.jsonl").write_text(json.dumps({"text": TEXT}))
    scripts = ("train.py", "sample.py", "serve.py", "compare.py")
    for name in (*scripts, "benchmarks", "examples", "tests"):
        (folder / name).symlink_to(ROOT / name)


def run(command: str, folder: Path) -> None:
    """**Raises:** `SystemExit` if the command fails."""
    if "tiktoken" in command and "TIKTOKEN_CACHE_DIR" not in os.environ:
        print(f"skipped, because tiktoken's files are not in ../shared: {command}", flush=True)
        return
    compilers = ("jax_cuda13_plugin", "libtpu")
    if re.search("compile.for", command) and not all(map(importlib.util.find_spec, compilers)):
        print(f"skipped, because .[aot] is not installed: {command}", flush=True)
        return
    if "benchmarks/page.py" in command and shutil.which("chromedriver") is None:
        print(f"skipped, because there is no chromedriver: {command}", flush=True)
        return
    began = time.monotonic()
    devices = "8" if "--mesh" in command else "2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": devices}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=environment
    )
    print(f"{time.monotonic() - began:5.0f} s  {command[:120]}", flush=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> None:
    measured: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        for page in PAGES:
            if len(sys.argv) > 1 and page.name not in sys.argv[1:]:
                continue
            print(page.relative_to(ROOT), flush=True)
            folder = Path(name) / page.stem
            folder.mkdir()
            make_files(folder)
            text = page.read_text(encoding="utf-8")
            for command in filter(None, map(shrink, commands(text))):
                if command not in measured:
                    run(command, folder)
                if "benchmarks/" in command or "soak/" in command:  # needs nothing of its page
                    measured.add(command)
            blocks = re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL)
            if blocks:
                (folder / "blocks.py").write_text("\n".join([GIVEN, *blocks]))
                run("python blocks.py", folder)


if __name__ == "__main__":
    main()
