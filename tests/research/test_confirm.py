"""A variant is confirmed on the validation text, from new seeds, and each look counts."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from conftest import TEXT, refusal

from gptlite.cli import parse_comparison
from gptlite.errors import UserError
from gptlite.research import comparison as comparison_module
from gptlite.research.comparison import APART, CONFIRM_SEED
from gptlite.research.ledger import Confirmed, Confirming, Failed, Ledger, Runs, Variant
from gptlite.research.seeds import SeedsProgress
from gptlite.research.statistics import level
from gptlite.scripts.compare import compare

SMALL = """
    --data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
    --model.context-length 16 --training.steps 4 --training.eval-every 2
"""
BLOCK = """
import equinox as eqx
class {name}(eqx.Module):
    def __init__(self, config, *, key):
        pass
    def __call__(self, x):
        return {factor} * x
"""


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """What is trained, made up: a seed's losses on the two texts; three layers are better."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    asked = []

    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        asked.append((config.model.n_layers, list(seeds), len(split.train), split.validation))
        gain = 0.1 if config.model.n_layers == 3 else 0.0
        for step in range(config.training.eval_every, config.training.steps + 1, 2):
            noise = [0.001 * math.sin(seed) * config.model.n_layers for seed in seeds]
            losses = [2.0 + s % 7 / 10 - gain + x for s, x in zip(seeds, noise, strict=True)]
            yield SeedsProgress(step, config.training.steps, losses, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    return asked


def command(words, more=""):
    compare(parse_comparison([*words.split(), *more.split()]))


def ledger():
    return Ledger(Path("comparisons/one/ledger.jsonl"))


def test_new_seeds_judge_on_the_validation_text(trained, capsys):
    command("--name one --seeds 5 --vary model.n-layers=3,2 --no-again", SMALL)
    of_choice = trained[0]
    trained.clear()
    capsys.readouterr()
    command("confirm one n-layers=3 --data.corpus text.txt --seeds 8 --seeds-at-once 5 --json")
    record = json.loads(capsys.readouterr().out)
    first = CONFIRM_SEED
    assert [(layers, seeds) for layers, seeds, _, _ in trained] == [
        (layers, seeds)
        for layers in (1, 3)
        for seeds in (list(range(first, first + 5)), list(range(first + 5, first + 8)))
    ]
    for _, _, n_train, validation in trained:
        assert n_train == of_choice[2]  # the choice text is still held out
        assert len(validation) == len(of_choice[3])
        assert validation.tolist() != of_choice[3].tolist()
    assert record["confirmed"] == "better"
    assert record["difference"] == pytest.approx(-0.1, abs=0.01)
    assert (record["level"], record["tried"]) == (level(0), 2)
    # Nothing of it is a result on the choice text.
    used = {seed for runs in ledger().of(Runs) for seed in runs.seeds}
    assert used == set(range(5))


def test_each_look_counts_and_none_is_taken_twice(trained, monkeypatch):
    command("--name one --seeds 5 --vary model.n-layers=3,2 --no-again", SMALL)
    command("confirm one n-layers=2 --data.corpus text.txt")
    with pytest.raises(UserError, match="n-layers=2 was judged on the validation text before: no"):
        command("confirm one n-layers=2 --data.corpus text.txt")

    def fails(*_, **__):
        raise RuntimeError("no memory")
        yield

    fit_seeds = comparison_module.fit_seeds
    monkeypatch.setattr(comparison_module, "fit_seeds", fails)
    with pytest.raises(RuntimeError):
        command("confirm one n-layers=3 --data.corpus text.txt")
    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    command("confirm one n-layers=3 --data.corpus text.txt")
    looks = list(ledger().of(Confirming))
    assert [look.level for look in looks] == [level(0), level(1), level(2)]
    assert [look.seeds[0] - CONFIRM_SEED for look in looks] == [0, APART, 2 * APART]
    assert [x.words for x in ledger().of(Confirmed)] == ["no difference found", "better"]
    assert len(list(ledger().of(Failed))) == 1


def test_what_was_edited_or_never_tried_is_not_confirmed(trained):
    Path("lab_block.py").write_text(BLOCK.format(name="Mine", factor=2))
    options = f"--name one --seeds 5 --no-again {SMALL}"
    command("--vary model.mlp=lab_block.py:Mine --vary model.n-layers=2", options)
    name, text = "mlp=lab_block.py:Mine", "--data.corpus text.txt"
    with pytest.raises(UserError, match=r"executed only if the command names a file with that"):
        command(f"confirm one {name} {text}")
    with pytest.raises(UserError, match=r"The comparison comparisons.one was trained on text\.txt"):
        command(f"confirm one {name} --custom lab_block.py")
    Path("lab_block.py").write_text(BLOCK.format(name="Mine", factor=3))
    with pytest.raises(
        UserError, match=rf"{name} is not as it was tried any more: lab_block\. Try"
    ):
        command(f"confirm one {name} {text} --custom lab_block.py")
    # Elsewhere, but as it was.
    Path("other").mkdir()
    Path("other/lab_block.py").write_text(BLOCK.format(name="Mine", factor=2))
    Path("lab_block.py").unlink()
    command(f"confirm one {name} {text} --custom other/lab_block.py")
    for wrong in ("nothing", "base (quick)"):
        with pytest.raises(
            UserError, match=rf"has no variant {wrong[:4]}.*: it has mlp=lab_bl.*n-l"
        ):
            compare(parse_comparison(["confirm", "one", wrong, "--data.corpus", "text.txt"]))
    with pytest.raises(UserError, match=r"There is no comparison comparisons.two: there is no fil"):
        command("confirm two n-layers=2")


def test_a_variant_that_was_tried_in_several_ways_is_named_by_its_checksum(trained):
    words = "--name one --seeds 5 --vary model.n-layers=3 --no-again"
    for more in ("", "--training.steps 8", "", "--equal tokens"):
        command(words, f"{SMALL} {more}")
    name = "confirm one n_layers=3 --data.corpus text.txt"
    judged = [v for v in ledger().of(Variant) if v.level is not None]
    assert [(v.config["training"]["steps"], v.equal) for v in judged] == [
        (4, "steps"),
        (8, "steps"),
        (4, "tokens"),
    ]
    several = "".join(
        f".*{v.variant} .training.steps {v.config['training']['steps']}, equal {v.equal}"
        for v in reversed(judged)
    )
    with pytest.raises(UserError, match=f"n-layers=3 was tried in several ways.*{several}"):
        command(name)
    assert not list(ledger().of(Confirming))
    command(name.replace("n_layers=3", judged[0].variant))
    assert [look.variant for look in ledger().of(Confirming)] == [judged[0].variant]


def test_another_base_is_told(trained):
    words = "--name one --seeds 5 --vary model.norm=dyt --no-again"
    for norm in ("rms", "layer"):
        command(words, f"{SMALL} --model.norm {norm}")
    with pytest.raises(
        UserError,
        match=r"\(the base's model\.norm layer\), \w{16} \(the base's model\.norm rms\)\.",
    ):
        command("confirm one norm=dyt --data.corpus text.txt")


def test_an_edited_version_is_the_one_that_is_confirmed(trained):
    """The checksum of the earlier one does not name it."""
    words = "--name one --seeds 5 --vary model.mlp=lab_again.py:Again --no-again"
    for factor in (2, 3):
        Path("lab_again.py").write_text(BLOCK.format(name="Again", factor=factor))
        command(words, SMALL)
    earlier, edited = [v.variant for v in ledger().of(Variant) if v.level is not None]
    text = "--data.corpus text.txt --custom lab_again.py"
    with pytest.raises(UserError, match=r"is not as it was tried any more: lab_again\. Try it"):
        command(f"confirm one {earlier} {text}")
    assert not list(ledger().of(Confirming))
    command(f"confirm one mlp=lab_again.py:Again {text}")
    assert [look.variant for look in ledger().of(Confirming)] == [edited]


def test_an_edit_that_was_undone_does_not_stand_in_the_way(trained, monkeypatch):
    """Though the edited version, with values of its own, was tried later."""
    block = Path("lab_tuned.py")
    fit_seeds = comparison_module.fit_seeds

    def fit(config, tokenizer, seeds, split, **options):
        best = 0.08 if "3 * x" in block.read_text() else 0.005
        off = abs(math.log(config.optimizer.learning_rate / best)) / 10
        for x in fit_seeds(config, tokenizer, seeds, split, **options):
            losses = x.val_losses and [loss + off for loss in x.val_losses]
            yield SeedsProgress(x.step, x.steps, losses, x.step_seconds)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit)
    tune = "--tune optimizer.learning_rate=0.005,0.08 --tune-points 3"
    for factor in (2, 3, 2):
        block.write_text(BLOCK.format(name="Tuned", factor=factor))
        words = f"--name one --seeds 5 --vary model.mlp=lab_tuned.py:Tuned --no-again {tune}"
        command(words, SMALL)
    first, edited = [v for v in ledger().of(Variant) if v.level is not None]
    assert first.config["optimizer"] != edited.config["optimizer"]
    command("confirm one mlp=lab_tuned.py:Tuned --data.corpus text.txt --custom lab_tuned.py")
    assert [look.variant for look in ledger().of(Confirming)] == [first.variant]


def test_a_variant_that_was_not_trained_is_not_confirmed(trained):
    command("--name one --seeds 5 --vary model.n-layers=3 --no-again", SMALL)
    path = Path("comparisons/one/ledger.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if '"n-layers=3"' in line)
    path.write_text("".join(lines[: end + 1]))  # entered, and no more
    with pytest.raises(UserError, match="n-layers=3 was not trained on the choice text before"):
        command("confirm one n-layers=3 --data.corpus text.txt")
    shutil.rmtree("comparisons")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("confirm ../one a", "NAME takes the name of a folder"),
        ("confirm one a --seeds 1", "seeds must be at least 2"),
        ("confirm one a --seed 1", "did you mean --seeds"),
        ("confirm one", "variant|VARIANT"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(words, said):
    assert re.search(said, str(refusal(parse_comparison, words.split())))
