import math

import numpy as np
import pytest
from scipy import stats

from gptlite.research.statistics import estimate, judge


def test_the_interval_matches_scipy():
    values = [1.0, 2.0, 4.0, 5.0]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=3.0, scale=stats.sem(values))
    assert found.mean == 3.0
    assert (found.mean - found.margin, found.mean + found.margin) == pytest.approx((low, high))
    assert math.isnan(estimate([2.0]).margin)


def test_p_values_match_scipy_and_are_adjusted_by_holm():
    random = np.random.default_rng(0)
    base = random.normal(size=6)
    variants = {
        name: base + random.normal(shift, 1.0, size=6)
        for name, shift in [("a", 0.0), ("b", 3.0), ("c", 1.0)]
    }
    verdicts = judge(base, variants)
    raw = {name: stats.ttest_rel(losses, base).pvalue for name, losses in variants.items()}
    for name, verdict in verdicts.items():
        assert verdict.p == pytest.approx(raw[name])
        assert verdict.difference.mean == pytest.approx(np.mean(variants[name] - base))
    first, second, third = sorted(raw, key=lambda name: raw[name])
    assert verdicts[first].adjusted_p == pytest.approx(min(1, 3 * raw[first]))
    assert verdicts[second].adjusted_p == pytest.approx(
        max(verdicts[first].adjusted_p, min(1, 2 * raw[second]))
    )
    assert verdicts[third].adjusted_p == pytest.approx(max(verdicts[second].adjusted_p, raw[third]))


def test_variants_that_diverged_count_as_tests():
    base = np.zeros(5)
    variants = {
        "a": np.array([0.1, 0.2, 0.3, 0.2, 0.25]),
        "b": np.array([0.1, -0.1, 0.1, -0.1, 0.05]),
        "c": np.array([0.1, math.nan, 0.1, 0.1, 0.1]),
    }
    verdicts = judge(base, variants)
    assert verdicts["a"].adjusted_p == pytest.approx(3 * verdicts["a"].p)
    assert verdicts["b"].adjusted_p == pytest.approx(min(1, 2 * verdicts["b"].p))
    assert math.isnan(verdicts["c"].adjusted_p)


def test_what_is_said():
    base = [1.0, 1.1, 0.9, 1.05, 0.95]
    variants = {
        "better": [0.50, 0.61, 0.39, 0.55, 0.46],
        "worse": [1.50, 1.61, 1.39, 1.55, 1.46],
        "no difference found at this size": [1.1, 1.0, 0.9, 1.15, 0.85],
        "diverged (2 of 5 seeds)": [0.5, math.nan, 0.5, math.inf, 0.5],
    }
    for words, verdict in judge(base, variants).items():
        assert verdict.words == words
    assert judge([1.0], {"a": [0.5]})["a"].words == "one seed is not enough"
    same = judge(base, {"a": base})["a"]
    assert (same.p, same.words) == (1.0, "no difference found at this size")


def test_chance_alone_is_rarely_called_a_difference():
    """Of 400 comparisons of 8 variants that are all alike, about 5 % may name one or more."""
    random = np.random.default_rng(1)
    fooled = 0
    for _ in range(400):
        base = random.normal(size=5)
        verdicts = judge(base, {str(i): random.normal(size=5) for i in range(8)})
        fooled += any(v.words in ("better", "worse") for v in verdicts.values())
    # Three standard deviations of a share of 5 % are 3.3 %; sharing a base makes it less.
    assert fooled <= 400 * 0.083


def test_a_real_difference_is_found():
    random = np.random.default_rng(2)
    base = random.normal(1.5, 0.1, size=5)  # seeds differ by far more than the variants
    verdict = judge(base, {"a": base - 0.02 + random.normal(0, 0.003, size=5)})["a"]
    assert verdict.words == "better"
    assert verdict.difference.mean == pytest.approx(-0.02, abs=0.005)
