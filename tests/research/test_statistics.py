"""The tests over seeds: against numerical integrals and by simulation."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from gptlite.research.statistics import (
    EXPECTED,
    LEVEL,
    POWER,
    Verdict,
    bound,
    estimate,
    found_from,
    judge,
    level,
    median_interval,
    sequence,
)


@pytest.mark.parametrize("n", [4, 5, 8, 20, 100])
@pytest.mark.parametrize("share", [0.05, 0.001])
def test_the_bound_is_where_the_likelihood_ratio_is_one_over_the_level(n, share):
    """By the noncentral t-distribution: that of the statistic, if the difference is known."""
    t = bound(n, share)
    if not math.isfinite(t):
        # Even where the deviation is 0, the ratio stays below.
        assert (1 + n * EXPECTED**2) ** ((n - 1) / 2) <= 1 / share
        return

    def weighed(d):
        return stats.nct.pdf(t, n - 1, d * math.sqrt(n)) * stats.norm.pdf(d, scale=EXPECTED)

    # The likelihood is that of a t-statistic, and falls off within ten of its own deviations.
    middle, width = t / math.sqrt(n), 10 / math.sqrt(n) + t / n
    mixed = integrate.quad(weighed, middle - width, middle + width, limit=500)[0]
    assert mixed / stats.t.pdf(t, n - 1) == pytest.approx(1 / share, rel=1e-3)


def test_few_seeds_cannot_decide():
    for share, least in ((0.05, 4), (0.01, 5), (1e-4, 7)):
        assert math.isfinite(bound(least, share))
        assert bound(least - 1, share) == math.inf
    assert sequence([1.0, 1.001, 0.999], 0.05).margin == math.inf


@pytest.mark.parametrize("portions", [(1,) * 300, (200, 1, 5), (1, 1000)])
def test_the_levels_of_all_variants_are_below_that_of_all(portions):
    tried, spent, levels = 0, 0.0, []
    for new in portions:
        levels.append(level(tried, new))
        spent += new * levels[-1]
        tried += new
        # What is left is for all others.
        assert LEVEL - spent == pytest.approx(LEVEL / (tried + 1))
    assert levels == sorted(levels, reverse=True)


def differences(random, comparisons, variants, seeds, gains: Any = 0.0):
    """Of comparisons whose variants share their base: as large as the seeds' own deviation."""
    base = random.normal(size=(comparisons, 1, seeds))
    other = random.normal(size=(comparisons, variants, seeds))
    return (other - base) / math.sqrt(2) - gains


def first_look(differences, levels):
    """The number of seeds after which each variant is decided, looking after each; 0: never."""
    n = np.arange(1, differences.shape[-1] + 1)
    mean = np.cumsum(differences, -1) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        square = (np.cumsum(differences**2, -1) - n * mean**2) / (n - 1)
        t = np.abs(mean) * np.sqrt(n / square)
    bounds = np.array([[bound(k, x) for k in n.tolist()] for x in levels])
    decided = t > bounds
    return np.where(decided.any(-1), decided.argmax(-1) + 1, 0)


@pytest.mark.parametrize("portions", [(1,) * 200, (20,) * 10, (200,), (1, 1, 1), (1,)])
def test_chance_alone_is_rarely_called_a_difference(portions):
    """Of 1,000 comparisons of variants that are all alike, entered in these portions, at most 5 %
    find a difference, though one looks after each of 30 seeds."""
    random, tried, levels = np.random.default_rng(0), 0, []
    for new in portions:
        levels += [level(tried, new)] * new
        tried += new
    fooled = sum(
        int((first_look(differences(random, 100, tried, 30), levels) > 0).any(-1).sum())
        for _ in range(10)
    )
    assert fooled <= 0.05 * 1000


def test_the_vectors_above_say_what_judge_says():
    random = np.random.default_rng(1)
    found = differences(random, 1, 3, 12, gains=np.array([[0.0], [1.0], [3.0]]))[0]
    share = level(0, 3)
    looks = first_look(found, [share] * 3)
    zero = dict.fromkeys(range(12), 0.0)
    for values, look in zip(found, looks.tolist(), strict=True):
        verdicts = [
            judge(dict(itertools.islice(zero.items(), n)), dict(enumerate(values.tolist())), share)
            for n in range(1, 13)
        ]
        decided = [verdict.seeds for verdict in verdicts if verdict.words in ("better", "worse")]
        assert (decided or [0])[0] == look


