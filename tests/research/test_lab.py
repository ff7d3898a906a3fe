"""One command checks, tunes and compares, and says by its code how that ended."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TEXT

from gptlite.errors import UserError
from gptlite.machine.files import lock
from gptlite.research import (
    before_training,
    check_block,
    comparison as comparison_module,
    conduct,
    lab,
    speed,
)
from gptlite.research.lab import BETTER, BROKEN, NOT_BETTER, NOT_JUDGED, try_variant
from gptlite.research.ledger import Ledger, Tuned, Variant
from gptlite.research.seeds import SeedsProgress
from gptlite.research.statistics import bound

SMALL = """--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
    --model.context-length 16 --training.batch-size 4"""
BLOCK = """
import equinox as eqx

class Scaled(eqx.Module):
    factor: float

    def __init__(self, config, *, key, factor: float = 1.0):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x
"""


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Losses that fall by what the factor of a block is; a step of six seeds takes 0.1 s. No block
    is checked."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("lab_blocks.py").write_text(BLOCK)
    asked = []

    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        training, name = config.training, str(config.model.mlp)
        factor = float(name.rpartition("=")[2]) if "Scaled" in name else 0.0
        if training.steps < 1000:  # else it is measured
            asked.append((name, training.steps, list(seeds)))
        every = min(training.eval_every, training.log_every)
        for step in (*range(every, training.steps, every), training.steps):
            losses = None
            if step % training.eval_every == 0 or step == training.steps:
                off = abs(math.log(config.optimizer.learning_rate / 0.02)) / 10
                losses = [2 + s % 7 / 10 - factor + off + 0.001 * (s % 3) * factor for s in seeds]
            yield SeedsProgress(step, training.steps, losses, 0.1 * step)

    report = SimpleNamespace(kind="layer")
    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    monkeypatch.setattr(speed, "fit_seeds", fit_seeds)
    for module in (check_block, before_training):
        monkeypatch.setattr(module, "check_block", lambda *_, **__: report)
    yield asked
    sys.modules.pop("lab_blocks", None)


def attempt(block, more="", minutes=5.0):
    return try_variant([block, "--minutes", str(minutes), *SMALL.split(), *more.split()])


def ledger():
    return Ledger(Path("comparisons/lab/ledger.jsonl"))


@pytest.mark.parametrize(
    ("factor", "code"), [(0.1, BETTER), (0.0, NOT_BETTER), (-0.1, NOT_BETTER), (math.nan, BROKEN)]
)
def test_the_code_is_the_verdict(made_up, factor, code):
    assert attempt(f"lab_blocks.py:Scaled:factor={factor}") == code


def test_later_tries_train_as_many_steps_and_the_base_no_more(made_up, capsys):
    attempt("lab_blocks.py:Scaled:factor=0.0")
    # Four groups of seeds at 0.1 s a step, in nine tenths of five minutes.
    steps = {n for _, n, seeds in made_up if seeds == list(range(6))}
    (n,) = steps
    assert n in (660, 670)
    assert "steps fit: 0.100 s for a step of 6 seeds" in capsys.readouterr().out
    made_up.clear()
    attempt("lab_blocks.py:Scaled:factor=0.1", "--json")
    assert {name for name, *_ in made_up} == {"lab_blocks.py:Scaled:factor=0.1"}
    assert {n for _, n, _ in made_up} == steps
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4
    tried = lines[-1]
    assert (tried["verdict"], tried["seeds"]) == ("better", 6)
    assert [v.level for v in ledger().of(Variant) if v.level] == [0.025, pytest.approx(0.05 / 6)]


def test_a_base_of_another_version_is_no_base(made_up):
    """Whose config has other fields now."""
    attempt("training.batch-size=8")
    steps = {n for _, n, _ in made_up}
    ledger().append(Variant("99" * 8, "old", None, None, None, {"model": {"gone": 1}}, {}, 1, 1))
    ledger().append(Variant("98" * 8, "older", None, None, None, {}, {}, 1, 1))
    made_up.clear()
    attempt("training.batch-size=6")
    assert {n for _, n, _ in made_up} == steps


def test_it_is_tuned_and_fewer_steps_are_trained(made_up):
    more = "--tune optimizer.learning_rate --tune-points 3"
    attempt("lab_blocks.py:Scaled:factor=0.1", more)
    assert len(list(ledger().of(Tuned))) == 6
    # As many groups of seeds as 2 x 3 x 2 / 6 more.
    steps = {n for _, n, seeds in made_up if seeds == list(range(6))}
    (n,) = steps
    assert n in (440, 450)
    made_up.clear()
    attempt("lab_blocks.py:Scaled:factor=0.05", more)
    assert {n for _, n, seeds in made_up if seeds == list(range(6))} == steps


def test_a_setting_may_be_tried(made_up):
    attempt("training.batch-size=8")
    assert ledger().variants
    assert [v.config["training"]["batch_size"] for v in ledger().of(Variant) if v.level] == [8]


def test_there_is_no_verdict_by_too_few_seeds(made_up, capsys):
    """Which says nothing about the variant."""
    assert attempt("training.batch-size=8", "--seeds 2") == NOT_JUDGED
    assert "no verdict on training.batch-size=8: too few seeds" in capsys.readouterr().err
    with lock(Path("comparisons/lab/.lock"), ""):
        assert attempt("training.batch-size=8", "--seeds 2") == NOT_JUDGED
    assert "is being run by another process" in capsys.readouterr().err


def test_a_later_variant_is_judged_by_more_seeds_in_the_same_time(made_up, monkeypatch):
    """Its level is too low for one group of five."""
    now = [0.0]
    monkeypatch.setattr(conduct.time, "perf_counter", lambda: now[0])
    fit_seeds = comparison_module.fit_seeds

    def slow(config, tokenizer, seeds, split, **options):
        for progress in fit_seeds(config, tokenizer, seeds, split, **options):
            now[0] += 0.1 * config.training.log_every * len(seeds) / 6
            yield progress

    monkeypatch.setattr(comparison_module, "fit_seeds", slow)
    monkeypatch.setattr(conduct, "GROUP", 5)
    monkeypatch.setattr(conduct, "group_size", lambda devices: 5)
    for number in range(6):
        factor = 0.1 + number / 100
        assert attempt(f"lab_blocks.py:Scaled:factor={factor}") == BETTER, number
    levels = [v.level for v in ledger().of(Variant) if v.level]
    assert bound(5, levels[-1]) == math.inf


def test_a_base_that_was_never_trained_fixes_no_steps(made_up, monkeypatch):
    """Those that fitted when the machine did other work are not those that fit now."""
    attempt("training.batch-size=8", "--training.steps 100 --training.eval-every 50")
    path = ledger().path
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))  # opened, and a base
    assert len(list(ledger().of(Variant))) == 1
    made_up.clear()
    attempt("training.batch-size=8")
    (n,) = {n for _, n, _ in made_up}
    assert n in (660, 670)


def test_a_block_in_a_setting_is_checked_too(made_up, monkeypatch):
    def broken(*_, **__):
        raise check_block.CheckError("Scaled", [("causal", "it sees the future")])

    monkeypatch.setattr(before_training, "check_block", broken)
    block = "lab_blocks.py:Scaled:factor=0.1"
    with pytest.raises(UserError, match=rf"mlp {block} is not trained\. causal: it sees the futu"):
        attempt(f"model.mlp={block}")
    assert not made_up
    attempt(f"model.mlp={block}", "--no-check-blocks")
    assert made_up


def test_a_broken_block_is_not_trained(made_up, monkeypatch, capsys):
    def broken(*_, **__):
        raise check_block.CheckError("Scaled", [("causal", "it sees the future")])

    monkeypatch.setattr(check_block, "check_block", broken)
    assert attempt("lab_blocks.py:Scaled") == BROKEN
    assert "causal: it sees the future" in capsys.readouterr().out
    assert not made_up
    assert not Path("comparisons").exists()


def test_what_a_block_replaces(made_up, monkeypatch):
    report = SimpleNamespace(kind="model")
    monkeypatch.setattr(check_block, "check_block", lambda *_, **__: report)
    with pytest.raises(UserError, match=r"Scaled is a model: --part says what it replaces"):
        attempt("lab_blocks.py:Scaled")
    attempt("lab_blocks.py:Scaled", "--part norm --training.steps 20 --training.eval-every 10")
    assert [v.config["model"]["norm"] for v in ledger().of(Variant)][-1] == "lab_blocks.py:Scaled"


def test_minutes_that_are_too_few_are_said(made_up, capsys):
    assert attempt("lab_blocks.py:Scaled", minutes=0.01) == NOT_JUDGED
    said = capsys.readouterr().err
    assert re.search(r"0\.0 minutes are too short .* 50 steps would take 0\.[345]", said)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", 0, "my_blocks.py:Mine --minutes 5"),
        ("--help", 0, "my_blocks.py:Mine --minutes 5"),
        ("attempt x", BROKEN, "There is no command attempt: there is try."),
        ("try nothing.py:Mine", BROKEN, "There is no file nothing.py with the class Mine."),
        ("try a.py:B --minutes 0", BROKEN, "minutes must be above 0"),
        ("try a.py:B --vary model.norm=dyt", BROKEN, "A try is of one variant"),
        ("try model.norm=dyt,layer", BROKEN, "A try is of one variant"),
        ("try norm=layer", BROKEN, "or training, such as model.norm=layer, got 'norm=layer'"),
        ("try data.tokenizer=byte", BROKEN, "or of a setting of model, optimizer or training"),
        ("try a.py:B --name ../a", BROKEN, "--name takes the name of a folder"),
    ],
)
def test_the_command_line(monkeypatch, capsys, tmp_path, words, code, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lab", *words.split()])
    with pytest.raises(SystemExit) as ended:
        lab.main()
    assert (ended.value.code or 0) == code
    output = capsys.readouterr()
    assert said in output.out + output.err


def test_a_mistake_of_the_program_is_not_a_verdict(monkeypatch, capsys):
    def fails(argv):
        raise RuntimeError("a mistake")

    monkeypatch.setitem(lab.COMMANDS, "try", fails)
    monkeypatch.setattr(sys, "argv", ["lab", "try"])
    with pytest.raises(SystemExit) as ended:
        lab.main()
    assert ended.value.code == BROKEN
    assert "RuntimeError: a mistake" in capsys.readouterr().err
