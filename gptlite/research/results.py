"""What a ledger says of its variants: their curves, and the verdicts."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gptlite.research.equal import Equal
from gptlite.research.ledger import Failed, Ledger, Variant
from gptlite.research.speed import MISSED, tolerance
from gptlite.research.statistics import (
    FAILED,
    LEVEL,
    NEITHER,
    NOT_TRAINED,
    TOO_FEW,
    Estimate,
    Verdict,
    judge,
    sequence,
)

# The base once more, from other first parameters: what chance alone does.
AGAIN = "base again"
# The share of a run before which no variant is stopped because it is behind.
EARLY = 0.5


@dataclass(frozen=True)
class Result:
    """What is known of a variant. Losses are those on the choice text, in nats per token."""

    name: str
    variant: Variant
    steps: int
    """0: nothing has been trained."""
    evaluated_at: Sequence[int]
    """The steps with an evaluation."""
    curves: Mapping[int, Sequence[float]]
    """For each seed that was trained to its end, the loss at each of `evaluated_at`."""
    seconds: float
    """A seed's share of the time that steps took."""
    verdict: Verdict | None = None
    """None: it is a base."""
    is_stopped: bool = False
    """Whether training was stopped because it was behind the base."""

    @property
    def losses(self) -> dict[int, float]:
        """The last loss of each seed."""
        return {seed: curve[-1] for seed, curve in self.curves.items()}


def finite(values: Iterable[float]) -> list[float | None]:
    """JSON has no NaN and no infinity."""
    return [x if math.isfinite(x) else None for x in values]


def result_of(ledger: Ledger, variant: Variant, base: Variant, name: str = "") -> Result:
    """What is known of a variant of `base`, or of that itself."""
    result = _trained(ledger, variant, name)
    if variant.base is None:
        return result
    first = _trained(ledger, base, "")
    off, share = tolerance_of(ledger, variant, first), variant.level or LEVEL
    verdict = judge(first.losses, result.losses, share, off)
    if (known := ledger.variants.get(variant.twin or "")) is not None:
        twin = _trained(ledger, known, "")
        verdict = of_both(verdict, twin.losses, result.losses, share, off)
    stopped = [
        run.stopped
        for run in ledger.runs[variant.variant]
        if run.stopped and not result.curves.keys() >= set(run.seeds)  # trained later, to the end
    ]
    if stopped:
        verdict = dataclasses.replace(verdict, words=stopped[0])
    elif not result.curves and any(x.variant == variant.variant for x in ledger.of(Failed)):
        verdict = dataclasses.replace(verdict, words=FAILED)
    return dataclasses.replace(result, verdict=verdict, is_stopped=bool(stopped))


def of_both(
    verdict: Verdict,
    twin: Mapping[int, float],
    variant: Mapping[int, float],
    level: float,
    tolerance: float,
    *,
    once: bool = False,
) -> Verdict:
    """The verdict of a variant that was tuned, from that beside the base with the base's own values
    and the losses of the base with the variant's, the twin: it is better, or worse, if it is so
    beside both. See `judge`.

    Values that are chosen from few seeds are often not the best ones. Beside a base with better or
    worse ones alone, a variant without any effect would differ.
    """
    common = [twin[seed] for seed in variant if seed in twin]
    if verdict.words == "better" and len(common) == len(variant) and not np.isfinite(common).any():
        return verdict  # with these values, the base learns nothing at all
    of_twin = judge(twin, variant, level, tolerance, once=once)
    verdict = dataclasses.replace(verdict, found_from=max(verdict.found_from, of_twin.found_from))
    if verdict.words not in ("better", "worse") or of_twin.words == verdict.words:
        return verdict
    words = NEITHER
    if of_twin.words in (NOT_TRAINED, TOO_FEW):
        words = of_twin.words
    elif not np.isfinite(common).all():
        words = of_twin.words.replace("the base", "the base with its values")
    return dataclasses.replace(verdict, words=words)


def results_of(
    ledger: Ledger, base: Variant, newest: Collection[Variant] = (), equal: Equal = "steps"
) -> list[Result]:
    """Of a base and all of its variants, also those in `newest` that were not trained yet.

    Of several of one name, all but the last, or the one in `newest`, are said to be older. What is
    equal is said where it is not `equal`.
    """
    known = ledger.variants | {v.variant: ledger.variants.get(v.variant, v) for v in newest}
    variants = [base, *(v for v in known.values() if v.base == base.variant)]
    last = {(v.name, v.equal): v.variant for v in [*variants, *newest]}

    def name(variant: Variant) -> str:
        is_last = last[variant.name, variant.equal] == variant.variant
        is_same = variant.name == AGAIN or variant.equal in (None, equal)
        other = "" if is_same else f" (equal {variant.equal})"
        return f"{variant.name}{other}{'' if is_last else ' (an earlier version)'}"

    return [result_of(ledger, variant, base, name(variant)) for variant in variants]


def behind(base: Result, losses: Mapping[int, float], share: float) -> Estimate | None:
    """By how much a variant is behind, with its losses by seed after a `share` of its steps: it is
    worse than the base was after the same share, as the test says with one look. None if it is not,
    before `EARLY`, or if it is not known where the base was."""
    at = share * base.steps
    is_known = base.curves.keys() >= losses.keys() and at >= min(base.evaluated_at, default=at + 1)
    if share < EARLY or not is_known:
        return None
    then = {seed: np.interp(at, base.evaluated_at, base.curves[seed]) for seed in losses}
    gap = sequence([loss - float(then[seed]) for seed, loss in losses.items()], LEVEL)
    return gap if gap.mean - gap.margin > 0 else None


def missed_of(variant: Variant) -> float:
    """The probability with which the speed of a variant may be misjudged: a tenth of its level."""
    return min(MISSED, (variant.level or LEVEL) / 10)


def tolerance_of(ledger: Ledger, variant: Variant, base: Result) -> float:
    """The difference that a wrong number of steps may make, where a measured speed chose it."""
    speeds = ledger.speeds[variant.variant]
    curves = [curve for curve in base.curves.values() if np.isfinite(curve).all()]
    if not speeds or not curves:
        return 0.0
    ratios = [ratio for speed in speeds for ratio in speed.ratios]
    mean = np.mean(curves, axis=0)
    half = float(np.interp(base.steps / 2, base.evaluated_at, mean))
    late = [x for step, x in zip(base.evaluated_at, mean, strict=True) if step > base.steps / 2]
    # Its largest, because a curve may rise again.
    fall = max(abs(x - late[-1]) for x in [half, *late])
    return tolerance(ratios, speeds[0].steps / base.steps, fall, missed_of(variant))


def _trained(ledger: Ledger, variant: Variant, name: str) -> Result:
    runs = ledger.runs[variant.variant]
    whole = [run for run in runs if not run.stopped]
    count = sum(len(run.seeds) for run in whole)
    return Result(
        name=name or variant.name,
        variant=variant,
        steps=runs[0].steps if runs else 0,
        evaluated_at=whole[0].evaluated_at if whole else [],
        curves={
            seed: [math.nan if x is None else x for x in curve]
            for run in whole
            for seed, curve in zip(run.seeds, run.curves, strict=True)
        },
        seconds=sum(run.seconds for run in whole) / count if count else 0.0,
    )
