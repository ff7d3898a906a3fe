"""The check of ids against a vocabulary."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from gptlite.errors import require


def check_ids(ids: Any, vocab_size: int, lengths: Any = None, *, shortest: int = 0) -> None:
    """Check `ids`, `[*batch, seq]`, of which the first `lengths` of a sequence are real (default:
    all), and at least `shortest`. Padding follows them, and may be anything.

    **Raises:** `UserError` if an id is not in the vocabulary, or `lengths` do not fit the ids. In a
    compiled function, where both are not known, only their shapes are checked.
    """
    *batch, seq = ids.shape
    shape = [] if lengths is None else [*np.shape(lengths)]
    require(
        shape in ([], batch),
        f"lengths must have the shape [] or {batch}, one for each sequence, got {shape}.",
    )
    facts = jax.tree.leaves((ids, lengths))
    if any(isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True) for x in facts):
        return
    ids = np.asarray(ids)
    end = np.asarray(seq if lengths is None else lengths)
    for i in (np.min(end, initial=seq), np.max(end, initial=shortest)):
        require(
            shortest <= i <= seq,
            f"lengths must be from {shortest} to {seq}, the length of ids, got {i}.",
        )
    real = np.arange(seq) < end[..., None]
    for i in (np.min(ids, where=real, initial=0), np.max(ids, where=real, initial=0)):
        require(
            0 <= i < vocab_size,
            f"Ids must be from 0 to {vocab_size - 1}, the model's vocabulary, got {i}.",
        )
