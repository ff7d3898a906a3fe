"""The arrays in a pytree, and their names."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

# Which parameters are trained: a filter for `eqx.partition`.
Trainable = Callable[[Any], bool] | PyTree[bool]


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX array, or the shape of one."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def size_of(tree: Any) -> int:
    """Bytes of all arrays of `tree`, or shapes of arrays."""
    leaves = filter(is_array, jax.tree.leaves(tree))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def path_name(path: tuple[Any, ...]) -> str:
    """A path in a pytree, e.g. `stack.blocks.attention.heads.query.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_stacked(name: str) -> bool:
    """Whether the array with the path `name` has a leading axis of layers: it is in a `Stack`."""
    return re.search(r"(^|\.)blocks\.(?!\d)", name) is not None
