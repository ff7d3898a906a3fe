"""The cheap laws, of the custom blocks of a run that is about to be trained."""

import contextlib
import shlex

import equinox as eqx
import jax
import jax.numpy as jnp

from gptlite.config import ModelConfig
from gptlite.custom import custom_blocks
from gptlite.errors import UserError
from gptlite.machine.progress import log
from gptlite.machine.pytrees import is_parameter
from gptlite.models.build import find_part, make_part
from gptlite.research.check_block import TOKENS, CheckError, check_block

# What a model that is trained must not break: anything else shows in its results, or is rare.
CHEAP = ("parameters", "shapes", "causal")
# Parameters of a block that is checked at the size of the run.
MOST = 20_000_000


def check_custom(config: ModelConfig) -> None:
    """Run the laws `CHEAP` on the custom blocks of `config`, which have been loaded, as they are in
    the run. A line on standard output for each says which laws hold, and what was left out.

    **Raises:** `UserError` if a block breaks one.
    """
    for field, name in custom_blocks(config).items():
        words = f"gptlite check-block {shlex.quote(str(name))}"
        why = _too_large(field, config)
        if why:
            log(f"{name} is not checked: {why}. {words} checks it in a small model.")
            continue
        make, options = find_part(field, config)
        try:
            check_block(
                make,
                kind="layer" if field in ("mlp", "norm") else "block",
                config=config,
                options=options,
                seq=min(TOKENS, config.context_length),
                checks=CHEAP,
            )
        except CheckError as error:
            broken = " ".join(
                f"{law}: {message.removesuffix('.')}." for law, message in error.failures.items()
            )
            raise UserError(
                f"model.{field} {name} is not trained. {broken} {words} says more. To train it all "
                "the same: --no-check-blocks."
            ) from error
        log(f"{name}: {', '.join(CHEAP)} hold; {words} runs the other laws.")


def _too_large(field: str, config: ModelConfig) -> str | None:
    if config.context_length < 4:
        return "the context is shorter than 4 tokens"
    parameters = 0
    with contextlib.suppress(Exception):  # the laws say what cannot be built
        part = eqx.filter_eval_shape(
            lambda key, layer: make_part(field, config, key, layer=layer),
            jax.random.key(0),
            jnp.zeros((), int),
        )
        parameters = sum(leaf.size for leaf in jax.tree.leaves(part) if is_parameter(leaf))
    return f"it has {parameters:,} parameters" if parameters > MOST else None
