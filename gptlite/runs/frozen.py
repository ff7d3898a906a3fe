"""Parameters that stay as they are in training."""

import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree

from gptlite.config import Config
from gptlite.errors import UserError, require, told
from gptlite.machine.files import read_bounded, sha256_of, write_atomically
from gptlite.machine.pytrees import is_parameter, path_name, size_of
from gptlite.runs.weights import check_shapes

# Their file in a run. Its checkpoints hold the others.
FROZEN = "frozen.safetensors"

# Bytes that the file may have besides the numbers, in all and for each array.
HEADER, HEADER_PER_ARRAY = 2**16, 2**10


def frozen_in(config: Config) -> Callable[[str], bool]:
    """Whether the parameter of a name is frozen: all but the adapters with `model.lora`, else what
    `training.freeze` names."""
    if config.model.lora is not None:
        return lambda name: not name.endswith((".lora_down", ".lora_up"))
    patterns = config.training.frozen
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def trainable(config: Config, model: Any) -> PyTree[bool]:
    """Which leaves of `model`, or of the shapes of one, are trained: the filter for `TrainSteps`,
    as `config.training.freeze` and `config.model.lora` have it.

    **Raises:** `UserError` if a pattern names no parameter, or all are frozen.
    """
    is_frozen, names = frozen_in(config), []

    def trained(path: tuple[Any, ...], leaf: Any) -> bool:
        if is_parameter(leaf):
            names.append(path_name(path))
        return is_parameter(leaf) and not is_frozen(path_name(path))

    filters = jax.tree_util.tree_map_with_path(trained, model)
    for pattern in config.training.frozen:
        require(
            any(fnmatch.fnmatchcase(name, pattern) for name in names),
            f"training.freeze names no parameter of this model: {pattern!r}. Its parameters "
            f"are {', '.join(names)}.",
        )
    require(any(jax.tree.leaves(filters)), "training.freeze leaves nothing to train.")
    return filters


def save_frozen(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays in the safetensors format."""
    write_atomically(path, safetensors.numpy.save(arrays))


def read_frozen(path: Path, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays in a file, which must be those of `wanted`, arrays or shapes of arrays by name.

    **Raises:** `UserError` if it is no safetensors file, or names, shapes or dtypes are others.
    """
    most = size_of(wanted) + HEADER + HEADER_PER_ARRAY * len(wanted)
    try:
        content = read_bounded(path, most)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"The weights {path} cannot be read: {reason}.") from error
    with told(f"The weights {path} cannot be read"):
        arrays = safetensors.numpy.load(content)
    check_shapes(dict(wanted), arrays, f"The weights {path}")
    return arrays


def frozen_sha256(run: Path, config: Config) -> str:
    """The checksum of a run's file; empty if there is none."""
    is_any = config.model.lora is not None or config.training.freeze
    return sha256_of(run / FROZEN) if is_any else ""
