"""The results of a comparison: as a table in text, as CSV, and as lines of JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gptlite.research.ledger import (
    Confirmed,
    Confirming,
    Failed,
    Kind,
    Ledger,
    Look,
    Opened,
    Runs,
    Speed,
    Tuned,
    Variant,
)
from gptlite.research.results import AGAIN, Result, finite, results_of
from gptlite.research.speed import ratio_of
from gptlite.research.statistics import LEVEL, POWER, Estimate, estimate


def table(results: Sequence[Result], tried: int) -> str:
    """The table as text. `tried`: the variants that were ever tried in this comparison."""
    import pandas as pd  # takes a second

    rows = [
        {
            "choice loss": _with_margin(estimate(list(result.losses.values()))),
            "Δ base": _with_margin(v.difference, "+") if (v := result.verdict) else "",
            "found from": f"{v.found_from:.4f}" if v and math.isfinite(v.found_from) else "",
            "seeds": len(result.curves),
            "steps": result.steps,
            "s per seed": f"{result.seconds:.1f}",
            "parameters": f"{result.variant.parameters:,}",
            "FLOPs per token": f"{result.variant.operations_per_token:,}",
            "verdict": words(result),
        }
        for result in results
    ]
    names = [result.name for result in results]
    frame = pd.DataFrame(
        rows, index=pd.Index([f"{name:<{max(map(len, names))}}" for name in names])
    )
    # Words begin in one column, below their heading.
    width = max(len(word) for word in ["verdict", *(row["verdict"] for row in rows)])
    left = f"{{:<{width}}}".format
    frame = frame.rename(columns={"verdict": left("verdict")})
    lines = frame.to_string(formatters={left("verdict"): left}).splitlines()
    lines = [line.rstrip() for line in lines]
    lines.insert(1, "-" * max(map(len, lines)))
    note = (
        "Loss on the choice text in nats per token, with Student's 95 % interval. Δ base is paired "
        "by seed; its interval holds however often one looks, and for all variants that were ever "
        f"tried here, which are {tried}: the probability of any wrong better or worse is at most "
        f"{LEVEL:.0%}. A difference of 'found from' would have been found with a probability of "
        f"{POWER:.0%}."
    )
    if any(result.verdict and result.verdict.tolerance for result in results):
        note += " At equal time, a difference counts beyond what the error of the speeds may make."
    return "\n".join([*lines, "", note])


def told(result: Result) -> str:
    """A variant in a line."""
    assert result.verdict is not None
    difference = _with_margin(result.verdict.difference, "+")
    return f"{result.name}: {difference and f'{difference}, '}{words(result)}"


def words(result: Result) -> str:
    """The verdict in words."""
    if result.verdict is None:
        return ""
    if result.variant.level is not None or not result.curves:
        return result.verdict.words
    if result.variant.name != AGAIN:
        return "the base, with what was tuned for a variant"
    return "differs by chance" if result.verdict.words in ("better", "worse") else "chance alone"


def records(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each result as a record of numbers and texts; None for what is not finite."""
    return [
        {
            "variant": result.name,
            "verdict": words(result),
            "seeds": len(result.curves),
            "steps": result.steps,
            "parameters": result.variant.parameters,
            "training_flops_per_token": result.variant.operations_per_token,
            "seconds_per_seed": result.seconds,
            "choice_loss": _finite(mean.mean),
            "choice_loss_margin": _finite(mean.margin),
            "difference": verdict and _finite(verdict.difference.mean),
            "difference_margin": verdict and _finite(verdict.difference.margin),
            "level": verdict and verdict.level,
            "found_from": verdict and _finite(verdict.found_from),
            "tolerance": verdict and _finite(verdict.tolerance),
            "losses": {str(seed): _finite(loss) for seed, loss in result.losses.items()},
        }
        for result in results
        for mean, verdict in [(estimate(list(result.losses.values())), result.verdict)]
    ]


def to_csv(results: Sequence[Result]) -> str:
    """The table as CSV, with each seed's loss."""
    import pandas as pd

    rows = []
    for record in records(results):
        losses = record.pop("losses")
        rows.append(record | {f"loss_seed_{seed}": loss for seed, loss in losses.items()})
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _with_margin(value: Estimate, sign: str = "") -> str:
    if math.isnan(value.mean):
        return ""
    if not math.isfinite(value.mean):
        return "not finite"
    form = ".4f" if abs(value.mean) < 1000 else ".3g"
    margin = f" ± {value.margin:{form}}" if math.isfinite(value.margin) else ""
    return f"{value.mean:{sign}{form}}{margin}"


