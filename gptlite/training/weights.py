"""Arrays by name, and weights as a file that any safetensors reader opens."""

import re
from pathlib import Path
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree
from safetensors import SafetensorError

from gptlite.config import UserError
from gptlite.files import SEAL, is_sealed_by, seal
from gptlite.models.gpt import GPT
from gptlite.models.watch import path_name

T = TypeVar("T")


def named_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """All arrays of `tree` in host memory, each under its path in the tree, e.g.
    `stack.blocks.attention.query.weight`. Of an array on several devices, the first one's copy."""
    return {
        path_name(path): np.asarray(
            leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    }


def fill(skeleton: T, arrays: dict[str, np.ndarray], source: str) -> T:
    """`skeleton` (a pytree, or `eqx.filter_eval_shape` of one) with `arrays`, as from
    `named_arrays`, in their places.

    **Raises:** `UserError`, which names `source`, if names, shapes or dtypes are not those of the
    skeleton.
    """
    arrays = dict(arrays)

    def put(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return leaf
        name = path_name(path)
        array = arrays.pop(name, None)
        if array is None:
            raise UserError(f"{source} lack {name}, which the config calls for.")
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise UserError(
                f"In {source}, {name} is {array.dtype}{list(array.shape)} where the "
                f"config calls for {leaf.dtype}{list(leaf.shape)}."
            )
        return jnp.asarray(array)

    tree = jax.tree_util.tree_map_with_path(put, skeleton)
    if arrays:
        raise UserError(f"{source} hold {min(arrays)}, which the config has no room for.")
    return tree


def weights_to_bytes(weights: dict[str, np.ndarray], step: int) -> bytes:
    """A model's `named_arrays` in the safetensors format.

    Its metadata hold `gptlite`, which is `sha256 HEX step STEP`: a checksum of the whole file (see
    `gptlite.files.seal`) and the steps trained. One entry, because their order is left to chance.
    """
    return seal(safetensors.numpy.save(weights, {"gptlite": f"sha256 {SEAL.decode()} step {step}"}))


def load_weights(path: Path, skeleton: GPT) -> GPT:
    """`skeleton` (a model, or `eqx.filter_eval_shape` of one) with the arrays in `path`.

    **Raises:** `UserError` if the file is no safetensors file, is not as it was written, or its
    names, shapes or dtypes are not the skeleton's.
    """
    content = _read(path)
    try:
        arrays = safetensors.numpy.load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype NumPy lacks
        raise UserError(f"The weights {path} cannot be read: {error}.") from error
    # Another program's file has no metadata, or none of ours.
    if b"__metadata__" in content and _step_of(content) is None:
        raise UserError(f"The weights {path} are damaged: their checksum does not match.")
    return fill(skeleton, arrays, f"The weights {path}")


def weights_step(path: Path) -> int | None:
    """The step that `path`'s weights are from; None if there is no such file or it is damaged."""
    return _step_of(_read(path)) if path.is_file() else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"The weights {path} cannot be read: {error.strerror}.") from error


def _step_of(content: bytes) -> int | None:
    """The step that is noted in the file, if its checksum is right."""
    note = re.search(rb'"gptlite":"sha256 ([0-9a-f]{64}) step ([0-9]+)"', content[:1000])
    if note is None or not is_sealed_by(content, note[1].decode()):
        return None
    return int(note[2])
