"""The README and docs/: what can be seen without running it. (`tests/soak/docs.py` runs it.)"""

import dataclasses
import importlib.util
import inspect
import re

import pytest
from conftest import ROOT
from support.pages import PAGES, check_words, commands, shrink

from gptlite.cli import (
    CompareArguments,
    ConfirmArguments,
    SampleArguments,
    ServeArguments,
    TrainArguments,
)
from gptlite.presets import PRESETS
from gptlite.research.lab import TryArguments
from gptlite.scripts.check_block import check

TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = sorted({command for text in TEXTS.values() for command in commands(text)})
# What imports one of these before it reads its options.
NEEDS = {"python benchmarks/pretrained.py": "torch", "python benchmarks/page.py": "selenium"}


def marked(command: str):
    """`command`, as a parameter that needs what it imports."""
    for words, package in NEEDS.items():
        if command.startswith(words):
            missing = importlib.util.find_spec(package) is None
            skip = pytest.mark.skipif(missing, reason=f"needs {package}")
            return pytest.param(command, marks=[pytest.mark.peers, skip])
    return command


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 150


@pytest.mark.parametrize("command", [marked(command) for command in COMMANDS])
def test_the_options_of_a_command_exist_and_there_is_a_way_to_run_it(command):
    shrink(command)
    check_words(command)


@pytest.mark.parametrize("name", TEXTS)
def test_no_figure_is_said_to_be_of_an_earlier_version(name):
    assert "earlier version" not in " ".join(TEXTS[name].split())


def test_links_lead_to_files():
    pages = [
        *PAGES,
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *(ROOT / "benchmarks").glob("*.md"),
    ]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_presets_are_described():
    for name in PRESETS:
        assert f"`{name}`" in TEXTS["docs/training.md"]


def options(kind: type, prefix: str = "--") -> set[str]:
    """The options of a command, of the fields of its arguments."""
    found = set()
    for field in dataclasses.fields(kind):
        name = field.name.replace("_", "-")
        value = getattr(kind(), field.name)
        if dataclasses.is_dataclass(value):
            hidden = field.name in ("config", "sampling")  # their options have no such prefix
            found |= options(type(value), prefix if hidden else f"{prefix}{name}.")
        found |= {prefix + name, f"{prefix}no-{name}"}
    return found


OURS = set().union(
    {"--kill-on-bad-exit"},  # of SLURM
    {f"--{name.replace('_', '-')}" for name in inspect.signature(check).parameters},
    *(
        options(kind)
        for kind in (TrainArguments, SampleArguments, ServeArguments, CompareArguments)
    ),
    *(
        {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)}
        for kind in (ConfirmArguments, TryArguments)
    ),
    *(
        re.findall(r'"(--[a-z-]+)"', path.read_text(encoding="utf-8"))
        for folder in ("gptlite/scripts", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ),
)


@pytest.mark.parametrize("name", TEXTS)
def test_the_options_that_are_named_exist(name):
    """Other programs' are in their commands, and are written with `=`."""
    for code in re.findall(r"`((?:--|gptlite|python)[^`\n]*)`", TEXTS[name]):
        for option in re.findall(r"(?<!\S)--[a-z0-9._-]+(?![a-z0-9._=-])", code):
            beginning = option.endswith(".") and any(name.startswith(option) for name in OURS)
            assert option in OURS or beginning, option
