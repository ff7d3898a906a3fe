"""What all laws share: tolerances, comparisons, and how a law says that it does not apply."""

from typing import Any

import jax
import numpy as np

from gptlite.machine.pytrees import path_name

# Tolerances, as a share of the largest number that is compared.
# float32 has a precision of 6e-8. Sums of some hundred terms in another order differ by about ten
# times that, and a bug by orders of magnitude more.
SAME = 1e-4
# The same program on the same numbers differs by nothing, except for blocks that mix all tokens and
# cancel the later ones, as by Fourier transforms.
NO_INFLUENCE = 1e-5
# Inputs this many times as large as usual.
LARGE = 30.0


class NotApplicableError(Exception):
    """A law says nothing about a block. The message says why."""


class NotAskedError(NotApplicableError):
    """A law says nothing without an option, which the message names."""


def size_of(x: Any) -> float:
    """The largest absolute value."""
    return float(np.abs(np.asarray(x, np.float64)).max())


def distance(out: Any, wanted: Any) -> np.ndarray:
    """For each token, the largest difference; infinite where one is not a number."""
    with np.errstate(invalid="ignore"):  # infinity less infinity
        difference = np.abs(np.asarray(out, np.float64) - np.asarray(wanted, np.float64))
    return np.nan_to_num(difference, nan=np.inf).max(axis=-1)


def compare(out: Any, wanted: Any, what: str, than: str, tolerance: float = SAME) -> str | None:
    """A message if the two differ by more than rounding."""
    error = distance(out, wanted)
    if error.max() <= tolerance * size_of(wanted):
        return None
    place = np.unravel_index(error.argmax(), error.shape)[-1]
    return (
        f"{what} differs from {than} by {error.max():.2g} at position {place} (the largest value "
        f"is {size_of(wanted):.2g})."
    )


def is_finite(tree: Any) -> bool:
    """Whether all numbers of `tree` are finite."""
    return all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree))


def pairs(*trees: Any) -> list[tuple[Any, ...]]:
    """The name of each array of the trees, which have the same ones, and the arrays."""
    named, *others = (jax.tree_util.tree_leaves_with_path(tree) for tree in trees)
    rows = zip(named, *others, strict=True)
    return [(path_name(row[0][0]), *(array for _, array in row)) for row in rows]
