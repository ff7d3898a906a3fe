"""Comparisons with made-up losses: what is trained, kept, looked at, stopped and told."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import shlex
from pathlib import Path

import msgspec
import pytest
from conftest import TEXT, TINY, refusal

from gptlite.cli import parse_compare
from gptlite.config import Config, DataConfig, TrainingConfig
from gptlite.custom import load_custom
from gptlite.errors import UserError, require
from gptlite.research import (
    comparison as comparison_module,
    conduct as conduct_module,
    plots,
)
from gptlite.research.comparison import AGAIN_SEED, Comparison
from gptlite.research.conduct import Clock, NotJudgedError, conduct
from gptlite.research.equal import Equal
from gptlite.research.journal import NotWrittenError
from gptlite.research.ledger import Failed, Ledger, Look, Runs, Variant
from gptlite.research.report import records, table, to_csv, words
from gptlite.research.results import AGAIN, missed_of, tolerance_of
from gptlite.research.seeds import SeedsProgress
from gptlite.research.speed import MISSED
from gptlite.research.statistics import LEVEL, level
from gptlite.runs.plots import save_picture
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.scripts.compare import compare
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
BASE = Config(
    model=TINY,
    training=TrainingConfig(
        steps=8, batch_size=4, log_every=4, eval_every=4, compute_dtype="float32"
    ),
)


def with_model(**fields):
    return dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, **fields))


DEEPER = with_model(n_layers=3)
BOTH = {"base": BASE, "deeper": DEEPER}
BOTH_5 = {"base": BASE, "5": with_model(n_layers=5)}
# What a model's losses are below those of the base, by its layers, and how much that varies.
GAINS = {1: (0.0, 0.0), 3: (0.1, 0.01), 4: (0.0, 0.05), 5: (-0.1, 0.01)}


@pytest.fixture
def trained(monkeypatch):
    """What is trained, made up: seed s of the base ends at 2 + s / 10."""
    asked = []

    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        n_layers, steps = config.model.n_layers, config.training.steps
        asked.append((n_layers, steps, list(seeds), list(drawn_from)))
        gain, varies = GAINS[n_layers]
        for place in (1, 2):
            losses = [
                4 - place + seed / 10 - gain + varies * ((7 * draw) % 5 - 2) / 2
                for seed, draw in zip(seeds, drawn_from, strict=True)
            ]
            yield SeedsProgress(place * steps // 2, steps, losses, place * len(seeds) * 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    return asked


def entered(folder, configs=BOTH, equal: Equal = "steps", *, again=False, split=SPLIT):
    comparison = Comparison(folder, TOKENIZER, split)
    comparison.enter(comparison.made_equal(configs, equal), equal, again=again)
    return comparison


def run(comparison, name, seeds):
    return list(comparison.train(name, seeds))


def tried(folder, configs, **options):
    """All of them, trained from a seed."""
    comparison = entered(folder, configs, **options)
    for name in comparison.names:
        run(comparison, name, comparison.missing(name, [0]) or [1])
    return comparison


def test_the_choice_text_is_neither_trained_on_nor_the_validation_text(monkeypatch, tmp_path):
    seen = []

    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        seen.append(split)
        yield SeedsProgress(8, 8, [1.0 for _ in seeds], 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    run(entered(tmp_path), "base", [0])
    n = len(SPLIT.validation)
    assert seen[0].train.tolist() == SPLIT.train[:-n].tolist()
    assert seen[0].validation.tolist() == SPLIT.train[-n:].tolist()


def test_what_was_trained_is_kept(trained, tmp_path):
    run(entered(tmp_path), "base", [0, 1])
    comparison = entered(tmp_path)
    assert comparison.missing("base", range(4)) == [2, 3]
    assert comparison.missing("deeper", range(2)) == [0, 1]
    run(comparison, "base", [2, 3])
    (base, _) = comparison.results()
    assert base.losses == pytest.approx({0: 2.0, 1: 2.1, 2: 2.2, 3: 2.3})
    assert base.evaluated_at == [4, 8]
    assert base.curves[3] == pytest.approx([3.3, 2.3])
    assert base.seconds == pytest.approx(2.0)
    assert base.verdict is None


def test_a_variant_gets_its_level_when_it_is_first_tried(trained, tmp_path):
    first = tried(tmp_path, {"base": BASE, "a": with_model(n_layers=3)}, again=True)
    assert first.tried == 1
    three = {"base": BASE} | {str(n): with_model(n_layers=n) for n in (3, 4, 5)}
    assert entered(tmp_path, three).tried == 1  # nothing was learnt of them
    second = tried(tmp_path, three, again=True)
    assert second.tried == 3  # under another name, it is the same
    levels = {v.name: v.level for v in second.ledger.of(Variant)}
    assert levels == {
        "base": None,
        AGAIN: None,
        "a": level(0),
        "4": pytest.approx(level(1, 2)),
        "5": pytest.approx(level(1, 2)),
    }


def test_an_interrupted_command_goes_on_with_the_same_levels(trained, tmp_path):
    three = {"base": BASE} | {str(n): with_model(n_layers=n) for n in (3, 4, 5)}
    comparison = entered(tmp_path, three)
    run(comparison, "base", [0])
    assert comparison.tried == 0
    run(comparison, "3", [0])
    assert comparison.tried == 3
    again = tried(tmp_path, three)
    assert [v.level for v in again.ledger.of(Variant)] == [None, *[level(0, 3)] * 3]


def test_what_is_trained_alike_is_not_tried_twice(tmp_path):
    """Fields that decide nothing, and a block that is named in two ways."""
    idle = dataclasses.replace(BASE.training, log_every=2)
    (tmp_path / "lab_same.py").write_text(
        "import equinox as eqx\nclass Mine(eqx.Module):\n"
        "    def __init__(self, config, *, key): pass\n    def __call__(self, x): return x\n"
    )
    names = ("lab_same.py:Mine", "./lab_same.py:Mine")
    with contextlib.chdir(tmp_path):
        blocks = [
            dataclasses.replace(BASE, model=load_custom(dataclasses.replace(TINY, mlp=name)))
            for name in names
        ]
    for configs, said in (
        (BOTH | {"idle": dataclasses.replace(BASE, training=idle)}, "idle is trained just as base"),
        (BOTH | dict(zip("ab", blocks, strict=True)), "b is trained just as a: leave it out"),
        (BOTH | {"same": DEEPER}, "same is trained just as deeper"),
    ):
        with pytest.raises(UserError, match=said):
            entered(tmp_path / "new", configs)


def test_a_null_variant_is_not_better_because_it_is_compared_alone(trained, tmp_path):
    """Its level is the one that it got among others, and the table still has them all."""
    many = {"base": BASE} | {str(n): with_model(n_layers=n) for n in (3, 4, 5)}
    conduct(entered(tmp_path, many), 10)
    alone = entered(tmp_path, {"base": BASE, "4": with_model(n_layers=4)})
    results = {result.name: result for result in alone.results()}
    assert list(results) == ["base", "3", "4", "5"]
    assert records([results["4"]])[0]["level"] == level(0, 3)
    assert [words(result) for result in results.values()][1:3] == ["better", "no difference found"]


def test_the_same_variant_of_edited_code_is_another_one(trained, tmp_path, monkeypatch):
    conduct(entered(tmp_path), 10)
    done = len(trained)
    conduct(entered(tmp_path), 10)
    assert len(trained) == done
    of = comparison_module.code_of
    monkeypatch.setattr(comparison_module, "code_of", lambda c: of(c) | {"gptlite.nn.mlp": "00"})
    edited = entered(tmp_path)
    assert edited.missing("base", range(2)) == [0, 1]
    assert edited.tried == 1
    edited = tried(tmp_path, BOTH)
    assert edited.tried == 2
    # Only those of the code as it is now are compared.
    assert [result.name for result in edited.results()] == ["base", "deeper"]
    # With an edit of a variant's own file, base and older versions stay.
    monkeypatch.setattr(
        comparison_module, "code_of", lambda c: of(c) | {"mine": "1"} if c.n_layers == 3 else of(c)
    )
    own = entered(tmp_path)
    assert own.missing("base", range(2)) == []
    assert own.missing("deeper", range(2)) == [0, 1]
    names = [result.name for result in own.results()]
    assert names == ["base", "deeper (an earlier version)", "deeper"]


def test_another_text_in_the_same_folder_is_refused(trained, tmp_path):
    entered(tmp_path)
    other = dataclasses.replace(SPLIT, sha256="0" * 64)
    with pytest.raises(UserError, match="is a comparison on another text"):
        entered(tmp_path, split=other)
    fewer = split_corpus(text_corpus(TEXT), TOKENIZER, 50)
    with pytest.raises(UserError, match=r"or another data\.validation_tokens: choose another"):
        entered(tmp_path, split=fewer)


def test_an_option_of_a_block_may_have_slashes(tmp_path, monkeypatch):
    """What follows the last one does not make two variants the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab_paths.py").write_text(
        "import equinox as eqx\nclass Mine(eqx.Module):\n"
        "    def __init__(self, config, *, key, path: str = ''): pass\n"
        "    def __call__(self, x): return x\n"
    )
    models = [
        load_custom(dataclasses.replace(TINY, mlp=f"lab_paths.py:Mine:path={path}"))
        for path in ("one/end", "two/end")
    ]
    blocks = [dataclasses.replace(BASE, model=model) for model in models]
    comparison = entered(tmp_path, {"base": BASE} | dict(zip("ab", blocks, strict=True)))
    a, b = (comparison.result(name).variant.variant for name in "ab")
    assert a != b