def confirmation(
    names: Sequence[str], begun: Confirming, confirmed: Confirmed
) -> tuple[dict[str, Any], str]:
    """The verdict on the validation text, of the base and the variant of `names`: as a record, and
    in a sentence."""
    base, name = names
    record = {
        "variant": name,
        "base": base,
        "confirmed": confirmed.words,
        "seeds": begun.seeds,
        "level": begun.level,
        "tried": begun.tried,
        "difference": confirmed.difference,
        "difference_margin": confirmed.margin,
        "losses": confirmed.losses,
        "base_losses": confirmed.base_losses,
        "twin_losses": confirmed.twin_losses,
    }
    seeds, difference = f"{len(begun.seeds)} new seeds", ""
    if confirmed.difference is not None and confirmed.margin is not None:
        difference = f"{_with_margin(Estimate(confirmed.difference, confirmed.margin), '+')}, "
    sentence = (
        f"{name} against {base} on the validation text, {seeds}: {difference}{confirmed.words} "
        f"(Student's paired t-test, once, at the level {begun.level:.2g}; {begun.tried} variants "
        "had been tried)."
    )
    return record, sentence


def overview(ledger: Ledger) -> dict[str, Any]:
    """All that a page shows of a comparison: for each base its variants with their curves, the
    verdicts on the validation text, and the ledger in words. The newest base comes first."""
    variants = ledger.variants
    bases = [v for v in variants.values() if v.base is None]
    groups = []
    for base in reversed(bases):
        results = results_of(ledger, base)
        rows = records(results)
        for row, result in zip(rows, results, strict=True):
            row["reason"] = reason(result)
            row["evaluated_at"] = list(result.evaluated_at)
            row["curves"] = [finite(curve) for curve in result.curves.values()]
        groups.append(rows)
    confirmed = []
    for begun, verdict in _confirmations(ledger):
        variant = variants[begun.variant]
        names = [variants[str(variant.base)].name, variant.name]
        if verdict is None:
            said = f"{names[1]}: begun with {_range(begun.seeds)}, and not finished"
        else:
            said = confirmation(names, begun, verdict)[1]
        confirmed.append(said)
    lines = [
        {"at": at, "words": _in_words(entry, variants)}
        for at, entry in zip(ledger.times, ledger.entries, strict=True)
    ]
    return {"groups": groups, "confirmed": confirmed, "ledger": lines}


def reason(result: Result) -> str:
    """Why the verdict is what it is."""
    verdict = result.verdict
    if verdict is None or not math.isfinite(verdict.difference.margin):
        return ""
    off = verdict.tolerance
    around = f"{off:.4f}, which the error of the speeds may make" if off else "0"
    is_beyond = abs(verdict.difference.mean) - verdict.difference.margin > off
    difference = _with_margin(verdict.difference, "+")
    what = f"the interval of {verdict.seeds} differences, {difference} at the level "
    what += f"{verdict.level:.2g}, is {'' if is_beyond else 'not '}beyond {around}"
    if is_beyond or not math.isfinite(verdict.found_from):
        return what
    return f"{what}; from {verdict.found_from:.4f} on, a difference would have been found"


def _confirmations(ledger: Ledger) -> list[tuple[Confirming, Confirmed | None]]:
    """Each one that was begun, with its verdict if it has one: the last one of the variant."""
    verdicts = {entry.variant: entry for entry in ledger.of(Confirmed)}
    begun = list(ledger.of(Confirming))
    last = {entry.variant: entry for entry in begun}
    return [(x, verdicts.get(x.variant) if last[x.variant] is x else None) for x in begun]


def _in_words(entry: Kind, variants: Mapping[str, Variant]) -> str:
    """An entry of a ledger as a line."""
    variant = variants.get(getattr(entry, "variant", ""))
    name = variant.name if variant else getattr(entry, "name", "a variant")
    match entry:
        case Opened():
            choice, rest = entry.choice_tokens, entry.validation_tokens
            return f"opened: {choice:,} tokens to choose by, {rest:,} to confirm"
        case Tuned():
            values = ", ".join(f"{key} {value:.3g}" for key, value in entry.values.items())
            return f"{name} tuned: {values}: {_losses(entry.losses)}"
        case Variant() if entry.base is None:
            return f"{name} entered as a base"
        case Variant():
            share = "" if entry.level is None else f", with the level {entry.level:.2g}"
            return f"{name} entered{share}"
        case Speed():
            middle, error = ratio_of(entry.ratios)
            return (
                f"{name} measured {len(entry.ratios)} times: {middle:.3f} times as fast as the "
                f"base, to {math.expm1(error):.1%}: {entry.steps} steps"
            )
        case Runs():
            seeds = _range(entry.seeds)
            if entry.stopped:
                return f"{name}, {seeds}: {entry.stopped}"
            last = [curve[-1] for curve in entry.curves]
            return f"{name}, {seeds}, {entry.steps} steps: {_losses(last)}"
        case Failed():
            return f"{name}, {_range(entry.seeds)}, failed: {entry.reason}"
        case Look():
            return f"{name} after {entry.seeds} seeds: {entry.words}"
        case Confirming():
            return f"{name} looked at on the validation text, {_range(entry.seeds)}"
        case Confirmed():
            return f"{name} on the validation text: {entry.words}"


def _losses(losses: Sequence[float | None]) -> str:
    return " ".join("not finite" if loss is None else f"{loss:.4f}" for loss in losses)


def _range(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {min(seeds, default=0)} to {max(seeds, default=0)}"
