"""Is a block right? `check_block(block)` says which law it breaks, where, and by how much.

From the command line: `gptlite check-block FILE.py:CLASS`, which also lists the laws (`--list`).
"""

import functools
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from gptlite.config import ModelConfig
from gptlite.errors import UserError, require
from gptlite.machine.fields import Count, Seed, check_value
from gptlite.machine.pytrees import count_parameters, inside, path_name
from gptlite.nn.stack import Stack
from gptlite.research.laws import LAWS
from gptlite.research.laws.gradients import INPUT
from gptlite.research.laws.law import NotApplicableError, NotAskedError
from gptlite.research.sizes import sizes_of
from gptlite.research.small import SMALL
from gptlite.research.subject import FAR, Kind, Sees, make_subject

# Tokens of a sequence, if no window of the block is larger: a prime, which no chunk divides.
TOKENS = 41
# The largest window, chunk or table that sequences are made longer than.
LARGEST_WINDOW = 256
# The least that a gain or a bias is moved to, and the most: a gate near 0 or far from it is shut.
OPEN = (0.3, 1.0)
# The number of the layer that a block is told to be.
LAYER = 1
# The laws that are looked at in layer 0, too, if a block is told its layer's number.
OF_ALL_LAYERS = ("causal", "cached")
# Errors whose first sentence says what is wrong. The others are about JAX's own objects.
TRACING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


class CheckError(AssertionError):
    """A block breaks laws. `checks` are the names of those."""

    def __init__(self, name: str, failures: Sequence[tuple[str, str]]):
        """`name`: the block's. `failures`: the name of each law that it breaks, and how."""
        self.name = name
        self.failures = dict(failures)
        self.checks = tuple(self.failures)
        lines = [f"{check}: {message}" for check, message in failures]
        super().__init__(f"{name} fails:\n  " + "\n  ".join(lines))