def test_what_decides_nothing_is_the_same_variant(trained, tmp_path):
    idle = dataclasses.replace(BASE.training, save_seconds=7, cpu_devices=1, log_every=2)
    run(entered(tmp_path), "base", [0])
    idle = entered(tmp_path, BOTH | {"base": dataclasses.replace(BASE, training=idle)})
    assert idle.missing("base", [0]) == []
    fewer = dataclasses.replace(BASE, data=DataConfig(max_tokens=900))
    assert entered(tmp_path, BOTH | {"base": fewer}).missing("base", [0]) == [0]


def test_a_variant_that_cannot_be_built_is_refused_before_it_is_entered(tmp_path):
    training = dataclasses.replace(BASE.training, freeze="embedding.*,stack.*")
    optimizer = dataclasses.replace(BASE.optimizer, name="muon")
    for wrong, said in (
        (with_model(mlp="relu2:rank=4"), r"model\.mlp relu2 has no option rank"),
        (
            dataclasses.replace(BASE, training=training, optimizer=optimizer),
            "muon is for the matrices of a Stack, and none is trained",
        ),
        (with_model(context_length=10_000), "training text is too short"),
    ):
        with pytest.raises(UserError, match=said):
            entered(tmp_path, BOTH | {"wrong": wrong})
    assert len(Comparison(tmp_path, TOKENIZER, SPLIT).ledger.entries) == 1


