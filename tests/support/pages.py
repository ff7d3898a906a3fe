"""The commands and Python blocks of the README and of docs/: how they are found, and made small."""

import contextlib
import functools
import json
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import tyro
from conftest import PLAY, ROOT, TEXT, run_script

from gptlite.cli import (
    parse_comparison,
    parse_forecast,
    parse_sample,
    parse_serve,
    parse_train,
)
from gptlite.research.lab import parse_try
from gptlite.scripts.estimate import parse_estimate

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    'pip install "gptlite-jax[bench]"': None,
    'pip install -e ".[tour]" && jupyter lab': None,
    'pip install -e ".[serve]" && python serve.py': "--port 0",
    'pip install "gptlite-jax[serve]" && gptlite serve': "--port 0",
    'pip install "gptlite-jax[serve]" "transformers[serving]"': None,
    "python benchmarks/serve.py": "--clients 1 2 --seconds 1 --rounds 1",
    "python benchmarks/page.py": f'--train "{TRAIN.replace("text.txt", "$PWD/text.txt")}"',
    "python tests/soak/serve.py": "--requests 300",
    "gptlite check-block": "",
    "gptlite train --resume runs/NAME": None,  # the next command, in general
    "gptlite train --init-from": (
        "--data.corpus text.txt --model.context-length 8 --training.batch-size 8 "
        "--training.steps 4 --training.eval-every 2 --training.sample-tokens 4"
    ),
    # The prompts of benchmarks/pretrained.py and their continuations fit into the context.
    "gptlite train portable": (
        f"{TRAIN.replace('context-length 16', 'context-length 160')} --data.tokenizer byte"
    ),
    "gptlite export": "",
    "python benchmarks/pretrained.py": "",
    "gptlite train --resume": "--data.corpus text.txt --training.steps 30",
    "gptlite estimate m": "--data.corpus text.txt",
    "gptlite estimate gpt2": (
        "--model.n-layers 1 --model.n-heads 2 --model.d-model 16 --model.context-length 16 "
        "--data.corpus text.txt --data.tokenizer byte"
    ),
    "gptlite train --data.corpus": SMALL,
    'pip install "gptlite-jax[cuda]"': None,
    'pip install "gptlite-jax[tensorboard,wandb,trackio]"': None,
    "gptlite train gpt2 --distributed": None,  # waits for the other: see test_processes.py
    # The preset's own batch, and a sample.
    "gptlite train gpt2": (
        "--model.n-layers 1 --model.n-heads 2 --model.d-model 16 --model.context-length 16 "
        "--training.steps 3 --data.corpus text.txt --data.tokenizer byte"
    ),
    "gptlite train --minutes": (
        "--minutes 0.1 --data.corpus text.txt --model.context-length 16 --training.sample-tokens 0"
    ),
    # It trains a dozen models; see tests/planning/test_forecast.py.
    "gptlite forecast": None,
    "gptlite train --model.n-layers 4": TRAIN.replace("n-layers 1", "n-layers 4"),
    "gptlite train": TRAIN,
    "gptlite sample": "--max-new-tokens 5",
    "echo -n": "",
    "gptlite compare --name noise": f"{TRAIN} --seeds 4",
    "gptlite compare confirm": "--data.corpus text.txt --seeds 2",
    "gptlite compare --vary model.separate-documents": f"{SMALL} --seeds 2 --no-again",
    "gptlite compare": f"{TRAIN} --seeds 2 --no-again",
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
    "python benchmarks/laboratory.py": "--repeats 10",
    "python benchmarks/nulls.py": f"-- {TRAIN.replace('text.txt', '$PWD/text.txt')}",
    "python benchmarks/one_gain.py": f"--variants 3 -- {TRAIN} --seeds 2 --no-again",
    "python benchmarks/train_speed.py": "--shapes S --rounds 1",
    "python benchmarks/sample_speed.py": "--shapes S --batches 1 --rounds 1",
    "python benchmarks/startup.py": "--rounds 1",
    "python benchmarks/large_text.py": "--megabytes 2 --rounds 1",
    "python benchmarks/token_scan.py": "--rounds 1",
    "python benchmarks/states.py operator": "--seq 64 --rounds 1",
    "python benchmarks/states.py": "--mixers full linear --contexts 256 --read 100 --rounds 1",
    "python benchmarks/forecasts.py": None,  # of ladders, which take half an hour each
    "python benchmarks/transfer.py": "--widths 64 --depths 2 --steps 10",
    "python tests/soak/kill_loop.py": "--kills 2",
    "python tests/soak/processes.py": "--kills 1",
    "python tests/soak/slurm.py": None,  # needs a SLURM
    "python benchmarks/step_memory.py": "--preset quick",
    "python tests/soak/memory.py": "--steps 5000",
    "python tests/soak/fuzz.py": "--minutes 0.2",
    "python examples/masked.py": "--steps 2 --corpus play.txt",
    "python examples/reverse.py": "--steps 2",
    "python examples/": "--steps 2 --corpus words.txt",
    # It ends with 1 where no difference was found.
    "python -m gptlite.research.lab try": f"{TRAIN} --seeds 4 --no-again || [ $? = 1 ]",
    "python train.py": TRAIN,
    "python sample.py": "--max-new-tokens 5",
    "python compare.py": f"{TRAIN} --seeds 2 --no-again",
}
# Before the Python blocks: a smaller model.
GIVEN = """
import dataclasses
from gptlite.family import presets
presets.VASWANI = dataclasses.replace(
    presets.VASWANI, n_layers=1, n_heads=2, d_model=16, context_length=16
)
"""

PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "train": parse_train,
    "sample": parse_sample,
    "serve": parse_serve,
    "compare": parse_comparison,
    "forecast": parse_forecast,
    "estimate": parse_estimate,
    "gptlite.research.lab": lambda words: parse_try(words[1:]),
}


def is_nightly(command: str) -> bool:
    """Whether it measures, or takes long, and is run each night, not for each commit."""
    # That one writes a dataset.
    makes_data = command.startswith("python benchmarks/docstrings.py")
    return command.startswith(("python benchmarks/", "python tests/soak/")) and not makes_data


def commands(page: str) -> list[str]:
    """The commands on a page: indented lines, and those in tables."""
    found = re.findall(
        r"^    ((?:pip|python|gptlite|echo) .*?)(?:  +#.*)?$", page, flags=re.MULTILINE
    )
    return found + re.findall(r"^\|.*?`((?:python|gptlite) [^`]*)` \|", page, flags=re.MULTILINE)


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
    command = re.sub(r"^pip install .*? && ", "", command)
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
    texts = [page.read_text("utf-8") for page in (PAGES[0], ROOT / "docs" / "blocks.md")]
    # The README's block, and the same with an option.
    blocks = re.findall(r"```python\n(.*?)```", "".join(texts), flags=re.DOTALL)
    assert len(blocks) == 2
    (folder / "my_blocks.py").write_text("\n\n".join(["import dataclasses", *blocks]))
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
    scripts = ("train.py", "sample.py", "serve.py", "compare.py", "forecast.py")
    for name in (*scripts, "benchmarks", "examples", "tests"):
        (folder / name).symlink_to(ROOT / name)


class ParsedError(Exception):
    """The words of a command line are right."""


@contextlib.contextmanager
def parsing_alone() -> Iterator[None]:
    """A script that is run in this block raises `ParsedError` when it has parsed its words."""
    parse, cli = ArgumentParser.parse_known_args, tyro.cli

    def parse_known_args(self: ArgumentParser, *args: Any, **options: Any) -> Any:
        found, rest = parse(self, *args, **options)
        # `parse_args` refuses what is left over; others pass that on.
        if rest and sys._getframe(1).f_code.co_name == "parse_args":
            return found, rest
        raise ParsedError

    def only_parse(main: Any, **options: Any) -> Any:
        @functools.wraps(main)
        def stop(*args: Any, **options: Any) -> None:
            raise ParsedError

        cli(stop, **options)

    with (
        mock.patch.object(ArgumentParser, "parse_known_args", parse_known_args),
        mock.patch.object(tyro, "cli", only_parse),
    ):
        yield


def check_words(command: str) -> None:
    """Parse the options of a command as its script does, without running it. Installations have
    none.

    **Raises:** `AssertionError`, `SystemExit` or `UserError` if it refuses them.
    """
    words = shlex.split(re.sub(r"^pip install .*? && |.*\| |>.*", "", command))
    if words[0] not in ("python", "gptlite"):
        return
    words = words[words[1] == "-m" :]  # python -m MODULE
    script = words[1].removesuffix(".py")
    if script in PARSERS:
        # The folder of a run that does not exist would be read.
        rest = " ".join(word for word in words[2:] if "runs/" not in word and word != "--resume")
        rest = re.sub(r"--(init-from|model\.lora) \S+ ?", "", rest)
        PARSERS[script](rest.split() if script == "train" else words[2:])
        return
    with parsing_alone(), contextlib.suppress(ParsedError):
        done = run_script(*words[words[0] == "python" :], folder=ROOT)
        raise AssertionError(done.err or f"{command} has not parsed its words")
