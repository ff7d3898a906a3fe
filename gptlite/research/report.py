"""The results of a comparison: as a table in text, as CSV, and as lines of JSON."""

import math
from collections.abc import Sequence
from typing import Any

from gptlite.research.comparison import AGAIN, Result
from gptlite.research.ledger import Confirmed, Confirming
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
            "parameters": f"{result.parameters:,}",
            "FLOPs per token": f"{result.operations_per_token:,}",
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
    if result.name == AGAIN and result.verdict.words in ("better", "worse"):
        return "differs by chance"
    return "chance alone" if result.name == AGAIN else result.verdict.words


def records(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Each result as a record of numbers and texts; None for what is not finite."""
    return [
        {
            "variant": result.name,
            "verdict": words(result),
            "seeds": len(result.curves),
            "steps": result.steps,
            "parameters": result.parameters,
            "training_flops_per_token": result.operations_per_token,
            "seconds_per_seed": result.seconds,
            "choice_loss": _finite(mean.mean),
            "choice_loss_margin": _finite(mean.margin),
            "difference": verdict and _finite(verdict.difference.mean),
            "difference_margin": verdict and _finite(verdict.difference.margin),
            "level": verdict and verdict.level,
            "found_from": verdict and _finite(verdict.found_from),
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
    }
    mean, margin = (math.nan if x is None else x for x in (confirmed.difference, confirmed.margin))
    sentence = (
        f"{name} against {base} on the validation text, {len(begun.seeds)} new seeds: "
        f"{_with_margin(Estimate(mean, margin), '+')}: {confirmed.words}. The interval is that of "
        f"Student's paired t-test, once, at the level {begun.level:.3g}. {begun.tried} variants "
        "had been tried."
    )
    return record, sentence