def test_a_failure_is_written_down(trained, tmp_path, monkeypatch):
    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        yield SeedsProgress(4, 8, [2.0 for _ in seeds], 1.0)
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    comparison = entered(tmp_path)
    with pytest.raises(RuntimeError):
        run(comparison, "deeper", [0, 1])
    (failed,) = comparison.ledger.of(Failed)
    assert (failed.seeds, failed.reason) == ([0, 1], "RuntimeError: RESOURCE_EXHAUSTED")
    assert comparison.missing("deeper", [0, 1]) == [0, 1]


def test_a_variant_that_fails_does_not_stop_the_others(trained, tmp_path, monkeypatch, capsys):
    fit_seeds = comparison_module.fit_seeds

    def fails(config, *args, **options):
        if config.model.n_layers == 4:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        yield from fit_seeds(config, *args, **options)

    monkeypatch.setattr(comparison_module, "fit_seeds", fails)
    configs = {"base": BASE} | {str(n): with_model(n_layers=n) for n in (4, 3)}
    comparison = entered(tmp_path, configs, again=True)
    assert conduct(comparison, 12) == ["4"]
    assert "RuntimeError: RESOURCE_EXHAUSTED" in capsys.readouterr().out
    results = {result.name: result for result in comparison.results()}
    said = {name: (words(result), len(result.curves)) for name, result in results.items()}
    assert said["3"] == ("better", 6)
    assert said["4"] == ("failed", 0)
    assert comparison.tried == 2  # it counts
    # The same again tries it again.
    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    assert conduct(entered(tmp_path, configs, again=True), 12) == []
    found = {result.name: words(result) for result in entered(tmp_path, configs).results()}
    assert found["4"] == "no difference found"
    # Without a base, there is nothing.
    monkeypatch.setattr(comparison_module, "fit_seeds", fails)
    other = entered(tmp_path, {"4": with_model(n_layers=4), "3": DEEPER})
    with pytest.raises(RuntimeError):
        conduct(other, 12)


def test_a_variant_that_does_not_fit_into_memory_does_not_stop_the_others(
    trained, tmp_path, monkeypatch, capsys
):
    fit_seeds, append = comparison_module.fit_seeds, Ledger.append

    def fails(config, *args, **options):
        require(config.model.n_layers != 4, "A training step takes 9 GiB.")
        yield from fit_seeds(config, *args, **options)

    monkeypatch.setattr(comparison_module, "fit_seeds", fails)
    configs = {"base": BASE} | {str(n): with_model(n_layers=n) for n in (4, 3)}
    comparison = entered(tmp_path, configs)
    assert conduct(comparison, 6) == ["4"]
    printed = capsys.readouterr().out
    assert "\nA training step takes 9 GiB.\n4 failed" in printed
    assert "Traceback" not in printed
    assert [words(result) for result in comparison.results()] == ["", "failed", "better"]

    # But nothing goes on if nothing can be written down.
    def full(self, entry):
        if isinstance(entry, Runs):
            raise NotWrittenError("No space left.")
        append(self, entry)

    monkeypatch.setattr(Ledger, "append", full)
    trained.clear()
    with pytest.raises(NotWrittenError):
        conduct(entered(tmp_path, {"base": BASE, "5": with_model(n_layers=5)}), 6)
    assert [n_layers for n_layers, *_ in trained] == [5]


