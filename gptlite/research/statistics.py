"""Which differences are real: paired t-tests over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

# Of "better" and "worse": the chance that one or more of a table's are but luck.
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
    """Of the paired t-test: how often chance alone differs as much; NaN for one seed."""
    adjusted_p: float
    """The same, with regard to the number of variants that were tried (Holm, 1979)."""
    words: str


def estimate(values: Losses) -> Estimate:
    """Mean of `values`, with Student's 95 % interval."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Estimate(mean, math.nan)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, float(stats.t.ppf(0.975, count - 1)) * error)


def judge(base: Losses, variants: Mapping[str, Losses]) -> dict[str, Verdict]:
    """Each variant's losses against the base's, seed by seed. Lower is better."""
    with np.errstate(invalid="ignore"):
        differences = {name: np.subtract(losses, base) for name, losses in variants.items()}
    p_values = {name: _p_value(d) for name, d in differences.items()}
    adjusted = _holm(p_values)
    return {
        name: Verdict(
            estimate(d),
            p_values[name],
            adjusted[name],
            _words(base, variants[name], adjusted[name]),
        )
        for name, d in differences.items()
    }


def _p_value(differences: np.ndarray) -> float:
    if len(differences) < 2 or not np.isfinite(differences).all():
        return math.nan
    if np.ptp(differences) == 0:
        return 0.0 if differences[0] else 1.0
    test: Any = stats.ttest_1samp(differences, 0.0)
    return float(test.pvalue)


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm, 1979: the smallest p times the number of tests, the next one times one fewer, ..."""
    tested = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    adjusted, most = dict.fromkeys(p_values, math.nan), 0.0
    for place, (p, name) in enumerate(tested):
        most = max(most, min(1.0, p * (len(tested) - place)))
        adjusted[name] = most
    return adjusted


def _words(base: Losses, losses: Losses, adjusted_p: float) -> str:
    for who, values in (("", losses), ("the base ", base)):
        diverged = len(values) - int(np.isfinite(values).sum())
        if diverged:
            return f"{who}diverged ({diverged} of {len(values)} seeds)"
    if len(losses) < 2:
        return "one seed tells nothing"
    if adjusted_p >= LEVEL:
        return "no difference found at this size"
    return "better" if np.mean(losses) < np.mean(base) else "worse"
