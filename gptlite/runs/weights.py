"""Arrays by name."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from gptlite.errors import UserError, require
from gptlite.machine.memory import require_memory
from gptlite.machine.mesh import is_local, whole
from gptlite.machine.processes import is_main_process
from gptlite.machine.pytrees import is_array, is_stacked, path_name, size_of
from gptlite.models.gpt import GPT

T = TypeVar("T")

# Copies of the weights in memory while they are loaded: the file or chunks of it, NumPy's arrays,
# JAX's arrays.
LOADING = 3


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """All arrays of `tree`, or shapes of arrays, each under its path in the tree, e.g.
    `stack.blocks.attention.heads.query.weight`."""
    return {
        path_name(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_array(leaf)
    }


def named_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """`named_leaves`, whole, in host memory. Every process must call this."""
    return {name: whole(leaf) for name, leaf in named_leaves(tree).items()}


def gather_to_main(
    tree: PyTree, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """`named_arrays` of those that are `wanted`, in the first process; nothing in the others. Every
    process must call this.

    On their way, each device and each process hold a whole array, or one layer's part of it."""
    arrays = {}
    for name, leaf in named_leaves(tree).items():
        if not wanted(name):
            continue
        if is_local(leaf) or not is_stacked(name):
            array = whole(leaf)
        else:
            array = np.empty(leaf.shape, leaf.dtype) if is_main_process() else None
            for layer in range(len(leaf)):
                part = whole(leaf[layer])
                if array is not None:
                    array[layer] = part
        if is_main_process():
            arrays[name] = array
    return arrays


def fill(abstract: T, arrays: dict[str, Any], source: str) -> T:
    """`abstract` (a pytree, or `eqx.filter_eval_shape` of one) with `arrays`, as from
    `named_arrays`, in their places.

    **Raises:** `UserError`, which names `source`, if names, shapes or dtypes are not those of the
    `abstract`.
    """
    check_shapes(abstract, arrays, source)

    def put(path, leaf):
        return jnp.asarray(arrays[path_name(path)]) if is_array(leaf) else leaf

    return jax.tree_util.tree_map_with_path(put, abstract)


def check_shapes(abstract: PyTree, arrays: dict[str, Any], source: str) -> None:
    """**Raises:** `UserError` as `fill` does."""
    wanted = named_leaves(abstract)
    for name, leaf in wanted.items():
        array = arrays.get(name)
        if array is None:
            raise UserError(f"{source} lack {name}, which the config calls for.")
        require(
            tuple(array.shape) == leaf.shape and array.dtype == leaf.dtype,
            f"{source} are not those of the config: {name} is "
            f"{array.dtype}{list(array.shape)} where the config calls for "
            f"{leaf.dtype}{list(leaf.shape)}.",
        )
    extra = arrays.keys() - wanted.keys()
    if extra:
        raise UserError(f"{source} hold {min(extra)}, which the config has no room for.")


def require_room(source: str, abstract: GPT) -> None:
    """**Raises:** `UserError` if there is not enough memory to load a model from `source`."""
    require_memory(f"Loading {source}", LOADING * size_of(abstract))
