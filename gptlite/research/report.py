"""The results of a comparison: a table as text and as CSV, and a picture."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gptlite.files import write_atomically
from gptlite.research.statistics import Estimate, Verdict, estimate, judge
from gptlite.research.study import Result


def verdicts(results: Sequence[Result]) -> dict[str, Verdict]:
    """Each variant's verdict against the first result, the base."""
    base, *others = results
    return judge(base.losses, {result.name: result.losses for result in others})


def table(results: Sequence[Result]) -> str:
    """The table as text."""
    judged = verdicts(results)
    rows = [
        {
            "validation loss": _with_margin(estimate(result.losses)),
            "minus base": "" if verdict is None else _with_margin(verdict.difference, "+"),
            "p": "" if verdict is None else _p(verdict.adjusted_p),
            "steps": result.steps,
            "s a seed": f"{result.seconds:.1f}",
            "parameters": f"{result.parameters:,}",
            "FLOPs a token": f"{result.flops_per_token:,}",
            "": "" if verdict is None else verdict.words,
        }
        for result in results
        for verdict in [judged.get(result.name)]
    ]
    names = [result.name for result in results]
    frame = pd.DataFrame(
        rows, index=pd.Index([f"{name:<{max(map(len, names))}}" for name in names])
    )
    words = max(len(row[""]) for row in rows)
    lines = frame.to_string(formatters={"": f"{{:<{words}}}".format}).splitlines()
    lines = [line.rstrip() for line in lines]
    lines.insert(1, "-" * max(map(len, lines)))
    seeds = len(results[0].curves)
    note = (
        f"Nats a token at the end, mean of {seeds} seed{'s' * (seeds > 1)} ± half of the 95 % "
        "interval; differences paired by seed; p of a paired t-test, adjusted for the number of "
        "variants in this table (Holm), as the intervals are not."
    )
    return "\n".join([*lines, "", note])


def to_csv(results: Sequence[Result]) -> str:
    """The table as CSV, with each seed's loss."""
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


def draw(results: Sequence[Result], picture: Path) -> None:
    """Left: the validation losses during training. Right: the differences to the base at the end.
    Both are means with their 95 % intervals."""
    # Here, because it takes a second to import; and not pyplot, which picks a window system.
    from matplotlib.figure import Figure

    judged = verdicts(results)
    figure = Figure(figsize=(12, max(4.0, 1.5 + 0.3 * len(results))), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, result in enumerate(results):
        colour = "black" if place == 0 else f"C{(place - 1) % 10}"
        points = [estimate(losses) for losses in zip(*result.curves.values(), strict=True)]
        means = [point.mean for point in points]
        left.plot(result.looks, means, color=colour, label=result.name, linewidth=1, marker=".")
        if not math.isnan(points[-1].margin):
            low, high = zip(*[(p.mean - p.margin, p.mean + p.margin) for p in points], strict=True)
            left.fill_between(result.looks, low, high, color=colour, alpha=0.15, linewidth=0)
        if place > 0:
            d = judged[result.name].difference
            margin = 0.0 if math.isnan(d.margin) else d.margin
            right.errorbar(d.mean, place, xerr=margin, color=colour, marker="o", capsize=3)
    left.set(xlabel="step", ylabel="validation loss, nats a token")
    left.grid(alpha=0.3)
    if len(results) <= 12:
        left.legend(fontsize="small")
    right.axvline(0, color="black", linewidth=1)
    right.set_yticks(range(1, len(results)), [result.name for result in results[1:]])
    right.invert_yaxis()
    right.set(xlabel=f"difference to {results[0].name} at the end (left is better)")
    right.grid(alpha=0.3, axis="x")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(picture, buffer.getvalue())


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
