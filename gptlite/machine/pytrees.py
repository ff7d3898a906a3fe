"""The arrays in a pytree, and their names."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from gptlite.errors import require

T = TypeVar("T")

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


def count_parameters(model: PyTree) -> int:
    """The number of elements in all arrays of `model`. A shared matrix counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, is_array)))


def cast(model: T, dtype: Any) -> T:
    """`model` (any pytree) with its parameters in `dtype`; gradients through the cast keep the old
    dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)


def is_parameter(x: Any) -> bool:
    """Whether `x`, in a model or in the shapes of one, is trained by default."""
    is_shape = isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.inexact)
    return is_shape or eqx.is_inexact_array(x)


def require_float32(params: PyTree) -> None:
    """**Raises:** `UserError` if one of the parameters, or of their shapes, is not in float32:
    most updates would be rounded to nothing."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        require(
            not is_parameter(leaf) or leaf.dtype == jnp.float32,
            f"Parameters that are trained must be in float32, got {leaf.dtype} for "
            f"{path_name(path)}. training.compute_dtype decides in which format is computed.",
        )


def inside(params: PyTree, kind: type | tuple[type, ...]) -> PyTree:
    """For each parameter, whether it is in a module of that kind."""
    return jax.tree.map(
        lambda node: jax.tree.map(lambda _: isinstance(node, kind), node),
        params,
        is_leaf=lambda node: isinstance(node, kind),
    )
