"""What the README says can be done, done."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

from gptlite.cli import parse_sample, parse_train
from gptlite.config import PRESETS

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_block_of_ones_own_trains(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    shorter = program.replace("steps=100, eval_every=50", "steps=40, eval_every=20, batch_size=4")
    assert shorter != program
    (tmp_path / "own.py").write_text(shorter)
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["20", "40"]
    assert float(lines[1][2]) < float(lines[0][2]) < 4.5


@pytest.mark.parametrize("line", re.findall(r"^    python (train.py.*?)(?: +#.*)?$", README, re.M))
def test_its_training_commands_parse(line):
    # (The runs to be resumed are made up.)
    parse_train(re.sub(r"--resume \S+", "", line).split()[1:])


@pytest.mark.parametrize("line", re.findall(r"python (sample\.py[^|>\n]*)", README))
def test_its_sampling_commands_parse(line):
    parse_sample([word.strip('"') for word in line.split()[1:]])


def test_its_presets_are_the_presets():
    for name in PRESETS:
        assert f"`{name}`" in README
