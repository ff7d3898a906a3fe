"""Arrays by name, and weights as a file that any safetensors reader opens."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree
from safetensors import SafetensorError

from gptlite.errors import UserError
from gptlite.machine.files import check_regular, read_bounded, write_atomically
from gptlite.machine.memory import require_memory
from gptlite.machine.mesh import is_local, whole
from gptlite.machine.processes import is_main_process
from gptlite.machine.pytrees import is_array, is_stacked, path_name, size_of
from gptlite.machine.records import Number, parse_record
from gptlite.models.gpt import GPT

T = TypeVar("T")

# The parameters of a run that stay as they are, beside the files of those that are trained.
FROZEN = "frozen.safetensors"

# Copies of the weights in memory while they are loaded: the file, the arrays in it, JAX's arrays.
LOADING = 3

# Bytes that a file of weights may have besides the numbers, in all and for each array.
HEADER, HEADER_PER_ARRAY = 2**16, 2**10


@dataclass(frozen=True)
class Evaluated:
    """The step that weights are from, and their validation loss in nats per token, if known."""

    step: int
    val_loss: Number = math.nan


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
    found = {}
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
            found[name] = array
    return found


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
        if tuple(array.shape) != leaf.shape or array.dtype != leaf.dtype:
            raise UserError(
                f"{source} are not those of the config: {name} is "
                f"{array.dtype}{list(array.shape)} where the config calls for "
                f"{leaf.dtype}{list(leaf.shape)}."
            )
    extra = arrays.keys() - wanted.keys()
    if extra:
        raise UserError(f"{source} hold {min(extra)}, which the config has no room for.")


def save_weights(path: Path, weights: dict[str, np.ndarray], evaluated: Evaluated) -> None:
    """Write a model's `named_arrays` in the safetensors format."""
    # In one entry, because safetensors writes several in any order. JSON has no NaN.
    known = {name: x for name, x in dataclasses.asdict(evaluated).items() if math.isfinite(x)}
    metadata = {"evaluated": json.dumps(known)}
    write_atomically(path, safetensors.numpy.save(weights, metadata))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, for its header and single arrays.

    **Raises:** `OSError`, also if it is a link or no regular file; `SafetensorError`.
    """
    check_regular(path)
    with safetensors.safe_open(path, "numpy") as file:
        yield file


def read_evaluated(path: Path) -> Evaluated | None:
    """Step and validation loss of the weights in `path`; None if they cannot be read."""
    try:
        with opened(path) as file:
            record = parse_record((file.metadata() or {})["evaluated"], Evaluated)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    return None if math.isnan(record.val_loss) else record


def read_shapes(path: Path) -> dict[str, list[int]] | None:
    """The shapes of the arrays in `path`, by name; None if they cannot be read."""
    try:
        with opened(path) as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def require_room(source: str, abstract: GPT) -> None:
    """**Raises:** `UserError` if there is not enough memory to load a model from `source`."""
    require_memory(f"Loading {source}", LOADING * size_of(abstract))


def load_weights(
    path: Path, abstract: GPT, is_frozen: Callable[[str], bool] = lambda name: False
) -> GPT:
    """`abstract` (a model, or `eqx.filter_eval_shape` of one) with the arrays in `path`, and those
    that are frozen from the file beside it.

    **Raises:** `UserError` if a file is no safetensors file, or its names, shapes or dtypes are not
    those of `abstract`.
    """
    require_room(str(path), abstract)
    leaves = named_leaves(abstract)
    frozen = {name: leaf for name, leaf in leaves.items() if is_frozen(name)}
    arrays = read_arrays(path, {x: leaf for x, leaf in leaves.items() if x not in frozen})
    if frozen:
        arrays |= read_arrays(path.with_name(FROZEN), frozen)
    return fill(abstract, arrays, f"The weights {path}")


def read_arrays(path: Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays in a file, which must be those of `wanted`, arrays or shapes of arrays by name.

    **Raises:** `UserError` as `load_weights` does.
    """
    most = size_of(wanted) + HEADER + HEADER_PER_ARRAY * len(wanted)
    try:
        arrays = safetensors.numpy.load(read_bounded(path, most))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"The weights {path} cannot be read: {reason}.") from error
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype NumPy lacks
        raise UserError(f"The weights {path} cannot be read: {error}.") from error
    check_shapes(dict(wanted), arrays, f"The weights {path}")
    return arrays
