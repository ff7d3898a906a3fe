"""Pictures, as Matplotlib figures: `figure.savefig("picture.png")` writes one, and in a notebook,
after `%matplotlib inline`, the last line of a cell shows one."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from jaxtyping import Array, Float

from gptlite.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gptlite.research.comparison import Result
    from gptlite.runs.metrics import Metrics


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, in place of whatever is at `path`: also of a link, which Matplotlib
    would follow."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    write_atomically(path, png.getvalue())


def attention(
    weights: Float[Array | np.ndarray, "heads queries keys"],
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    title: str = "",
) -> "Figure":
    """The attention weights of one sequence, as `gptlite.attention_maps` gives them: the heads side
    by side, with a row for each query. The darker a cell, the larger the weight of its key.

    `queries` and `keys` are the tokens on the axes. `keys` is `queries` by default.

    **Raises:** `ValueError` if there are not as many tokens as the weights have rows and columns.
    """
    heads, *sizes = np.shape(weights)
    keys = queries if keys is None else keys
    if sizes != [len(queries), len(keys)]:
        raise ValueError(
            f"There must be {sizes[0]} queries and {sizes[1]} keys, as the weights have, got "
            f"{len(queries)} and {len(keys)}."
        )
    width, height = (max(2.0, 0.22 * size + 0.8) for size in (len(keys), len(queries)))
    figure = _figure(heads * width, height + 0.4)
    figure.suptitle(title)
    for head, (axes, picture) in enumerate(
        zip(figure.subplots(1, heads, squeeze=False)[0], np.asarray(weights), strict=True)
    ):
        axes.imshow(picture, vmin=0.0, vmax=1.0, cmap="Blues")
        axes.set_title(f"head {head}", fontsize="medium")
        # A token may look like a formula.
        axes.set_xticks(range(len(keys)), map(_visible, keys), rotation=90, parse_math=False)
        axes.set_yticks(range(len(queries)), map(_visible, queries), parse_math=False)
        axes.tick_params(length=0, labelsize="small")
        if head == 0:
            axes.set(xlabel="key", ylabel="query")
    return figure


def losses(records: "Sequence[Metrics]") -> "Figure":
    """The training and validation losses, in nats per token, over steps."""
    evaluated = [(r.step, r.val_loss) for r in records if r.val_loss is not msgspec.UNSET]
    val_steps, val_losses = zip(*evaluated, strict=True) if evaluated else ((), ())
    figure = _figure(7, 4)
    axes = figure.subplots()
    axes.plot(
        [record.step for record in records],
        # NaN, a gap in the line, where every update was skipped.
        [math.nan if record.train_loss is None else record.train_loss for record in records],
        label="training",
        linewidth=1,
    )
    axes.plot(
        val_steps,
        val_losses,
        label=f"validation, at best {min(val_losses, default=math.nan):.3f}",
        marker="o",
        markersize=4,
    )
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def comparison(results: "Sequence[Result]") -> "Figure":
    """Left: the validation losses during training. Right: the differences to the base at the end.
    Both are means with their 95 % intervals. The first result is the base."""
    # Imported here: SciPy takes half a second, and `losses` does without it.
    from gptlite.research.comparison import verdicts
    from gptlite.research.statistics import estimate

    judged = verdicts(results)
    figure = _figure(12, max(4.0, 1.5 + 0.3 * len(results)))
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
        left.legend(fontsize="small")
    right.axvline(0, color="black", linewidth=1)
    right.set_yticks(range(1, len(results)), [result.name for result in results[1:]])
    right.invert_yaxis()
    right.set(xlabel=f"difference to {results[0].name} at the end (negative is better)")
    right.grid(alpha=0.3, axis="x")
    return figure


def _figure(width: float, height: float) -> "Figure":
    # Imported here: it takes a second. Not pyplot, which opens a window system.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _visible(token: str) -> str:
    return token.replace(" ", "␣").replace("\n", "⏎")
