"""Base and variants are tuned alike, before they are compared."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
from conftest import TEXT, TINY

from gptlite.cli import parse_comparison
from gptlite.config import Config, TrainingConfig
from gptlite.errors import UserError
from gptlite.research import comparison as comparison_module, conduct
from gptlite.research.comparison import Comparison
from gptlite.research.conduct import NotJudgedError
from gptlite.research.ledger import Confirmed, Ledger, Tuned, Variant
from gptlite.research.report import words
from gptlite.research.results import of_both, results_of
from gptlite.research.seeds import SeedsProgress
from gptlite.research.statistics import NEITHER, judge
from gptlite.research.tune import SEEDS, Knob, parse_knob
from gptlite.runs.saved_config import config_of
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.scripts.compare import compare
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus

CONFIG = Config(model=TINY, training=TrainingConfig(steps=4, batch_size=4))
SMALL = """
    --data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
    --model.context-length 16 --training.steps 4 --training.eval-every 2 --seeds 5 --name one
    --no-again
"""


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """What is trained, made up: one layer is best with a learning rate of 0.02, two with 0.04."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    asked = []

    def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=()):
        rate, layers = config.optimizer.learning_rate, config.model.n_layers
        asked.append((layers, rate, config.training.steps, list(seeds)))
        off = abs(math.log2(rate / 0.02 / layers))
        diverged = config.optimizer.weight_decay > 0.5
        for step in range(config.training.eval_every, config.training.steps + 1, 2):
            losses = [math.nan if diverged else 2 + s % 9 / 10 + off / 10 for s in seeds]
            yield SeedsProgress(step, config.training.steps, losses, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    return asked


def command(words):
    compare(parse_comparison([*words.split(), *SMALL.split()]))


def test_each_gets_its_best_value_at_equal_cost(trained, capsys):
    command("--vary model.n-layers=2 --tune optimizer.learning_rate --tune-points 7")
    tuned = [x for x in trained if x[3] == list(SEEDS)]
    assert [layers for layers, *_ in tuned] == [1] * 7 + [2] * 7
    # The middle of the range first, then those of its halves; evenly in the logarithm.
    factors = [1, 1 / 2, 2, 8**-0.5, 2**0.5, 2**-0.5, 8**0.5]
    for layers in (1, 2):
        rates = [rate for n, rate, *_ in tuned if n == layers]
        assert rates == pytest.approx([0.02 * factor for factor in factors])
    compared = [(layers, rate) for layers, rate, _, seeds in trained if seeds == [0, 1, 2, 3, 4]]
    # And the base with the variant's value, which must be worse, too.
    assert compared == [(1, 0.02), (1, pytest.approx(0.04)), (2, pytest.approx(0.04))]
    assert "n-layers=2: optimizer.learning_rate 0.04 is the best of 7" in capsys.readouterr().out
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    base, twin, variant = ledger.of(Variant)
    rates = [v.config["optimizer"]["learning_rate"] for v in (base, twin, variant)]
    assert rates == [0.02, pytest.approx(0.04), pytest.approx(0.04)]
    assert (twin.name, variant.twin) == ("base (quick), optimizer.learning_rate 0.04", twin.variant)
    assert (twin.level, base.twin) == (None, None)
    # The same again trains nothing.
    n = len(trained)
    command("--vary model.n-layers=2 --tune optimizer.learning_rate --tune-points 7")
    assert len(trained) == n
    assert len(list(Ledger(ledger.path).of(Tuned))) == 14


def test_a_lucky_choice_is_no_gain(trained, monkeypatch):
    """A block without any effect, tuned on seeds that were kinder to another value."""
    unlucky = [{1: 0.02, 2: 0.04}, {1: 0.04, 2: 0.02}]
    for chosen in unlucky:

        def fit_seeds(config, tokenizer, seeds, split, *, drawn_from=(), chosen=chosen):
            rate, layers = config.optimizer.learning_rate, config.model.n_layers
            off = 0.1 if abs(rate - 0.04) > 0.001 else 0.0  # for both, 0.04 is better
            if tuple(seeds) == SEEDS:
                off = abs(rate - chosen[layers])
            losses = [2 + s / 10 + off + 0.001 * (s * layers % 3) for s in seeds]
            yield SeedsProgress(config.training.steps, config.training.steps, losses, 1.0)

        monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
        shutil.rmtree("comparisons", ignore_errors=True)
        command("--vary model.n-layers=2 --tune optimizer.learning_rate --tune-points 7")
        ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
        base, *others = results_of(ledger, next(ledger.of(Variant)))
        said = {result.variant.name: words(result) for result in others}
        assert said.pop("n-layers=2") == "neither better nor worse than both bases"
        assert list(said.values()) == ["the base, with what was tuned for a variant"]
        # Against the base's own value alone, it would have been one.
        alone = judge(base.losses, others[-1].losses, 0.01).words
        assert alone == ("better" if chosen[2] == 0.04 else "worse")
        # So says the confirmation.
        compare(parse_comparison(["confirm", "one", "n-layers=2", "--data.corpus", "text.txt"]))
        (confirmed,) = Ledger(ledger.path).of(Confirmed)
        assert confirmed.words == "neither better nor worse than both bases"
        assert len(confirmed.twin_losses) == 12


@pytest.mark.parametrize(
    ("seeds", "said"),
    [(12, "better"), (1, "the base with its values diverged (1 of 5 seeds)")],
)
def test_a_variant_may_be_better_because_it_does_not_diverge(trained, monkeypatch, seeds, said):
    """With its values, the base learns nothing: that is no doubt of the gain. Where only some seeds
    of the base diverge, those of the variant may have been lucky."""

    def fit_seeds(config, tokenizer, seeds_, split, *, drawn_from=()):
        rate, layers = config.optimizer.learning_rate, config.model.n_layers
        off = abs(rate - (0.02 if layers == 1 else 0.04))
        losses = [2 + s / 10 + 10 * off - layers + 0.001 * (s * layers % 3) for s in seeds_]
        if layers == 1 and abs(rate - 0.04) < 0.001:
            losses = [
                math.nan if s % 12 < seeds else x for s, x in zip(seeds_, losses, strict=True)
            ]
        yield SeedsProgress(config.training.steps, config.training.steps, losses, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", fit_seeds)
    command("--vary model.n-layers=2 --tune optimizer.learning_rate --tune-points 7")
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    _, *others = results_of(ledger, next(ledger.of(Variant)))
    (found,) = [words(result) for result in others if result.variant.name == "n-layers=2"]
    assert found == said
    compare(parse_comparison(["confirm", "one", "n-layers=2", "--data.corpus", "text.txt"]))
    (confirmed,) = Ledger(ledger.path).of(Confirmed)
    assert confirmed.words == said.replace("of 5", "of 12")


def test_only_seeds_of_the_variant_tell_what_the_second_base_does():
    """It is trained first, so it may have more of them."""
    base = {seed: 2.0 + seed / 10 for seed in range(6)}

    def off(by: float) -> dict[int, float]:
        return {seed: loss + by + 0.001 * (seed % 3) for seed, loss in base.items()}

    variant, beyond = off(0.1), off(0.2) | {6: math.nan}
    verdict = judge(base, variant, 0.05)
    assert verdict.words == "worse"
    assert of_both(verdict, beyond, variant, 0.05, 0.0).words == NEITHER
    gain = off(-0.1)
    verdict = judge(base, gain, 0.05)
    assert verdict.words == "better"
    assert of_both(verdict, {0: math.nan}, gain, 0.05, 0.0).words.endswith(
        "diverged (1 of 1 seeds)"
    )
    assert of_both(verdict, dict.fromkeys(range(7), math.nan), gain, 0.05, 0.0).words == "better"


def test_two_numbers_and_a_range(trained):
    command(
        "--vary model.n-layers=2 --tune optimizer.learning-rate=0.01,0.16 "
        "--tune optimizer.weight_decay=0.01,0.1 --tune-points 6"
    )
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    values = [entry.values for entry in ledger.of(Tuned)]
    assert len(values) == 12
    assert values[0] == {
        "optimizer.learning_rate": pytest.approx(0.04),  # the middle
        "optimizer.weight_decay": pytest.approx(0.01 * 10 ** (1 / 3)),
    }
    for name, low, high in (("learning_rate", 0.01, 0.16), ("weight_decay", 0.01, 0.1)):
        assert all(low <= x[f"optimizer.{name}"] <= high for x in values)


def test_steps_are_those_of_the_comparison(trained):
    command(
        "--vary model.n-layers=2+training.batch_size=16 --equal tokens --tune-points 2 "
        "--tune optimizer.learning_rate"
    )
    assert {(layers, steps) for layers, _, steps, _ in trained} == {(1, 4), (2, 2)}


def test_the_same_command_finds_what_it_tuned_at_equal_time(trained, monkeypatch):
    """Though the machine is not as fast as before."""
    measured = iter([[0.5] * 15, [0.5] * 15, [0.4] * 15])
    monkeypatch.setattr(comparison_module, "speed_ratios", lambda *_: next(measured))
    words = "--vary model.n-layers=2 --equal time --tune optimizer.learning_rate --tune-points 2"
    command(words)
    assert {(layers, steps) for layers, _, steps, _ in trained} == {(1, 4), (2, 2)}
    n = len(trained)
    command(words)
    assert len(trained) == n


def test_parameters_are_equal_before_they_are_tuned(trained):
    command(
        "--vary model.mlp=swiglu --equal parameters --tune optimizer.learning_rate --tune-points 2"
    )
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    base, *_, variant = ledger.of(Variant)
    assert variant.parameters == pytest.approx(base.parameters, rel=0.01)
    # What was tuned is what is compared: with the tuned value, the same.
    short = {"steps": 4, "eval_every": 4}
    tuned = config_of(variant.config)
    tuned = dataclasses.replace(tuned, training=dataclasses.replace(tuned.training, **short))
    corpus = text_corpus(TEXT)
    tokenizer = make_tokenizer("char", corpus)
    comparison = Comparison(ledger.path.parent, tokenizer, split_corpus(corpus, tokenizer))
    assert comparison.tuning_losses(tuned, SEEDS) is not None


def test_what_diverges_is_not_chosen(trained):
    command(
        "--vary model.n-layers=2 --tune optimizer.weight_decay=0.1,10 --tune-points 4 "
        "--optimizer.weight-decay 0.2"
    )
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    assert all(v.config["optimizer"]["weight_decay"] < 0.5 for v in ledger.of(Variant))
    with pytest.raises(UserError, match=r"base \(quick\) diverged with all 3 values of --tune"):
        command("--vary model.n-layers=2 --tune optimizer.weight_decay=1,10 --tune-points 3")


def test_minutes_are_for_the_tuning_too(trained, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(conduct.time, "perf_counter", lambda: now[0])

    def slow(config, tokenizer, seeds, split, **options):
        for step in (1, 2, 3, 4):
            now[0] += 15.0
            losses = [2.0 + s % 9 / 10 for s in seeds] if step == 4 else None
            yield SeedsProgress(step, 4, losses, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", slow)
    words = "--vary model.n-layers=2 --tune optimizer.learning_rate --tune-points 3 --minutes"
    # 15 seconds before the first step is done, and 4 steps of 15 seconds.
    with pytest.raises(
        NotJudgedError, match=r"6 times 2 seeds, would take about 7\.5 minutes here"
    ):
        command(f"{words} 7.4")
    assert not list(Ledger(Path("comparisons/one/ledger.jsonl")).of(Tuned))
    now[0] = 0.0
    # Each took a minute, and so do the base and the variant.
    with pytest.raises(
        NotJudgedError, match=r"2 times 5 seeds, would take about 8\.5 minutes here"
    ):
        command(f"{words} 8")
    assert len(list(Ledger(Path("comparisons/one/ledger.jsonl")).of(Tuned))) == 6


def test_a_slow_variant_does_not_overrun_the_minutes(trained, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(conduct.time, "perf_counter", lambda: now[0])

    def slow(config, tokenizer, seeds, split, **options):
        for step in (1, 2, 3, 4):
            now[0] += 15.0 * config.model.n_layers**3
            losses = [2.0 + s % 9 / 10 for s in seeds] if step == 4 else None
            yield SeedsProgress(step, 4, losses, 1.0)

    monkeypatch.setattr(comparison_module, "fit_seeds", slow)
    words = "--vary model.n-layers=2 --tune optimizer.learning_rate --tune-points 3 --minutes 8"
    with pytest.raises(NotJudgedError, match="The 8 minutes are used up by the tuning"):
        command(words)
    assert len(list(Ledger(Path("comparisons/one/ledger.jsonl")).of(Tuned))) == 4
    with pytest.raises(NotJudgedError, match=r"used up by the tuning|would take about"):
        command(words)


def test_values_that_are_printed_alike_are_different_bases(trained):
    command(
        "--vary model.n-layers=2 --vary model.n-layers=2+model.logit-cap=15 --tune-points 3 "
        "--tune optimizer.learning_rate=0.0399,0.0401"
    )
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    assert sum(v.level is not None for v in ledger.of(Variant)) == 2


def test_a_twin_is_not_the_same_config_as_a_variant(trained):
    """The one is not judged, and the other is not stopped."""
    tuned = "--vary model.n-layers=2 --tune optimizer.learning_rate=0.02,0.04 --tune-points 2"
    command(f"{tuned} --training.eval-every 4")
    ledger = Ledger(Path("comparisons/one/ledger.jsonl"))
    twin = next(v for v in ledger.of(Variant) if "learning_rate" in v.name)
    rate = twin.config["optimizer"]["learning_rate"]
    base = next(ledger.of(Variant)).config["optimizer"]["learning_rate"]
    command(
        f"--vary optimizer.learning_rate={rate} --optimizer.learning-rate {base} "
        "--training.eval-every 4"
    )
    judged = [v.name for v in Ledger(ledger.path).of(Variant) if v.level is not None]
    assert judged == ["n-layers=2", f"optimizer.learning_rate={rate}"]


@pytest.mark.parametrize(
    "knobs",
    [
        ("optimizer.learning_rate", "optimizer.learning-rate=0.1,0.2"),
        ("optimizer.learning_rate", "optimizer.beta2=0.9,0.95", "optimizer.weight_decay=0.1,0.2"),
    ],
)
def test_two_different_numbers_at_most(knobs):
    words = "".join(f"--tune {knob} " for knob in knobs)
    with pytest.raises(UserError, match="--tune chooses one number, or two together, got optimi"):
        command(f"--vary model.n-layers=2 {words}")


def test_a_value_out_of_bounds_is_found_before_anything_is_tuned(trained):
    with pytest.raises(UserError, match=r"beta2 must be .*0\.999999, got 1\.9"):
        command("--vary model.n-layers=2 --tune optimizer.beta2")
    with pytest.raises(UserError, match=r"--tune chooses optimizer\.beta2: leave it out of --vary"):
        command("--vary optimizer.beta2=0.9 --tune optimizer.beta2=0.8,0.9")
    assert not trained


def test_a_mistake_is_found_before_anything_is_tuned(trained):
    with pytest.raises(UserError, match="has no option rank"):
        command("--vary model.mlp=relu2:rank=4 --tune optimizer.learning_rate")
    assert not trained


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.schedule", "takes a number of model, optimizer or training"),
        ("optimizer.nothing", "takes a number of model, optimizer or training"),
        ("training.steps", "takes a number of model, optimizer or training"),
        ("data.max_tokens", "takes a number of model, optimizer or training"),
        ("learning_rate", "takes a number of model, optimizer or training"),
        ("optimizer.weight_decay", r"needs a range, because its value is 0.0: .*=LOW,HIGH"),
        ("optimizer.learning_rate=1", "takes a range LOW,HIGH, got '1'"),
        ("optimizer.learning_rate=a,b", "takes a range LOW,HIGH, got 'a,b'"),
        ("optimizer.learning_rate=2,1", "takes a range 0 < LOW < HIGH, got 2,1"),
        ("optimizer.weight_decay=0,1", "takes a range 0 < LOW < HIGH, got 0,1"),
        ("model.dropout=0.1,2", r"dropout must be at least 0.0 and at most 0.99, got 2"),
    ],
)
def test_a_knob_that_is_none_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_knob(text, CONFIG)


def test_a_knob_may_have_no_value_yet():
    assert parse_knob("optimizer.clip-norm=0.1,10", CONFIG) == Knob(
        "optimizer", "clip_norm", (0.1, 10.0)
    )
    rate = parse_knob("optimizer.learning_rate", CONFIG)
    assert [rate.at(CONFIG, place) for place in (0, 0.5, 1)] == pytest.approx([0.005, 0.02, 0.08])
