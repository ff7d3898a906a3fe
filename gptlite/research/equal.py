"""What variants have in common with the base."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from gptlite.config import Config
from gptlite.errors import require

Equal = Literal["steps", "tokens", "flops", "parameters", "time"]

# How far the parameters of a variant may be from those of the base where they are to be equal.
PARAMETERS_OFF = 0.01


def tokens_per_step(config: Config) -> int:
    """Those that a step is trained on."""
    return config.training.batch_size * config.model.context_length


def steps_of(
    config: Config, base: Config, equal: Equal | None, base_operations: int, operations: int
) -> int:
    """The steps of a variant that make it equal to the base, if not by time. `equal`: None of the
    base itself. `operations`: those of training, per token."""
    if equal not in ("tokens", "flops"):
        return config.training.steps
    ratio = tokens_per_step(base) / tokens_per_step(config)
    if equal == "flops":
        ratio *= base_operations / operations
    return max(1, round(base.training.steps * ratio))


def with_parameters(
    name: str, config: Config, parameters: int, count: Callable[[Config], int]
) -> Config:
    """A variant with `model.d_ff` chosen so that it has as many parameters as the base: the most
    that are not more.

    **Raises:** `UserError` if there is no such `d_ff`.
    """

    def wide(d_ff: int) -> Config:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=d_ff))

    low, high = 1, 64 * config.model.d_model
    least = count(wide(low))
    require(
        count(wide(high)) > least or _is_near(least, parameters),
        f"--equal parameters chooses model.d_ff, and the parameters of {name} do not depend on it: "
        f"they are {least:,}, and the base has {parameters:,}.",
    )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(wide(middle)) <= parameters else (low, middle)
    found = count(wide(low))
    require(
        _is_near(found, parameters),
        f"{name} cannot have the {parameters:,} parameters of the base: with model.d_ff {low} it "
        f"has {found:,}.",
    )
    return wide(low)


def _is_near(parameters: int, wanted: int) -> bool:
    return abs(parameters - wanted) <= PARAMETERS_OFF * wanted