@pytest.mark.parametrize("n", [5, 8, 20])
def test_the_smallest_difference_that_would_have_been_found(n):
    random, share = np.random.default_rng(2), 0.0125
    gain = found_from(n, 0.7, bound(n, share))
    values = random.normal(gain, 0.7, size=(4000, n))
    t = values.mean(-1) / values.std(-1, ddof=1) * math.sqrt(n)
    # Three standard deviations of the share of 4,000.
    assert np.mean(t > bound(n, share)) == pytest.approx(POWER, abs=0.02)
    assert found_from(3, 0.7, bound(3, share)) == math.inf
    assert found_from(n, 0.0, bound(n, share)) == 0.0


def test_the_interval_of_a_single_look_matches_scipy():
    values = [1.0, 2.0, 4.0, 5.0]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=3.0, scale=stats.sem(values))
    assert found.mean == 3.0
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx((low, high))
    assert estimate([2.0]).margin == math.inf
    assert math.isnan(estimate([]).mean)


def test_what_is_said():
    base = dict(enumerate([1.0, 1.1, 0.9, 1.05, 0.95]))
    variants = {
        "better": [0.50, 0.61, 0.39, 0.55, 0.46],
        "worse": [1.50, 1.61, 1.39, 1.55, 1.46],
        "no difference found": [1.1, 1.0, 0.9, 1.15, 0.85],
        "diverged (2 of 5 seeds)": [0.5, math.nan, 0.5, math.inf, 0.5],
    }

    def judged(losses, **options) -> Verdict:
        return judge(base, dict(enumerate(losses)), LEVEL, **options)

    for words, losses in variants.items():
        verdict = judged(losses)
        assert verdict.words == words
        assert verdict.is_decided == (words != "no difference found")
        assert verdict.seeds == 5
    # What an error may have made is no difference; what is beyond it is one.
    assert judged(variants["better"], tolerance=0.6).words == "no difference found"
    assert judged(variants["better"], tolerance=0.3).words == "better"
    assert judged(base.values()).words == "the losses are those of the base"
    for few, words in (([0.5, 0.6], "too few seeds to tell"), ([], "not trained")):
        assert judged(few).words == words
        assert not judged(few).is_decided
    diverged = judge(base | {2: math.nan}, base, LEVEL)
    assert diverged.words == "the base diverged (1 of 5 seeds)"
    # Not by seeds that only one of them has.
    none = dict(enumerate(variants["no difference found"]))
    assert judge(base | {7: math.nan}, none | {8: math.nan}, LEVEL).words == "no difference found"


def test_a_single_look_is_student_s_test():
    random = np.random.default_rng(5)
    base, variant = random.normal(size=6), random.normal(-1, size=6)
    p = stats.ttest_rel(variant, base).pvalue
    both = dict(enumerate(base.tolist())), dict(enumerate(variant.tolist()))
    for share, words in ((1.01 * p, "better"), (0.99 * p, "no difference found")):
        verdict = judge(*both, share, once=True)
        assert verdict.words == words
        assert verdict.difference.margin == pytest.approx(abs(np.mean(variant - base)), rel=0.01)
        assert judge(*both, share).words == "no difference found"


def test_pairs_are_of_the_same_seed():
    """Seeds differ by far more than the variants."""
    random = np.random.default_rng(3)
    base = dict(enumerate(random.normal(1.5, 0.1, size=8).tolist()))
    variant = {seed: x - 0.02 + random.normal(0, 0.003) for seed, x in reversed(base.items())}
    verdict = judge(base, variant | {99: 0.0}, LEVEL)
    assert (verdict.words, verdict.seeds) == ("better", 8)
    assert verdict.difference.mean == pytest.approx(-0.02, abs=0.005)


def test_the_interval_of_a_median_holds_for_any_distribution():
    random = np.random.default_rng(4)
    values = random.standard_cauchy(size=(2000, 15)) + 3
    intervals = [median_interval(x, 0.05) for x in values]
    missed = np.mean([not low <= 3 <= high for low, _, high in intervals])
    assert 0 < missed <= 0.05
    assert median_interval([2.0, 1.0, 4.0], 0.05) == (0.0, 2.0, math.inf)
