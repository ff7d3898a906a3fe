"""The picture of a run's losses, and what all pictures share.

Pictures are Matplotlib figures: `figure.savefig("picture.png")` writes one, and in a notebook,
after `%matplotlib inline`, the last line of a cell shows one.
"""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gptlite.errors import UserError
from gptlite.machine.files import write_atomically
from gptlite.runs.metrics import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, in place of whatever is at `path`: also of a link, which Matplotlib
    would follow.

    **Raises:** `OSError`, also if it cannot be drawn: the user's own settings may ask for LaTeX.
    """
    png = io.BytesIO()
    try:
        figure.savefig(png, format="png")
    except Exception as error:
        reason = str(error).partition("\n")[0][:300]
        raise OSError(f"Matplotlib cannot draw it: {reason}") from error
    write_atomically(path, png.getvalue())


def losses(records: Sequence[Metrics]) -> "Figure":
    """The training and validation losses, in nats per token, over steps."""
    evaluated = [(r.step, r.val_loss) for r in records if r.val_loss is not msgspec.UNSET]
    val_steps, val_losses = zip(*evaluated, strict=True) if evaluated else ((), ())
    figure = blank(7, 4)
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


def blank(width: float, height: float) -> "Figure":
    """An empty figure, its sizes in inches.

    **Raises:** `UserError` if Matplotlib is not installed.
    """
    # Imported here: it takes a second. Not pyplot, which opens a window system. A figure that is
    # written to a file needs no backend, and MPLBACKEND may name one that this Python lacks, such
    # as a notebook's.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('A picture needs Matplotlib: pip install "gptlite-jax[plot]".') from error
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure(figsize=(width, height), dpi=120, layout="constrained")