def test_without_the_base_again_there_is_a_verdict(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    fit_seeds = comparison_module.fit_seeds

    def fails(*args, drawn_from=()):
        assert min(drawn_from) < AGAIN_SEED, "no luck"
        yield from fit_seeds(*args, drawn_from=drawn_from)

    monkeypatch.setattr(comparison_module, "fit_seeds", fails)
    words = """--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
        --model.context-length 16 --training.steps 4 --training.eval-every 4
        --vary model.n-layers=3 --name one --json --seeds 5"""
    compare(parse_compare(words.split()))
    found = capsys.readouterr()
    assert "base again failed: it gets no more seeds" in found.err
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [line["verdict"] for line in lines] == ["", "failed", "better"]


def test_a_failure_is_said_at_the_end(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    fit_seeds = comparison_module.fit_seeds

    def fails(config, *args, **options):
        yield from () if config.model.n_layers == 4 else fit_seeds(config, *args, **options)
        assert config.model.n_layers != 4

    monkeypatch.setattr(comparison_module, "fit_seeds", fails)
    words = """--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
        --model.context-length 16 --training.steps 4 --training.eval-every 4 --no-again
        --vary model.n-layers=4,3 --name one --json --seeds 5"""
    with pytest.raises(UserError, match=r"The training of n-layers=4 failed: see above\."):
        compare(parse_compare(words.split()))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["verdict"] for line in lines] == ["", "failed", "better"]
    assert "failed" in Path("comparisons/one/table.txt").read_text()


def test_custom_blocks_are_checked_before_they_are_trained(trained, tmp_path, monkeypatch):
    """One that sees the next token would be better by far."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("lab_leak.py").write_text(
        "import equinox as eqx\nimport jax.numpy as jnp\nfrom gptlite.nn import MLP\n"
        "class Leak(eqx.Module):\n    mlp: MLP\n"
        "    def __init__(self, config, *, key):\n"
        "        self.mlp = MLP(config.d_model, 2, std=0.1, down_std=0.1, key=key)\n"
        "    def __call__(self, x): return self.mlp(x + jnp.roll(x, -1, axis=-2))\n"
    )
    words = """--data.corpus text.txt --model.n-layers 3 --model.n-heads 2 --model.d-model 16
        --model.context-length 16 --training.steps 4 --training.eval-every 4 --no-again
        --vary model.mlp=lab_leak.py:Leak --name one --seeds 2"""
    with pytest.raises(UserError, match=r"mlp lab_leak\.py:Leak is not trained\. causal: "):
        compare(parse_compare(words.split()))
    assert not trained
    compare(parse_compare([*words.split(), "--no-check-blocks"]))
    assert len(trained) == 2
    # That it was trained once does not make it right.
    with pytest.raises(UserError, match=r"mlp lab_leak\.py:Leak is not trained\. causal: "):
        compare(parse_compare(words.split()))


def test_variants_that_are_decided_get_no_more_seeds(trained, tmp_path):
    configs = {"base": BASE} | {str(n): with_model(n_layers=n) for n in (3, 4, 5)}
    comparison = entered(tmp_path, configs, again=True)
    conduct(comparison, 18, at_once=6)
    results = {result.name: result for result in comparison.results()}
    said = {name: (words(result), len(result.curves)) for name, result in results.items()}
    assert said == {
        "base": ("", 18),
        AGAIN: ("chance alone", 18),
        "3": ("better", 6),
        "4": ("no difference found", 18),
        "5": (words(results["5"]), 0),
    }
    # The base again has first parameters of its own, and the batches of its seed.
    drawn = [drawn for n, _, seeds, drawn in trained if drawn != seeds]
    assert drawn == [list(range(i + AGAIN_SEED, i + AGAIN_SEED + 6)) for i in (0, 6, 12)]
    # Nor does it, where all others are decided.
    decided = entered(tmp_path / "decided", {"base": BASE, "3": DEEPER}, again=True)
    conduct(decided, 18, at_once=6)
    assert [len(result.curves) for result in decided.results()] == [6, 6, 6]
    # Each look is written down, once.
    looks = [(look.variant, look.seeds, look.words) for look in comparison.ledger.of(Look)]
    assert [words for _, seeds, words in looks if seeds == 6].count("better") == 1
    assert len(looks) == len(set(looks)) == 7


def test_a_variant_is_stopped_when_its_curve_is_behind(trained, tmp_path):
    comparison = entered(tmp_path, {"base": BASE, "5": with_model(n_layers=5)})
    conduct(comparison, 12, at_once=6)
    (stopped,) = [run for run in comparison.ledger.of(Runs) if run.stopped]
    assert stopped.evaluated_at == [4]
    assert stopped.stopped.startswith("stopped at step 4 of 8, behind the base by 0.0983 ± 0.0")
    assert comparison.missing("5", range(12)) == []
    # Unless that is not wanted.
    patient = entered(tmp_path / "patient", BOTH_5)
    conduct(patient, 12, at_once=6, early=False)
    assert words(patient.results()[1]) == "worse"
    # It is as little trained again as one that is decided.
    n = len(trained)
    conduct(entered(tmp_path, {"base": BASE, "5": with_model(n_layers=5)}), 12, at_once=6)
    assert len(trained) == n
    assert len([run for run in comparison.ledger.of(Runs) if run.stopped]) == 1
    # After it was trained to its end, it is decided, and the base gets no more seeds either.
    assert words(entered(tmp_path / "patient", BOTH_5).results()[1]) == "worse"
    again = entered(tmp_path, BOTH_5)
    conduct(again, 6, at_once=6, early=False)
    n = len(trained)
    conduct(again, 18, at_once=6)
    assert len(trained) == n


def test_no_variant_is_stopped_in_its_first_half(trained, tmp_path, monkeypatch):
    """Many are behind at first."""

    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        behind = 0.1 if config.model.n_layers == 3 else 0.0
        for step in range(1, 9):
            behind *= step < 4
            yield SeedsProgress(step, 8, [9 - step + s / 10 + behind for s in seeds], 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    often = dataclasses.replace(BASE.training, eval_every=1)
    configs = {name: dataclasses.replace(config, training=often) for name, config in BOTH.items()}
    comparison = entered(tmp_path, configs)
    conduct(comparison, 6)
    assert not [run for run in comparison.ledger.of(Runs) if run.stopped]


def test_seeds_that_do_not_fit_into_memory_are_trained_after_each_other(
    trained, tmp_path, monkeypatch
):
    monkeypatch.setattr(comparison_module, "free_memory", lambda: 40_000_000)
    comparison = entered(tmp_path)
    fitting = comparison.seeds_that_fit("base")
    assert fitting > 1
    monkeypatch.setattr(comparison_module, "free_memory", lambda: 80_000_000)
    assert comparison.seeds_that_fit("base") == pytest.approx(2 * fitting, abs=2)
    monkeypatch.setattr(comparison, "seeds_that_fit", lambda name: 2)
    conduct(comparison, 5, at_once=5)
    assert [seeds for _, _, seeds, _ in trained] == [[0, 1], [2, 3], [4]] * 2


def test_minutes_bound_what_is_begun(trained, tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(conduct_module.time, "perf_counter", lambda: now[0])
    fit_seeds = comparison_module.fit_seeds

    def slow(*args, **options):
        for progress in fit_seeds(*args, **options):
            now[0] += 30.0
            yield progress

    monkeypatch.setattr(comparison_module, "fit_seeds", slow)
    configs = {"base": BASE, "4": with_model(n_layers=4)}
    comparison = entered(tmp_path, configs)
    # Half a minute before the first line, which is half of the steps.
    with pytest.raises(UserError, match=r"2 times 5 seeds, .* 3\.0 minutes here"):
        conduct(comparison, 20, at_once=5, clock=Clock(1.5))
    assert comparison.tried == 0  # the variant's share is not spent
    now[0] = 0.0
    conduct(comparison, 20, at_once=5, clock=Clock(4.5))
    assert now[0] == 240.0
    assert "no more seeds: the 4.5 minutes are used up" in capsys.readouterr().out
    assert [len(result.curves) for result in comparison.results()] == [10, 10]
    # What has been trained costs nothing.
    conduct(entered(tmp_path, configs), 10, at_once=5, clock=Clock(0.01))
    # Parts of a group, which do not fit into memory together, are in the plan.
    now[0] = 0.0
    comparison = entered(tmp_path / "parts", configs)
    monkeypatch.setattr(comparison, "seeds_that_fit", lambda name: 2)
    with pytest.raises(NotJudgedError, match=r"2 times 5 seeds, .* 6\.0 minutes here"):
        conduct(comparison, 20, at_once=5, clock=Clock(4.5))

    # What is known to take too long after its first seconds has not been tried.
    def slower(config, tokenizer, seeds, split, *, drawn_from=()):
        for step in (2, 4, 6, 8):
            now[0] += 30.0
            yield SeedsProgress(step, 8, [2.0 for _ in seeds] if step == 8 else None, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", slower)
    comparison = entered(tmp_path, {"base": BASE, "3": DEEPER})
    with pytest.raises(NotJudgedError, match=r"1 times 5 seeds, .* 2\.5 minutes here"):
        conduct(comparison, 10, at_once=5, clock=Clock(2.4))
    assert comparison.tried == 1


def test_a_verdict_that_is_shown_is_in_the_ledger(trained, tmp_path, monkeypatch):
    """Also where there was no time for all variants of a group, or a command was interrupted."""
    now, configs = [0.0], BOTH | {"4": with_model(n_layers=4)}
    monkeypatch.setattr(conduct_module.time, "perf_counter", lambda: now[0])
    fit_seeds = comparison_module.fit_seeds

    def slow(config, *args, **options):
        for progress in fit_seeds(config, *args, **options):
            now[0] += 30.0 if config.model.n_layers == 1 else 60.0
            yield progress

    monkeypatch.setattr(comparison_module, "fit_seeds", slow)
    comparison = entered(tmp_path, configs)
    conduct(comparison, 6, clock=Clock(4.6))
    assert [len(result.curves) for result in comparison.results()] == [6, 6, 0]
    assert [look.words for look in comparison.ledger.of(Look)] == ["better"]

    for name in ("base", "deeper"):
        run(entered(tmp_path / "interrupted"), name, range(6))
    conduct(entered(tmp_path / "interrupted"), 6)
    (look,) = entered(tmp_path / "interrupted").ledger.of(Look)
    assert look.words == "better"


def test_other_numbers_of_tokens_are_said(trained, tmp_path, capsys):
    training = dataclasses.replace(BASE.training, batch_size=6)
    wide = dataclasses.replace(BASE, training=training)
    comparison = entered(tmp_path, BOTH | {"wide": wide})
    assert comparison.more_tokens() == {"wide": 1.5}
    conduct(comparison, 2)
    assert "wide reads 1.5 times the tokens of the base" in capsys.readouterr().out
    assert entered(tmp_path, BOTH | {"wide": wide}, "tokens").more_tokens() == {}


def test_equal_tokens_and_flops(trained, tmp_path):
    wide = dataclasses.replace(
        DEEPER, training=dataclasses.replace(BASE.training, batch_size=8), model=DEEPER.model
    )
    comparison = entered(tmp_path, BOTH | {"wide": wide}, "tokens")
    assert run(comparison, "deeper", [0])[-1].steps == 8
    assert run(comparison, "wide", [0])[-1].steps == 4
    comparison = entered(tmp_path, BOTH | {"wide": wide}, "flops")
    assert run(comparison, "base", [0])[-1].steps == 8
    deeper = run(comparison, "deeper", [0])[-1].steps
    assert 2 <= deeper <= 4  # three layers of one, and the same head
    assert run(comparison, "wide", [0])[-1].steps == pytest.approx(deeper / 2, abs=0.5)


def test_equal_time_counts_what_its_error_may_make(trained, tmp_path, monkeypatch):
    measured = iter([[0.25, 0.5, 0.75] * 5, [0.5] * 15])
    monkeypatch.setattr(comparison_module, "speed_ratios", lambda *_: next(measured))
    comparison = entered(tmp_path, equal="time")
    for seeds in (range(6), range(6, 12)):
        run(comparison, "base", seeds)
        assert run(comparison, "deeper", seeds)[-1].steps == 4
    base, deeper = comparison.results()
    # Of 30 ratios, the interval of the median is from the 7th to the 24th: 0.5 to 0.5. After the
    # first 15, it was from 0.25 to 0.75, and anything could have been its doing.
    assert words(deeper) == "better"
    first = dataclasses.replace(base, curves={s: c for s, c in base.curves.items() if s < 6})
    del comparison.ledger.speeds[deeper.variant.variant][1:]
    variant = next(v for v in comparison.ledger.of(Variant) if v.name == "deeper")
    # The logarithm of 2, times 1 nat in the second half of the curve, which doubles the steps.
    assert tolerance_of(comparison.ledger, variant, first) == pytest.approx(1.0)
    assert words(comparison.results()[1]) == "no difference found"


def test_what_an_error_of_the_speed_may_make(trained, tmp_path, monkeypatch):
    ratios = [0.9] * 5 + [1.0] * 5 + [1.1] * 5
    monkeypatch.setattr(comparison_module, "speed_ratios", lambda *_: ratios)
    comparison = entered(tmp_path, equal="time")
    run(comparison, "base", range(6))
    run(comparison, "deeper", range(6))
    base, deeper = comparison.results()
    ledger, variant = comparison.ledger, deeper.variant
    # Of 15 ratios, more than the outermost are needed for a lower probability.
    strict = msgspec.structs.replace(variant, level=1e-3)
    assert (missed_of(variant), missed_of(strict)) == (MISSED, 1e-4)
    usual = tolerance_of(ledger, variant, base)
    assert 0 < usual < math.inf
    assert tolerance_of(ledger, msgspec.structs.replace(variant, level=1e-5), base) == math.inf
    # A seed that diverged says nothing of the slope.
    diverged = dataclasses.replace(base, curves={**base.curves, 9: [3.0, math.nan]})
    assert tolerance_of(ledger, variant, diverged) == usual
    # A curve that rises again: its largest change in the second half counts.
    rising = dataclasses.replace(
        base, evaluated_at=[2, 4, 6, 8], curves={0: [3.0, 2.0, 1.5, 1.9], 1: [3.0, 2.0, 1.5, 1.9]}
    )
    falling = dataclasses.replace(rising, curves={0: [3.0, 2.0, 1.9, 1.6], 1: [3.0, 2.0, 1.9, 1.6]})
    assert tolerance_of(ledger, variant, rising) == pytest.approx(
        tolerance_of(ledger, variant, falling)
    )


def test_a_table_tells_what_is_equal_where_that_differs(trained, tmp_path):
    conduct(entered(tmp_path), 5)
    comparison = entered(tmp_path, BOTH, "tokens")
    assert [result.name for result in comparison.results()] == [
        "base",
        "deeper (equal steps)",
        "deeper",
    ]


def test_equal_time_needs_the_slope_of_the_curve(tmp_path):
    late = dataclasses.replace(BASE, training=dataclasses.replace(BASE.training, eval_every=5))
    with pytest.raises(UserError, match=r"training\.eval-every must be at most 4, got 5"):
        entered(tmp_path, BOTH | {"base": late}, "time")


def test_equal_parameters(tmp_path):
    gated = with_model(mlp="swiglu", d_ff=None)
    comparison = entered(tmp_path, {"base": with_model(d_ff=None), "gated": gated}, "parameters")
    base, variant = (result.variant for result in comparison.results())
    assert variant.parameters == pytest.approx(base.parameters, rel=0.01)
    assert variant.config["model"]["d_ff"] < 4 * TINY.d_model
    with pytest.raises(UserError, match=r"cannot have the [\d,]+ parameters of the base: with"):
        entered(tmp_path, BOTH, "parameters")


def test_seeds_that_diverge_are_kept_and_said(monkeypatch, tmp_path):
    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        bad = config.model.n_layers == 3
        yield SeedsProgress(8, 8, [math.nan if bad and s == 1 else 2.0 + s for s in seeds], 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    comparison = entered(tmp_path)
    conduct(comparison, 12, at_once=3)
    results = comparison.results()
    assert "diverged (1 of 3 seeds)" in table(results, 1)
    assert records(results)[1]["losses"]["1"] is None
    plots.comparison(results).savefig(tmp_path / "picture.png")
    comparison = entered(tmp_path, {"deeper": DEEPER, "base": BASE})
    conduct(comparison, 12, at_once=3)
    assert "the base diverged (1 of 3 seeds)" in table(comparison.results(), 2)


def test_the_report(trained, tmp_path):
    comparison = entered(tmp_path, BOTH | {"4": with_model(n_layers=4)}, again=True)
    conduct(comparison, 12)
    results = comparison.results()
    lines = table(results, comparison.tried).splitlines()
    rows = {line[:10].strip(): line for line in lines[2:6]}
    assert list(rows) == ["base", AGAIN, "deeper", "4"]
    assert rows["base"].split()[1:3] == ["2.5500", "±"]
    assert "-0.1" in rows["deeper"]
    assert rows["deeper"].endswith("better")
    assert rows["4"].endswith("no difference found")
    assert lines[0].index("verdict") == rows["deeper"].index("better")
    assert "which are 2: the probability" in lines[-1]
    assert f"at most {LEVEL:.0%}" in lines[-1]
    found = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert [float(found[0][f"loss_seed_{seed}"]) for seed in range(12)] == list(
        results[0].losses.values()
    )
    assert [row["verdict"] for row in found] == [
        "",
        "chance alone",
        "better",
        "no difference found",
    ]
    of_json = json.loads(json.dumps(records(results), allow_nan=False))
    assert [row["verdict"] for row in of_json] == [row["verdict"] for row in found]
    assert of_json[2]["difference"] == float(found[2]["difference"]) < 0
    assert of_json[3]["found_from"] > 0.03
    named = [dataclasses.replace(result, name=rf"{result.name} $\no$") for result in results]
    for drawn in (results, named):  # a name may look like a formula
        save_picture(plots.comparison(drawn), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "picture.png").unlink()
    figure = plots.comparison(results)
    figure.suptitle(r"$\no$")
    with pytest.raises(OSError, match="Matplotlib cannot draw it: "):
        save_picture(figure, tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()


def test_a_log_says_what_is_trained(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    words = """--data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
        --model.context-length 16 --training.steps 4 --training.eval-every 4 --no-again
        --vary model.n-layers=4 --seeds-at-once 5 --seeds"""
    for seeds, training in ("2", "2 seeds"), ("3", "1 seed"), ("3", None):
        compare(parse_compare([*words.split(), seeds]))
        lines = capsys.readouterr().out.splitlines()
        names = [line for line in lines if line.startswith("training ")]
        variants = ("base (quick)", "n-layers=4")
        wanted = [f"training {name}, {training} ..." for name in variants]
        assert names == (wanted if training else [])
    compare(parse_compare([*words.split(), "3", "--json"]))
    output = capsys.readouterr()
    found = [json.loads(line) for line in output.out.splitlines()]
    assert [row["variant"] for row in found] == ["base (quick)", "n-layers=4"]
    assert "n-layers=4: -0.0000, too few seeds to tell" in output.err


def test_the_command_line():
    words = (
        "--base s --vary model.norm=layer,rms,dyt --vary model.mlp=moe:n_experts=8+model.n-layers=2"
        " --vary model.bias=true,false --vary optimizer.name=muon --training.steps 9"
    )
    arguments, variants = parse_compare(words.split())
    base = variants.pop("base (s)")
    assert arguments.config == base
    assert (base.training.steps, base.model.norm, base.model.bias) == (9, "layer", False)
    found = {
        name: (c.model.norm, c.model.mlp, c.model.n_layers, c.model.bias, c.optimizer.name)
        for name, c in variants.items()
    }
    assert found == {  # what is the base itself is not trained twice
        "norm=rms": ("rms", "gelu", 4, False, "adamw"),
        "norm=dyt": ("dyt", "gelu", 4, False, "adamw"),
        "mlp=moe:n_experts=8 n-layers=2": ("layer", "moe:n_experts=8", 2, False, "adamw"),
        "bias=true": ("layer", "gelu", 4, True, "adamw"),
        "optimizer.name=muon": ("layer", "gelu", 4, False, "muon"),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "nothing to compare: give --vary"),
        ("--vary model.norm=rms", "nothing to compare"),
        ("--vary model.norm", "--vary takes SECTION.FIELD=VALUE,VALUE,..., got 'model.norm'"),
        ("--vary data.tokenizer=byte", "fields of model, optimizer and training"),
        ("--vary training.seed=1,2", "which --seeds varies"),
        ("--vary training.init_from=a", "models are trained from the beginning"),
        ("--vary model.lora=2", "models are trained from the beginning"),
        ("--model.lora 2 --vary model.norm=dyt", "from the beginning: leave --model.lora out"),
        ("--vary model.norm=dyt --init-from=a", "from the beginning: leave --init-from out"),
        ("--vary model.norm=rsm", "must be one of rms, layer, dyt"),
        ("--vary model.nrom=rms", "--model.nrom"),
        ("--vary model.norm=dyt --seeds 0", "seeds must be at least 1"),
        ("--vary model.norm=dyt --name a/b", "--name takes the name of a folder, which"),
        ("--vary model.norm=dyt --name \x1b[2J", "does not begin with a dot, got "),
        ("--vary model.norm=dyt --name .a", "does not begin with a dot, got '.a'"),
        ("--vary model.norm=dyt --seeds-at-once 0", "seeds_at_once must be at least 1"),
        (
            "--vary training.steps=600 --equal flops",
            "--equal flops chooses training.steps for each variant: leave it out of --vary",
        ),
        ("--vary model.norm=dyt+training.steps=600 --equal time", "chooses training.steps"),
        ("--vary 'training.steps = 600' --equal time", "chooses training.steps"),
        ("--vary training.steps=600 --equal tokens", "chooses training.steps"),
        ("--vary model.d-ff=60,70 --equal parameters", "chooses model.d_ff for each"),
        ("--vary model.norm=dyt --minutes 0", "minutes must be above 0"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(words, said):
    assert said in str(refusal(parse_compare, shlex.split(words)))
