"""Which differences are real: paired t-tests over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

# The family-wise error rate: the probability that chance alone makes any "better" or "worse" of a
# table.
LEVEL = 0.05

Losses = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its 95 % interval (NaN for a single value)."""

    mean: float
    margin: float


@dataclass(frozen=True)
class Verdict:
    """A variant against the base."""

    difference: Estimate
    """Variant minus base, paired by seed."""
    p: float
    """The paired t-test's probability of a difference at least this large if the two were equal.
    NaN for one seed."""
    adjusted_p: float
    """The same, adjusted for the number of variants (Holm, 1979)."""
    words: str


def estimate(values: Losses) -> Estimate:
    """Mean of `values`, with Student's 95 % interval."""
    return _t_test(np.asarray(values, float))[0]


def judge(base: Losses, variants: Mapping[str, Losses]) -> dict[str, Verdict]:
    """Each variant's losses against the base's, seed by seed. Lower is better."""
    with np.errstate(invalid="ignore"):
        tests = {name: _t_test(np.subtract(losses, base)) for name, losses in variants.items()}
    adjusted = _holm({name: p for name, (_, p) in tests.items()})
    return {
        name: Verdict(difference, p, adjusted[name], _words(base, variants[name], adjusted[name]))
        for name, (difference, p) in tests.items()
    }


def _t_test(values: np.ndarray) -> tuple[Estimate, float]:
    """Mean and interval, and the p-value of the mean being 0."""
    if len(values) < 2 or not np.isfinite(values).all():
        return Estimate(float(np.mean(values)), math.nan), math.nan
    if np.ptp(values) == 0:  # SciPy divides by the deviation
        return Estimate(float(values[0]), 0.0), 0.0 if values[0] else 1.0
    test: Any = stats.ttest_1samp(values, 0.0)
    mean, high = float(np.mean(values)), test.confidence_interval(0.95).high
    return Estimate(mean, float(high) - mean), float(test.pvalue)


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm, 1979: the smallest p times the number of variants, the next one times one fewer, ...

    Variants without a p-value, because they diverged, count: they were among the variants tried.
    """
    tested = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    adjusted, most = dict.fromkeys(p_values, math.nan), 0.0
    for place, (p, name) in enumerate(tested):
        most = max(most, min(1.0, p * (len(p_values) - place)))
        adjusted[name] = most
    return adjusted


def _words(base: Losses, losses: Losses, adjusted_p: float) -> str:
    for who, values in (("", losses), ("the base ", base)):
        diverged = len(values) - int(np.isfinite(values).sum())
        if diverged:
            return f"{who}diverged ({diverged} of {len(values)} seeds)"
    if len(losses) < 2:
        return "one seed is not enough"
    if adjusted_p >= LEVEL:
        return "no difference found at this size"
    return "better" if np.mean(losses) < np.mean(base) else "worse"
