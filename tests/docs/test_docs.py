"""The README and docs/: what can be seen without running it. (`tests/soak/docs.py` runs it.)"""

import re

import pytest
from conftest import ROOT
from support.pages import PAGES, check_words, commands, shrink

from gptlite.presets import PRESETS

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = sorted({command for text in TEXTS.values() for command in commands(text)})
# What imports PyTorch or Selenium before it reads its options.
NEEDS_PEERS = ("python benchmarks/pretrained.py", "python benchmarks/page.py")


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 200


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.peers if command.startswith(NEEDS_PEERS) else ())
        for command in COMMANDS
    ],
)
def test_the_options_of_a_command_exist_and_there_is_a_way_to_run_it(command):
    shrink(command)
    check_words(command)


def test_links_lead_to_files():
    for name, text in TEXTS.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / link).exists(), f"{name}: {link}"


def test_presets_are_described():
    for name in PRESETS:
        assert f"`{name}`" in TEXTS["training.md"]
