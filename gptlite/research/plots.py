"""A picture of a comparison."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gptlite.runs.plots import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gptlite.research.results import Result


def comparison(results: "Sequence[Result]") -> "Figure":
    """Left: the losses on the choice text during training, a line for each seed. Right: the
    differences to the base at the end, with the intervals that the verdicts go by. The first result
    is the base."""
    results = [result for result in results if result.curves]
    figure = blank(12, max(4.0, 1.5 + 0.3 * len(results)))
    left, right = figure.subplots(1, 2)
    for place, result in enumerate(results):
        colour = "black" if place == 0 else f"C{(place - 1) % 10}"
        for curve in result.curves.values():
            left.plot(result.evaluated_at, curve, color=colour, linewidth=0.6, alpha=0.6)
        left.plot([], [], color=colour, label=result.name)
        if result.verdict is not None:
            d = result.verdict.difference
            margin = d.margin if math.isfinite(d.margin) else 0.0
            right.errorbar(d.mean, place, xerr=margin, color=colour, marker="o", capsize=3)
    left.set(xlabel="step", ylabel="loss on the choice text, nats per token")
    left.grid(alpha=0.3)
    if len(results) <= 12:
        for text in left.legend(fontsize="small").get_texts():
            text.set_parse_math(False)  # a name may look like a formula
    right.axvline(0, color="black", linewidth=1)
    names = [result.name for result in results[1:]]
    right.set_yticks(range(1, len(results)), names, parse_math=False)
    right.invert_yaxis()
    right.set_xlabel(
        f"difference to {results[0].name} at the end (negative is better)", parse_math=False
    )
    right.grid(alpha=0.3, axis="x")
    return figure
