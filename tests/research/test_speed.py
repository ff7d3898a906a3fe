"""Equal time: speeds measured by turns, and what their error may make of a loss."""

import dataclasses
import math

import numpy as np
import pytest
from conftest import TEXT, TINY

from gptlite.config import Config, TrainingConfig
from gptlite.research import speed
from gptlite.research.seeds import SeedsProgress
from gptlite.research.speed import MOST, NARROW, ratio_of, speed_ratios, tolerance
from gptlite.research.statistics import LEVEL, judge
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
BASE = Config(model=TINY, training=TrainingConfig(steps=1000, log_every=10, eval_every=100))
COPY = dataclasses.replace(BASE, model=dataclasses.replace(TINY, bias=True))


@pytest.fixture
def machine(monkeypatch):
    """A machine: the seconds of a step at its so-and-so-many-th dispatch."""
    now = [lambda count: 1.0]
    count = [0]

    def fit_seeds(config, tokenizer, seeds, split):
        seconds = 0.0
        for step in range(10, config.training.steps + 1, 10):
            seconds += 10 * now[0](count[0]) * (1 if config.model.bias else 2)
            count[0] += 1
            yield SeedsProgress(step, config.training.steps, None, seconds)

    def set_to(seconds):
        now[0], count[0] = seconds, 0

    monkeypatch.setattr(speed, "fit_seeds", fit_seeds)
    return set_to


def ratios(base=BASE, variant=COPY):
    return speed_ratios(base, variant, TOKENIZER, SPLIT, 5)


def test_a_quiet_machine_is_measured_shortly(machine):
    found = ratios()
    assert found == pytest.approx([2.0] * len(found))
    assert len(found) == 11
    assert ratio_of(found) == (pytest.approx(2.0), pytest.approx(0.0))
    assert ratio_of(found[:10])[1] == math.inf


def test_what_slows_both_and_what_drifts_does_not_count(machine):
    machine(lambda count: 1.0 + (count // 20) % 2)  # as slow again, for 20 dispatches
    assert ratio_of(ratios())[0] == pytest.approx(2.0)
    machine(lambda count: 1.01**count)  # hotter and hotter
    middle, error = ratio_of(ratios())
    assert middle == pytest.approx(2.0, rel=0.01)
    assert error < NARROW


def test_a_loaded_machine_is_measured_for_long(machine):
    random = np.random.default_rng(0)
    machine(lambda count: 1.0 + random.pareto(2.0))
    found = ratios(BASE, BASE)
    middle, error = ratio_of(found)
    assert len(found) == MOST
    assert NARROW < abs(math.log(middle)) < error < 1.0


def test_equal_time_calls_no_copy_of_the_base_better_or_worse():
    """On a machine where a ratio is off by 30 % as often as not, and where the loss falls by 0.06
    nats when the steps are doubled; the curve says 0.1. Of 1,000 comparisons at most 5 %."""
    random = np.random.default_rng(1)
    fooled = careless = 0
    for _ in range(1000):
        found = np.exp(0.45 * random.standard_t(3, size=MOST)).tolist()
        steps = round(1000 * ratio_of(found)[0])
        base = random.normal(1.5, 0.001, size=12)
        losses = base + random.normal(0, 0.001, size=12) - 0.06 * math.log2(steps / 1000)
        both = dict(enumerate(base)), dict(enumerate(losses))
        verdict = judge(*both, LEVEL, tolerance(found, steps / 1000, 0.1))
        fooled += verdict.words in ("better", "worse")
        careless += judge(*both, LEVEL).words in ("better", "worse")
    assert fooled <= 0.05 * 1000
    assert careless > 0.5 * 1000  # what that would be without
