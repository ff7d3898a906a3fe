"""Which differences are real: tests over seeds that hold however often one looks, and however many
variants one tries.

**The test.** The differences of a variant to the base, seed by seed, are a sample of a normal
distribution. Their t-statistic is compared with a bound that it exceeds anywhere on its way, after
2, 3, 4, ... seeds, with at most the given probability if there is no difference (Lai, 1976, "On
confidence sequences"; Wang and Ramdas, 2023, "Anytime-valid t-tests and confidence sequences for
Gaussian means with unknown variance"). So one may look after each seed, stop at any time, and add
seeds later.

**The variants.** Each variant has a level of its own, which it gets when it is first tried and
keeps: see `level`. All levels together are below `LEVEL`, however many variants follow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

# The probability that chance alone makes any "better" or "worse" among all variants that are ever
# tried in a comparison.
LEVEL = 0.05
# Differences, in standard deviations of theirs, for which the test is best: it weighs all by a
# normal distribution with this deviation.
EXPECTED = 2.0
# The probability with which the smallest difference that is told would have been found.
POWER = 0.8

Losses = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A mean, and half the width of its interval (infinite where the values are too few)."""

    mean: float
    margin: float


@dataclass(frozen=True)
class Verdict:
    """A variant against the base."""

    difference: Estimate
    """Variant minus base, by seed, with the interval of `level`."""
    seeds: int
    """Those that both have."""
    level: float
    """The probability of a wrong "better" or "worse"."""
    found_from: float
    """A difference of this size would have been found with the probability `POWER`."""
    tolerance: float
    """Differences up to this may have another cause than the variant."""
    words: str

    @property
    def is_decided(self) -> bool:
        """Whether more seeds would be for nothing."""
        return self.words not in (NOT_TRAINED, FAILED, TOO_FEW, NOT_FOUND, NEITHER)


NOT_TRAINED = "not trained"
FAILED = "failed"
TOO_FEW = "too few seeds to tell"
NOT_FOUND = "no difference found"
# Of a variant that was tuned: see `of_both`.
NEITHER = "neither better nor worse than both bases"
# Also when more seeds are trained, most likely: it may be a setting that decides nothing here.
SAME = "the losses are those of the base"


def level(tried: int, new: int = 1) -> float:
    """The level of each of `new` variants that are tried at the same time, after `tried` others:
    an equal share of `LEVEL / (tried + 1) - LEVEL / (tried + new + 1)`.

    So n variants leave `LEVEL / (n + 1)` to all others, in whatever portions they came.
    """
    return LEVEL * (1 / (tried + 1) - 1 / (tried + new + 1)) / new


def bound(n: int, level: float) -> float:
    """The absolute t-statistic of `n` values that makes a difference, infinite if `n` are too few
    for `level`.

    With r = 1 / EXPECTED^2 and x = t^2 / (n - 1), the likelihood ratio of the differences
    (their mean over their deviation, normal with the deviation EXPECTED, against 0) is
    sqrt(r / (n + r)) ((1 + x) / (1 + x r / (n + r)))^(n / 2). The bound is where it is 1 / level.
    """
    if n < 2:
        return math.inf
    r = EXPECTED**-2
    ratio = (math.sqrt((n + r) / r) / level) ** (2 / n)
    slope = 1 - ratio * r / (n + r)
    return math.sqrt((n - 1) * (ratio - 1) / slope) if slope > 0 else math.inf


def student(n: int, level: float) -> float:
    """What `bound` is for a number of values that was chosen beforehand, and a single look: the
    quantile of Student's t-distribution."""
    return float(stats.t.ppf(1 - level / 2, n - 1)) if n > 1 else math.inf


def sequence(values: Losses, level: float) -> Estimate:
    """Mean of `values`, with an interval that misses the true mean with the probability `level`,
    at any number of values that are looked at on the way."""
    return _estimate(values, bound(len(values), level))


def estimate(values: Losses, level: float = LEVEL) -> Estimate:
    """Mean of `values`, with Student's interval."""
    return _estimate(values, student(len(values), level))


def _estimate(values: Losses, most: float) -> Estimate:
    """`most`: the largest t-statistic that is in the interval."""
    values = np.asarray(values, float)
    mean = float(np.mean(values)) if len(values) else math.nan
    if not math.isfinite(most) or not np.isfinite(values).all():
        return Estimate(mean, math.inf)
    return Estimate(mean, most * float(np.std(values, ddof=1)) / math.sqrt(len(values)))


def found_from(n: int, deviation: float, most: float) -> float:
    """The difference for which the t-statistic of `n` values with that standard `deviation` is
    above `most` with the probability `POWER`: by the noncentral t-distribution."""
    if not math.isfinite(most):
        return math.inf
    if deviation == 0:
        return 0.0
    root = math.sqrt(n)
    # Twice what the bound and the normal quantile ask for is beyond it.
    high = 2 * (most + 3) / root
    found: Any = optimize.brentq(lambda d: stats.nct.sf(most, n - 1, d * root) - POWER, 0.0, high)
    return float(found) * deviation


def judge(
    base: Mapping[int, float],
    variant: Mapping[int, float],
    level: float,
    tolerance: float = 0.0,
    *,
    once: bool = False,
) -> Verdict:
    """A variant's losses against the base's, of the seeds that both have. Lower is better.

    `tolerance`: differences up to it are none, such as those that an error in the number of steps
    makes. `once`: the seeds were chosen beforehand, and this is the only look.
    """
    seeds = sorted(base.keys() & variant.keys())
    n = len(seeds)
    most = student(n, level) if once else bound(n, level)
    for who, losses in (("", variant), ("the base ", base)):
        if diverged := sum(not math.isfinite(losses[seed]) for seed in seeds):
            words = f"{who}diverged ({diverged} of {n} seeds)"
            unknown = Estimate(math.nan, math.inf)
            return Verdict(unknown, n, level, math.inf, tolerance, words)
    differences = np.array([variant[seed] - base[seed] for seed in seeds])
    difference = _estimate(differences, most)
    words = NOT_FOUND if math.isfinite(most) else TOO_FEW if n else NOT_TRAINED
    if math.isfinite(most) and not differences.any():
        words = SAME
    elif abs(difference.mean) - difference.margin > tolerance:
        words = "better" if difference.mean < 0 else "worse"
    deviation = float(np.std(differences, ddof=1)) if n > 1 else math.inf
    smallest = found_from(n, deviation, most) + tolerance
    return Verdict(difference, n, level, smallest, tolerance, words)


def median_interval(values: Losses, level: float) -> tuple[float, float, float]:
    """An interval that misses the median with at most the probability `level`, whatever the
    distribution is, and the median of `values` in its middle: of so few values that none does, from
    0 to infinity. (Of n values, the k-th smallest is above the median as often as of n coins fewer
    than k show heads.)"""
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    k = int(np.sum(2 * stats.binom.cdf(np.arange(n), n, 0.5) <= level))
    low, high = (float(ordered[k - 1]), float(ordered[-k])) if k else (0.0, math.inf)
    return low, float(np.median(ordered)), high
