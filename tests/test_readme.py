"""What the README says can be done, done."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, TEXT

from gptlite.cli import parse_compare, parse_sample, parse_train
from gptlite.presets import PRESETS

README = (ROOT / "README.md").read_text(encoding="utf-8")


SMALL = (
    "--model.n-layers 1 --model.d-model 16 --model.context-length 16 --training.batch-size 4 "
    "--training.steps 20 --training.eval-every 10 --training.sample-tokens 0"
)


def test_the_block_of_ones_own_is_checked_trained_sampled_and_compared(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "my_blocks.py").write_text(program)
    (tmp_path / "text.txt").write_text(f"ROMEO: {TEXT}")
    commands = re.findall(r"^    python (.*my_blocks\.py:SineMLP.*)$", README, flags=re.MULTILINE)
    assert [words.split()[0] for words in commands] == ["-m", "train.py", "sample.py", "compare.py"]
    small = f"--data.corpus text.txt {SMALL}"
    more = ["", small, "--max-new-tokens 5", f"{small} --seeds 2"]
    said = []
    for words, extra in zip(commands, more, strict=True):
        argv = shlex.split(words.replace("--training.steps 300", "")) + extra.split()
        if argv[0] != "-m":
            argv[0] = str(ROOT / argv[0])
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    checked, trained, sampled, compared = said
    assert checked.startswith(
        "SineMLP (layer, d_model 16, 2,048 parameters) is right: parameters, shapes, "
    )
    assert "code that is not gptlite's: --model.mlp my_blocks.py:SineMLP" in trained
    assert "sample.py --run runs/sine --model.mlp my_blocks.py:SineMLP --prompt=ROMEO:" in trained
    assert len(sampled) == 6
    assert "mlp=my_blocks.py:SineMLP" in compared
    folder = tmp_path / "comparisons" / "comparison"
    assert {path.name for path in folder.iterdir()} >= {"table.txt", "table.csv", "comparison.png"}
    assert (folder / "table.txt").read_text() in compared


@pytest.mark.parametrize("line", re.findall(r"^    python compare\.py (.*)$", README, re.MULTILINE))
def test_its_comparisons_parse(line):
    parse_compare(line.split())


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
