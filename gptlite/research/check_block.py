"""Is a block right? `check_block(block)` says which check fails, where, and by how much.

    parameters  no array is in a static field or complex
    shapes      the output has the shape and dtype of the input (of a model: logits)
    jit         compiling twice gives the same output
    causal      no output depends on a later input
    bidirectional
                encoder, instead of causal: every output depends on every input; encoder-decoder, in
                addition: every output depends on every token of the source
    batch       a sequence gives the same output alone, in a batch and under vmap
    cached      decoding in chunks gives the output of one call, also with chunks of different
                lengths in each row
    padding     padding after a sequence changes nothing
    documents   of a model with `separate_documents`: a document gives the same output alone and
                after another one
    gradients   finite, not zero for any parameter and for the input, and right by finite
                differences in float64
    bfloat16    close to float32
    scan        a stack of blocks gives the same output unrolled and scanned

From the command line: `gptlite check-block FILE.py:CLASS`. Options follow the name, as in
`FILE.py:CLASS:rank=4`.
"""

import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.config import ModelConfig
from gptlite.errors import UserError, require
from gptlite.machine.fields import Count, Seed, check_value
from gptlite.machine.pytrees import count_parameters, path_name
from gptlite.research.checks import CHECKS, INPUT, inapplicable
from gptlite.research.subject import Kind, make_subject

SMALL = ModelConfig(n_layers=2, n_heads=2, d_model=16, context_length=16)


class CheckError(AssertionError):
    """A block fails checks. `checks` are the names of those that fail."""

    def __init__(self, name: str, failures: Sequence[tuple[str, str]]):
        """`name`: the block's. `failures`: the name of each check that fails, and why."""
        self.checks = tuple(check for check, _ in failures)
        lines = [f"{check}: {message}" for check, message in failures]
        super().__init__(f"{name} fails:\n  " + "\n  ".join(lines))


@dataclass(frozen=True)
class Report:
    """A block that passes all checks."""

    name: str
    kind: Kind
    width: int
    """The last axis of the output: d_model, or the vocabulary."""
    parameters: int
    checks: tuple[str, ...]

    def __str__(self) -> str:
        axis = "vocabulary" if self.kind in ("model", "encoder-decoder") else "d_model"
        return (
            f"{self.name} ({self.kind}, {axis} {self.width}, {self.parameters:,} parameters) "
            f"passes: {', '.join(self.checks)}"
        )


def check_block(
    block: Any,
    *,
    kind: Kind | None = None,
    config: ModelConfig = SMALL,
    options: Mapping[str, Any] = MappingProxyType({}),
    d_model: int | None = None,
    causal: bool | None = None,
    seq: int = 8,
    zero_grad: Sequence[str] = (),
    checks: Sequence[str] = tuple(CHECKS),
    seed: int = 0,
) -> Report:
    """Run the checks in `gptlite.research.check_block`'s docstring. A block takes some seconds, an
    encoder-decoder longer.

    All parameters are moved at random first, so that a parameter that starts at zero has an effect.

    **Arguments:**

    - `block`: a module, or a class that is built as `block(config, key=key)`, with `causal=causal`
      if that is given.
    - `kind`: `layer`, called as `layer(x)`, as an MLP or a norm is; `block`, with `init_cache` and
      the call of `Attention` or `Block`; `model`, called as `model(ids)`; `encoder`;
      `encoder-decoder`. Default: inferred from the class and its methods.
    - `config`, `options`: of a class, which is built with the options as keyword arguments.
    - `d_model`: of a module that is a layer or a block. For a class, that of `config`.
    - `causal`: False for an encoder's block, in which every token sees every other. Default: False
      for an `Encoder` and for what has an `Attention` that is not causal.
    - `seq`: tokens in a sequence; more than any window or chunk that the block has.
    - `zero_grad`: names of parameters whose gradient is zero by design: constants, and the bias of
      attention's keys without rotary positions and QK-norm, which softmax cancels. With
      `the input` among them, its gradient is not looked at.
    - `checks`: the names of the checks to run. Default: all.
    - `seed`: of the parameters and inputs.

    **Raises:** `CheckError`, which names all checks that fail; `UserError` if there is no check or
    parameter of a name, or a number is out of range.
    """
    unknown = sorted(set(checks) - CHECKS.keys())
    require(not unknown, f"There is no check {unknown}: there are {', '.join(CHECKS)}.")
    sizes = {"seq": seq} if d_model is None else {"seq": seq, "d_model": d_model}
    for name, size in sizes.items():
        check_value(name, size, Count)
    check_value("seed", seed, Seed)
    key = jax.random.key(seed)
    name = block.__name__ if isinstance(block, type) else type(block).__name__
    if isinstance(block, type):
        has_causal = causal is not None and "causal" in inspect.signature(block).parameters
        causality = {"causal": causal} if has_causal else {}
        try:
            block = block(config, **options, **causality, key=key)
        except Exception as error:
            why = f"it cannot be built: {describe(error)}"
            if isinstance(error, FrozenInstanceError):
                why += ": its class does not declare that, as in `name: float`"
            raise CheckError(name, [("shapes", why)]) from error
        d_model = config.d_model
    paths = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(block)}
    missing = sorted(set(zero_grad) - paths - {INPUT})
    require(not missing, f"There is no parameter {missing} in {name}, as zero_grad says.")
    if any(map(jnp.iscomplexobj, jax.tree.leaves(eqx.filter(block, eqx.is_array)))):
        # The checks would cast them, too.
        sentence = "complex ones are cast to real ones in training."
        raise CheckError(name, [("parameters", sentence)])
    block = _move_parameters(block, np.random.default_rng(seed), zero_grad)
    try:
        subject = make_subject(block, kind, d_model, causal, seq, zero_grad, seed)
    except UserError as error:
        raise CheckError(name, [("shapes", str(error))]) from error
    left_out = inapplicable(subject)
    selected = [check for check in checks if check not in left_out]
    failures = []
    for check in selected:
        try:
            # GPUs multiply float32 numbers in a shorter format by default.
            with jax.default_matmul_precision("highest"):
                message = CHECKS[check](subject)
        except Exception as error:
            message = f"it raised {describe(error)}"
        if message is not None:
            failures.append((check, message))
            if check == "shapes":
                break  # the others would only repeat it
    if failures:
        raise CheckError(name, failures)
    return Report(name, subject.kind, subject.width, count_parameters(block), tuple(selected))


def _move_parameters(block: Any, random: np.random.Generator, zero_grad: Sequence[str]) -> Any:
    """Every parameter perturbed, so that none is zero."""

    def move(path, leaf):
        if not eqx.is_inexact_array(leaf) or path_name(path) in zero_grad:
            return leaf
        value = np.asarray(leaf)
        size = float(np.sqrt(np.mean(np.abs(value) ** 2))) if value.size else 0.0
        scale = 0.1 * size or (value.shape[-1] ** -0.5 if value.ndim > 1 else 0.1)
        return jnp.asarray((value + scale * random.normal(size=value.shape)).astype(value.dtype))

    return jax.tree_util.tree_map_with_path(move, block)


def describe(error: Exception) -> str:
    """An exception as a line, with the last line outside of packages that it came through."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}: {' '.join(lines[:4])}"
    packages = ("site-packages", str(Path(__file__).parents[1]), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in packages):
            return f"{what} ({Path(frame.filename).name}, line {frame.lineno})"
    return what
