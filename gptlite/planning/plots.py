"""A picture of a forecast."""

from typing import TYPE_CHECKING

import numpy as np

from gptlite.planning.forecast import Laws
from gptlite.planning.journal import Sealed, Trained
from gptlite.planning.ladder import Ladder
from gptlite.planning.recipe import Rung
from gptlite.runs.plots import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(ladder: Ladder, laws: Laws, sealed: Sealed) -> "Figure":
    """The losses of all models over the operations of their training, the law of each size as a
    line, and the forecast with its interval."""
    figure = blank(8, 5)
    axes = figure.subplots()
    trained = list(ladder.journal.of(Trained))
    target = Rung(sealed.n_layers, sealed.d_model, sealed.asked)
    at = 6.0 * ladder.parameters(target) * target.tokens
    for place, shape in enumerate(sorted({(x.n_layers, x.d_model) for x in trained})):
        colour = f"C{place % 10}"
        own = [x for x in trained if (x.n_layers, x.d_model) == shape]
        n, tokens = own[0].parameters, np.array([float(x.tokens) for x in own])
        line = np.geomspace(tokens.min() / 2, tokens.max() * 4)
        law = laws.law(np.full_like(line, n), line, np.full_like(line, ladder.unique))
        axes.plot(6 * n * line, law, color=colour, linewidth=0.8)
        for x in own:
            of_seeds = [6.0 * n * x.tokens] * len(x.losses)
            axes.plot(of_seeds, x.losses, "o", color=colour, markersize=4)
        axes.plot([], [], "o-", color=colour, label=f"{shape[0]} x {shape[1]}", markersize=4)
    error = [[sealed.loss - sealed.low], [sealed.high - sealed.loss]]
    name = f"forecast: {target.n_layers} x {target.d_model}"
    axes.errorbar([at], [sealed.loss], error, color="black", marker="s", capsize=4, label=name)
    axes.set(
        xscale="log", xlabel="floating-point operations", ylabel="validation loss, nats per token"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", title="layers x width")
    return figure
