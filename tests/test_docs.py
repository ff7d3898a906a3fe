"""The README and docs/: what can be seen without running it. (`tests/soak/docs.py`, which `.ci/run`
starts, runs all of it.)"""

import re
import shlex

import pytest
from conftest import ROOT
from soak.docs import PAGES, commands, shrink

from gptlite.cli import parse_compare, parse_sample, parse_serve, parse_train
from gptlite.presets import PRESETS

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
COMMANDS = sorted({command for text in TEXTS.values() for command in commands(text)})


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 200


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_run_by_ci_and_its_options_exist(command):
    shrink(command)
    words = shlex.split(re.sub(r".*\| |>.*| -- .*", "", command))
    if words[1] == "train.py":
        kept = " ".join(word for word in words[2:] if "runs/" not in word and word != "--resume")
        # It would read that folder, which adapters need.
        parse_train(re.sub(r"--(init-from|model\.lora) \S+ ?", "", kept).split())
    if words[1] == "sample.py":
        parse_sample(words[2:])
    if words[1] == "serve.py":
        parse_serve(words[2:])
    if words[1] == "compare.py":
        parse_compare(words[2:])


def test_links_lead_to_files():
    for name, text in TEXTS.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / link).exists(), f"{name}: {link}"


def test_presets_are_described():
    for name in PRESETS:
        assert f"`{name}`" in TEXTS["training.md"]
