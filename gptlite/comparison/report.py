"""What came of a comparison: a table as text and as CSV, and a picture."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from gptlite.comparison.statistics import Estimate, Verdict, estimate, judge
from gptlite.comparison.study import Result
from gptlite.files import write_atomically


def verdicts(results: Sequence[Result]) -> dict[str, Verdict]:
    """Each variant's verdict against the first result, the base."""
    base, *others = results
    return judge(base.losses, {result.name: result.losses for result in others})


def table(results: Sequence[Result]) -> str:
    """The table as text."""
    judged = verdicts(results)
    rows = [
        (
            "variant",
            "validation loss",
            "minus base",
            "p",
            "steps",
            "s a seed",
            "parameters",
            "FLOPs a token",
            "",
        )
    ]
    for result in results:
        verdict = judged.get(result.name)
        rows.append(
            (
                result.name,
                _with_margin(estimate(result.losses)),
                "" if verdict is None else _with_margin(verdict.difference, "+"),
                "" if verdict is None else _p(verdict.adjusted_p),
                str(result.steps),
                f"{result.seconds:.1f}",
                f"{result.parameters:,}",
                f"{result.flops_per_token:,}",
                "" if verdict is None else verdict.words,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        # Numbers to the right, words to the left.
        cells = [
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
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
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    seeds = list(results[0].curves)
    writer.writerow(
        [
            *["variant", "steps", "parameters", "training_flops_per_token", "seconds_per_seed"],
            *["val_loss", "val_loss_margin", "difference", "difference_margin"],
            *["p", "adjusted_p", "verdict"],
            *[f"val_loss_seed_{seed}" for seed in seeds],
        ]
    )
    for result in results:
        mean, verdict = estimate(result.losses), judged.get(result.name)
        against_base: list[float | str] = [""] * 5
        if verdict is not None:
            difference = verdict.difference
            against_base = [difference.mean, difference.margin, verdict.p, verdict.adjusted_p]
            against_base.append(verdict.words)
        costs = [result.steps, result.parameters, result.flops_per_token, result.seconds]
        writer.writerow(
            [result.name, *costs, mean.mean, mean.margin, *against_base, *result.losses]
        )
    return out.getvalue()


def draw(results: Sequence[Result], picture: Path) -> None:
    """On the left the validation losses on the way, on the right the differences to the base at
    the end, both as means with their 95 % intervals."""
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
