"""Parameters that stay as they are in training."""

import fnmatch
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from gptlite.config import Config
from gptlite.errors import UserError, require
from gptlite.machine.pytrees import is_parameter, path_name


def frozen_in(config: Config) -> Callable[[str], bool]:
    """Whether the parameter of a name is frozen: all but the adapters with `model.lora`, else what
    `training.freeze` names."""
    if config.model.lora is not None:
        return lambda name: not name.endswith((".lora_down", ".lora_up"))
    patterns = config.training.frozen
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def trainable(config: Config, model: Any) -> PyTree[bool]:
    """Which leaves of `model`, or of the shapes of one, are trained: the filter for `TrainSteps`.

    **Raises:** `UserError` if a pattern names no parameter, or all are frozen.
    """
    is_frozen, names = frozen_in(config), []

    def trained(path: tuple[Any, ...], leaf: Any) -> bool:
        if is_parameter(leaf):
            names.append(path_name(path))
        return is_parameter(leaf) and not is_frozen(path_name(path))

    found = jax.tree_util.tree_map_with_path(trained, model)
    for pattern in config.training.frozen:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"training.freeze names no parameter of this model: {pattern!r}. Its parameters "
                f"are {', '.join(names)}."
            )
    require(any(jax.tree.leaves(found)), "training.freeze leaves nothing to train.")
    return found
