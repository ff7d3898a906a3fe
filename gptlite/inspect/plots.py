"""A picture of attention weights."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Array, Float

from gptlite.runs.plots import blank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    figure = blank(heads * width, height + 0.4)
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


def _visible(token: str) -> str:
    return token.replace(" ", "␣").replace("\n", "⏎")
