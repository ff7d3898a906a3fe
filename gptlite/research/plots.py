"""A picture of a comparison."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gptlite.runs.plots import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gptlite.research.comparison import Result


def comparison(results: "Sequence[Result]") -> "Figure":
    """Left: the validation losses during training. Right: the differences to the base at the end.
    Both are means with their 95 % intervals. The first result is the base."""
    # Imported here: SciPy takes half a second.
    from gptlite.research.comparison import verdicts
    from gptlite.research.statistics import estimate

    judged = verdicts(results)
    figure = blank(12, max(4.0, 1.5 + 0.3 * len(results)))
    left, right = figure.subplots(1, 2)
    for place, result in enumerate(results):
        colour = "black" if place == 0 else f"C{(place - 1) % 10}"
        points = [estimate(losses) for losses in zip(*result.curves.values(), strict=True)]
        steps, means = result.evaluated_at, [point.mean for point in points]
        left.plot(steps, means, color=colour, label=result.name, linewidth=1, marker=".")
        if not math.isnan(points[-1].margin):
            low, high = zip(*[(p.mean - p.margin, p.mean + p.margin) for p in points], strict=True)
            left.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        if place > 0:
            d = judged[result.name].difference
            margin = 0.0 if math.isnan(d.margin) else d.margin
            right.errorbar(d.mean, place, xerr=margin, color=colour, marker="o", capsize=3)
    left.set(xlabel="step", ylabel="validation loss, nats per token")
    left.grid(alpha=0.3)
    if len(results) <= 12:
        for text in left.legend(fontsize="small").get_texts():
            text.set_parse_math(False)  # a name may look like a formula
    right.axvline(0, color="black", linewidth=1)
    right.set_yticks(
        range(1, len(results)), [result.name for result in results[1:]], parse_math=False
    )
    right.invert_yaxis()
    right.set_xlabel(
        f"difference to {results[0].name} at the end (negative is better)", parse_math=False
    )
    right.grid(alpha=0.3, axis="x")
    return figure
