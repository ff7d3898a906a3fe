"""The arrays in a pytree, and their names."""

from typing import Any

import jax


def is_array(x: Any) -> bool:
    """Whether `x` is a JAX array, or the shape of one."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def path_name(path: tuple[Any, ...]) -> str:
    """A path in a pytree, as `stack.blocks.attention.heads.query.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