@dataclass(frozen=True)
class Report:
    """A block that breaks no law."""

    name: str
    kind: Kind
    width: int
    """The last axis of the output: d_model, or the vocabulary."""
    parameters: int
    checks: tuple[str, ...]
    """The laws that hold."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """What was not looked at, or not decided, and why, or which option changes that."""
    does_not_apply: Mapping[str, str] = field(default_factory=dict)
    """The laws that say nothing about such a block, and why."""

    def __str__(self) -> str:
        axis = "vocabulary" if self.kind in ("model", "encoder-decoder") else "d_model"
        passes = (
            f"{self.name} ({self.kind}, {axis} {self.width}, {self.parameters:,} parameters) "
            f"passes: {', '.join(self.checks)}"
        )
        open_ = (f"  left open: {what}: {why}" for what, why in self.left_out.items())
        return "\n".join([passes, *open_])


def check_block(
    block: Any,
    *,
    kind: Kind | None = None,
    config: ModelConfig = SMALL,
    options: Mapping[str, Any] = MappingProxyType({}),
    d_model: int | None = None,
    causal: bool | None = None,
    seq: int | None = None,
    sees: str | Sees | None = None,
    reference: Any = None,
    zero_grad: Sequence[str] = (),
    checks: Sequence[str] = tuple(LAWS),
    skip: Sequence[str] = (),
    seed: int = 0,
) -> Report:
    """Run the laws of `gptlite.research.laws` that apply. A block takes some seconds, an
    encoder-decoder longer.

    All parameters are moved at random first, so that one that starts at zero has an effect, and so
    that no gate stays shut.

    **Arguments:**

    - `block`: a module, or a class that is built as `block(config, key=key)`, with `causal=causal`
      if that is given.
    - `kind`: `layer`, called as `layer(x)`, as an MLP or a norm is; `block`, with `init_cache` and
      the call of `Attention` or `Block`; `model`, called as `model(ids)`; `encoder`;
      `encoder-decoder`. Default: inferred from the class and its methods.
    - `config`, `options`: of a class, which is built with the options as keyword arguments. The law
      of dropout builds it with `dropout` and `attention_dropout` instead of the config's, or with
      an option of its own of the name `dropout`.
    - `d_model`: of a module that is a layer or a block. For a class, that of `config`.
    - `causal`: False for an encoder's block, in which every token sees every other. Default: False
      for an `Encoder` and for what has an `Attention` that is not causal.
    - `seq`: tokens in a sequence; more than any window, chunk or table that the block has. Default:
      41, or 9 more than the largest number up to 256 in the block's fields and code.
    - `sees`: what an output must depend on, and nothing else: `all earlier` (and its own input),
      `window(64)` (the last 64, with its own, in a sequence of 73 tokens), or a function of two
      positions, of an output and of an input, that says whether it must. Default: seeing too little
      is not found.
    - `reference`: another form of the block, a class or a module with the same parameters. Outputs,
      `weights` and the auxiliary loss must be the same to 1e-4 of the largest, also far from the
      beginning, each gradient to 1e-3, and with dropout the mean over keys, to 8 %, and by how much
      outputs vary, to 20 %.
    - `zero_grad`: names of parameters whose gradient is zero by design: constants, and the bias of
      attention's keys without rotary positions and QK-norm, which softmax cancels. With
      `the input` among them, its gradient is not looked at.
    - `checks`: the names of the laws to run. Default: all.
    - `skip`: names of laws that are left out, and named in the report.
    - `seed`: of the parameters and inputs.

    **Raises:** `CheckError`, which names all laws that are broken; `UserError` if there is no law
    or parameter of a name, or a number is out of range.
    """
    for name, names in {"checks": checks, "skip": skip, "zero_grad": zero_grad}.items():
        require(not isinstance(names, str), f"{name} must be a list of names, got {names!r}.")
    unknown = sorted({*checks, *skip} - LAWS.keys())
    require(not unknown, f"There is no law {unknown}: there are {', '.join(LAWS)}.")
    for name, size in {"seq": seq, "d_model": d_model}.items():
        if size is not None:
            check_value(name, size, Count)
    window = _window(sees)
    least = max(4, window + 1)
    require(
        seq is None or seq >= least,
        f"seq must be at least {least}{f' to check {sees}' if window else ''}, got {seq}.",
    )
    check_value("seed", seed, Seed)
    name = block.__name__ if isinstance(block, type) else type(block).__name__
    build = _Builder(name, block, config, options, causal, zero_grad, seed)
    module = build()
    d_model = config.d_model if isinstance(block, type) else d_model
    try:
        tokens = seq or max(_tokens(module), window + 9 if window else 0)
        subject = make_subject(module, kind, d_model, causal, tokens, seed)
    except UserError as error:
        raise CheckError(name, [("shapes", str(error))]) from error
    if reference is not None:
        reference = _Reference(reference, build)
        reference()  # tells whether its parameters are the same
    subject = replace(
        subject,
        zero_grad=zero_grad,
        separate_documents=isinstance(block, type) and config.separate_documents,
        sees=_parse_sees(sees),
        longest=config.context_length if isinstance(block, type) else max(FAR),
        rebuilt=build.rebuilt,
        reference=reference,
    )
    lowest = replace(subject, module=build.rebuilt(layer=0)) if build.is_numbered else subject
    failures, passed, silent = [], [], {}
    left_out = dict.fromkeys(skip, "left out, as skip says")
    for law in (law for law in checks if law not in skip):
        try:
            # GPUs multiply float32 numbers in a shorter format by default.
            with jax.default_matmul_precision("highest"):
                message = LAWS[law](subject)
                if message is None and law in OF_ALL_LAYERS and build.is_numbered:
                    message = LAWS[law](lowest)
                    message = message and f"in layer 0, {message}"
        except NotAskedError as reason:
            left_out[law] = str(reason)
            continue
        except NotApplicableError as reason:
            silent[law] = str(reason)
            continue
        except Exception as error:
            message = str(error) if isinstance(error, UserError) else f"it raised {describe(error)}"
        if message is None:
            passed.append(law)
            continue
        failures.append((law, message))
        if law in ("shapes", "memory"):
            break  # the others would only repeat it
    subject.forget()
    if failures:
        raise CheckError(name, failures)
    parameters = count_parameters(eqx.filter(module, eqx.is_inexact_array))
    left_out |= subject.notes
    if seq is None and subject.kind in ("layer", "block"):
        left_out[f"more than {subject.seq} tokens"] = _beyond(module, config)
    return Report(name, subject.kind, subject.width, parameters, tuple(passed), left_out, silent)


def _window(sees: str | Sees | None) -> int:
    """The size of a window, as `sees` says it; else 0."""
    if not isinstance(sees, str) or sees == "all earlier":
        return 0
    window = re.fullmatch(r"window\(([1-9]\d{0,5})\)", sees)
    if window is None:
        raise UserError(f"sees must be 'all earlier', 'window(64)' or a function, got {sees!r}.")
    return int(window[1])


def _parse_sees(sees: str | Sees | None) -> Sees | None:
    if not isinstance(sees, str):
        return sees
    size = _window(sees) or 2**31
    return lambda out, place: 0 <= out - place < size


def _tokens(module: Any) -> int:
    """More than any window, chunk or table of the block."""
    return max(TOKENS, *(size + 9 for size in sizes_of(module) | {0} if size <= LARGEST_WINDOW))


def _beyond(module: Any, config: ModelConfig) -> str:
    known = {0, 1, *vars(config).values()}
    sizes = sorted(size for size in sizes_of(module) - known if LARGEST_WINDOW < size < 2**16)
    where = f", such as at {', '.join(map(str, sizes))}, which it holds" if sizes else ""
    return f"seq looks at what begins later{where}"


@dataclass(frozen=True)
class _Builder:
    """Builds the block, and moves its parameters."""

    name: str
    block: Any
    config: ModelConfig
    options: Mapping[str, Any]
    causal: bool | None
    zero_grad: Sequence[str]
    seed: int
    layer: int = LAYER
    moved: bool = True

    def __call__(self, **changed: Any) -> Any:
        """With fields of the config, or options, that are `changed`."""
        block = self.block
        if isinstance(block, type):
            block = self._make(block, changed)
        paths = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(block)}
        missing = sorted(set(self.zero_grad) - paths - {INPUT})
        require(not missing, f"There is no parameter {missing} in {self.name}, as zero_grad says.")
        if any(map(jnp.iscomplexobj, jax.tree.leaves(eqx.filter(block, eqx.is_array)))):
            # The laws would cast them, too.
            sentence = "complex ones are cast to real ones in training."
            raise CheckError(self.name, [("parameters", sentence)])
        if not self.moved:
            return block
        return _move_parameters(block, np.random.default_rng(self.seed), self.zero_grad)

    @property
    def is_numbered(self) -> bool:
        """Whether the block is told the number of its layer."""
        is_class = isinstance(self.block, type)
        return is_class and "layer" in inspect.signature(self.block).parameters

    def rebuilt(self, **changed: Any) -> Any:
        """With these fields of the config, `seed`, `layer` or `moved`. None of a module."""
        if not isinstance(self.block, type):
            return None
        own = {name: changed.pop(name) for name in ("seed", "layer", "moved") if name in changed}
        return replace(self, **own)(**changed)

    def _make(self, block: Callable[..., Any], changed: Mapping[str, Any]) -> Any:
        names = inspect.signature(block).parameters
        options = {**self.options, **{k: v for k, v in changed.items() if k in names}}
        fields = {k: v for k, v in changed.items() if k not in names and hasattr(self.config, k)}
        if self.causal is not None and "causal" in names:
            options["causal"] = self.causal
        make = functools.partial(block, replace(self.config, **fields), **options)
        key = jax.random.key(self.seed)
        try:
            return _make_layer(make, key, self.layer) if "layer" in names else make(key=key)
        except Exception as error:
            why = f"it cannot be built: {describe(error)}"
            if isinstance(error, FrozenInstanceError):
                why += ": its class does not declare that, as in `name: float`"
            raise CheckError(self.name, [("shapes", why)]) from error


@dataclass(frozen=True)
class _Reference:
    """Builds the reference, with the parameters of the block."""

    block: Any
    build: _Builder

    def __call__(self, **changed: Any) -> Any:
        """None of a module, if something is changed."""
        if not isinstance(self.block, type):
            return None if changed else _with_parameters(self.block, self.build())
        names = inspect.signature(self.block).parameters
        options = {name: value for name, value in self.build.options.items() if name in names}
        build = replace(self.build, name=self.block.__name__, block=self.block, options=options)
        module = self.build.rebuilt(**changed) if changed else self.build()
        return None if module is None else _with_parameters(build.rebuilt(**changed), module)


def _make_layer(make: Callable[..., Any], key: Key[Array, ""], layer: int) -> Any:
    """A block that takes its number, made as in a model: all layers by one call."""
    layers = eqx.filter_vmap(lambda key, layer: make(key=key, layer=layer))(
        key[None], jnp.array([layer])
    )
    arrays, rest = eqx.partition(layers, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda array: array[0], arrays), rest)


def _move_parameters(block: Any, random: np.random.Generator, zero_grad: Sequence[str]) -> Any:
    """Every parameter perturbed, so that none is zero, and gains and biases brought to a size at
    which no gate is shut."""
    in_stack = inside(block, Stack)

    def move(path, leaf, stacked):
        if isinstance(leaf, np.ndarray):  # of whole numbers with 64 bits, which JAX's do not have
            leaf = jnp.asarray(leaf)
        if not eqx.is_inexact_array(leaf) or path_name(path) in zero_grad:
            return leaf
        value = np.asarray(leaf)
        size = float(np.sqrt(np.mean(np.abs(value) ** 2))) if value.size else 0.0
        axes = value.ndim - int(stacked)
        usual = max(1, value.shape[-1]) ** -0.5 if axes > 1 else 0.1
        scale = 0.1 * size if size > 0.1 * usual else usual
        value = value + scale * random.normal(size=value.shape)
        if axes <= 1:
            value = np.sign(value) * np.clip(np.abs(value), *OPEN)
        return jnp.asarray(value.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(move, block, in_stack)


def _with_parameters(reference: Any, module: Any) -> Any:
    """`reference` with the parameters of `module`."""
    own, others = (
        {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (eqx.filter(tree, eqx.is_inexact_array) for tree in (module, reference))
    )
    shapes, wanted = ({k: v.shape for k, v in tree.items()} for tree in (own, others))
    require(
        shapes == wanted,
        f"The reference must have the same parameters: it has {wanted}, and the block {shapes}.",
    )
    params, static = eqx.partition(reference, eqx.is_inexact_array)
    leaves = [own[name] for name in others]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(params), leaves), static)


def describe(error: Exception) -> str:
    """An exception as a line, with the last line outside of packages that it came through."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}: {' '.join(lines[:4])}"
    if isinstance(error, TRACING):
        what = f"{type(error).__name__}: {lines[0].partition('. ')[0].removesuffix('.')}"
    if isinstance(error, jax.errors.ConcretizationTypeError):
        what += ". (While JAX traces, jnp.where and lax.cond choose, and no `if`.)"
    packages = ("site-packages", str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in packages):
            return f"{what} ({Path(frame.filename).name}, line {frame.lineno})"
    return what
