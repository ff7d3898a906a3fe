"""The README and docs/: what can be seen without running it. (`tests/soak/docs.py` runs it.)"""

import importlib.util
import re

import pytest
from conftest import ROOT
from support.pages import PAGES, check_words, commands, shrink

from gptlite.presets import PRESETS

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
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
    assert len(TEXTS["README.md"].splitlines()) <= 200


@pytest.mark.parametrize("command", [marked(command) for command in COMMANDS])
def test_the_options_of_a_command_exist_and_there_is_a_way_to_run_it(command):
    shrink(command)
    check_words(command)


def test_links_lead_to_files():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_presets_are_described():
    for name in PRESETS:
        assert f"`{name}`" in TEXTS["training.md"]
