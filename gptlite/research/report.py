"""The results of a comparison as a table, in text and as CSV."""

import math
from collections.abc import Sequence

from gptlite.research.comparison import Result, verdicts
from gptlite.research.statistics import Estimate, estimate


def table(results: Sequence[Result]) -> str:
    """The table as text."""
    import pandas as pd  # takes a second

    judged = verdicts(results)
    rows = [
        {
            "validation loss": _with_margin(estimate(result.losses)),
            "Δ base": "" if verdict is None else _with_margin(verdict.difference, "+"),
            "p": "" if verdict is None else _p(verdict.adjusted_p),
            "steps": result.steps,
            "s per seed": f"{result.seconds:.1f}",
            "parameters": f"{result.parameters:,}",
            "FLOPs per token": f"{result.flops_per_token:,}",
            "verdict": "" if verdict is None else verdict.words,
        }
        for result in results
        for verdict in [judged.get(result.name)]
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
    seeds = len(results[0].curves)
    note = (
        f"Final validation loss in nats per token, mean of {seeds} seed{'s' * (seeds > 1)} ± half "
        "of the 95 % interval. Differences are paired by seed. p-values (paired t-test) are "
        "adjusted for the number of variants in this table (Holm); intervals are not."
    )
    return "\n".join([*lines, "", note])


def to_csv(results: Sequence[Result]) -> str:
    """The table as CSV, with each seed's loss."""
    import pandas as pd

    judged = verdicts(results)
    rows = []
    for result in results:
        mean, verdict = estimate(result.losses), judged.get(result.name)
        row = {
            "variant": result.name,
            "steps": result.steps,
            "parameters": result.parameters,
            "training_flops_per_token": result.flops_per_token,
            "seconds_per_seed": result.seconds,
            "val_loss": mean.mean,
            "val_loss_margin": mean.margin,
        }
        if verdict is not None:
            row |= {
                "difference": verdict.difference.mean,
                "difference_margin": verdict.difference.margin,
                "p": verdict.p,
                "adjusted_p": verdict.adjusted_p,
                "verdict": verdict.words,
            }
        losses = zip(result.curves, result.losses, strict=True)
        rows.append(row | {f"val_loss_seed_{seed}": loss for seed, loss in losses})
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")


def _with_margin(value: Estimate, sign: str = "") -> str:
    if not math.isfinite(value.mean):
        return "not finite"
    form = ".4f" if abs(value.mean) < 1000 else ".3g"
    margin = "" if math.isnan(value.margin) else f" ± {value.margin:{form}}"
    return f"{value.mean:{sign}{form}}{margin}"


def _p(p: float) -> str:
    if math.isnan(p):
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
