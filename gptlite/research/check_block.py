"""Is a block right? `check_block(block)` says which check fails, where, and by how much.

    parameters  all of them are where training finds them
    shapes      the output has the shape and dtype of the input (of a model: logits)
    jit         traced and compiled twice, it gives the same
    causal      no output depends on a later input
    both ways   of an encoder instead: every output depends on every input; of an encoder-decoder
                also: every output depends on every token of the source
    batch       a sequence gives the same alone, in a batch, and under vmap
    cached      the same at once and in portions, also where each row has portions of its own length
    padding     padding after a sequence changes nothing
    gradients   finite, not zero for any parameter, and right by finite differences in float64
    bfloat16    close to float32
    scan        a stack of it gives the same unrolled and scanned

From the command line: `python -m gptlite.research.check_block FILE.py:CLASS`.
"""

import dataclasses
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro

from gptlite.cli import errors_as_sentences
from gptlite.config import ModelConfig, UserError, is_custom, require
from gptlite.custom import load_class
from gptlite.models.encoder import Encoder
from gptlite.models.seq2seq import Seq2Seq
from gptlite.models.summary import count_parameters
from gptlite.nn.context import Context
from gptlite.nn.stack import Stack
from gptlite.sharding import path_name
from gptlite.training.optimizer import inside
from gptlite.training.step import cast

BATCH = 3
SMALL = ModelConfig(n_layers=2, n_heads=2, d_model=16, context_length=16)

# Tolerances, as a share of the largest number that is compared.
# float32 has a precision of 6e-8. Sums of some hundred terms in another order differ by about ten
# times that, and a bug by orders of magnitude more.
SAME = 1e-4
# The same program on the same numbers differs by nothing, except for blocks that mix all tokens and
# cancel the later ones, as by Fourier transforms.
NO_INFLUENCE = 1e-5
# Central differences in float64. Two sizes, because a kink or a choice (ReLU, top-k) may lie
# within one of them, and parts of a block may compute in float32.
DIFFERENCES, DERIVATIVE = (1e-3, 1e-5), 2e-2
# bfloat16 has 8 bits: 0.4 % a rounding, some ten of them in a row.
BFLOAT16 = 0.1

Kind = Literal["layer", "block", "model", "encoder", "encoder-decoder"]


class CheckError(AssertionError):
    """A block fails checks. `checks` are the names of those that fail."""

    def __init__(self, name: str, failures: Sequence[tuple[str, str]]):
        self.checks = tuple(check for check, _ in failures)
        lines = [f"{check}: {message}" for check, message in failures]
        super().__init__(f"{name} is not right.\n  " + "\n  ".join(lines))


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
            f"{self.name} ({self.kind}, {axis} {self.width}, {self.parameters:,} parameters) is "
            f"right: {', '.join(self.checks)}"
        )


def check_block(
    block: Any,
    *,
    kind: Kind | None = None,
    config: ModelConfig = SMALL,
    d_model: int | None = None,
    causal: bool | None = None,
    seq: int = 8,
    idle: Sequence[str] = (),
    seed: int = 0,
) -> Report:
    """Run the checks in `gptlite.research.check_block`'s docstring. A block takes some seconds, an
    encoder-decoder about twenty.

    All parameters are moved at random first, so that none hides behind a zero.

    **Arguments:**

    - `block`: a module, or a class that is built as `block(config, key=key)`, and as
      `block(config, causal=causal, key=key)` if `causal` is given.
    - `kind`: `layer`, called as `layer(x)`, as an MLP or a norm is; `block`, with `init_cache` and
      the call of `Attention` or `Block`; `model`, called as `model(ids)`; `encoder`;
      `encoder-decoder`. Default: inferred from the class and its methods.
    - `config`: for a class.
    - `d_model`: of a module that is a layer or a block. For a class, that of `config`.
    - `causal`: False for an encoder's block, in which every token sees every other. Default: False
      for an `Encoder` and for what has an `Attention` that is not causal.
    - `seq`: tokens in a sequence; more than any window or chunk that the block has.
    - `idle`: names of parameters that are known to have no gradient: constants, and the bias of
      attention's keys without rotary positions and QK-norm, which softmax cancels.
    - `seed`: of the parameters and inputs.

    **Raises:** `CheckError`, which names all checks that fail.
    """
    key = jax.random.key(seed)
    name = block.__name__ if isinstance(block, type) else type(block).__name__
    if isinstance(block, type):
        has_causal = causal is not None and "causal" in inspect.signature(block).parameters
        make = functools.partial(block, causal=causal) if has_causal else block
        try:
            block = make(config, key=key)
        except Exception as error:
            raise CheckError(
                name, [("shapes", f"it cannot be built: {describe(error)}")]
            ) from error
        d_model = config.d_model
    block = _move_parameters(block, np.random.default_rng(seed), idle)
    try:
        subject = make_subject(block, kind, d_model, causal, seq, idle, seed)
    except UserError as error:
        raise CheckError(name, [("shapes", str(error))]) from error
    applies = [check for check in CHECKS if check not in _left_out(subject)]
    failures = []
    for check in applies:
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
    return Report(name, subject.kind, subject.width, count_parameters(block), tuple(applies))


@dataclass(frozen=True, eq=False)
class Subject:
    """A block, its inputs, and how it is called."""

    module: Any
    kind: Kind
    causal: bool
    idle: Sequence[str]
    x: np.ndarray
    """`[batch, seq, d_model]`, or ids, `[batch, seq]`."""
    other: np.ndarray
    """More of the same, different at every token."""
    width: int
    """The last axis of the output."""
    call: Callable[..., Any]
    """`call(module, x, lengths, key) -> y`, of whole sequences."""
    init_cache: Callable[..., Any] | None = None
    """`init_cache(module, x) -> cache`. None: the block has no cache."""
    extend: Callable[..., Any] = lambda module, x, cache, start, lengths: (module(x), cache)
    """`extend(module, x, cache, start, lengths) -> (y, cache)`."""
    source: np.ndarray | None = None
    """Ids, `[seq]`: of an encoder-decoder, the source of all sequences."""

    @property
    def seq(self) -> int:
        """Tokens in a sequence."""
        return self.x.shape[1]

    def run(self, x: Any, lengths: Any = None, key: Any = None, module: Any = None) -> np.ndarray:
        """The output for whole sequences, compiled."""
        return _run(self.call, self.module if module is None else module, x, lengths, key)


def make_subject(
    block: Any,
    kind: Kind | None,
    d_model: int | None,
    causal: bool | None,
    seq: int,
    idle: Sequence[str],
    seed: int,
) -> Subject:
    """**Raises:** `UserError` if the block is too small to be checked, or `d_model` is missing."""
    if kind is None:
        by_class: dict[type, Kind] = {Encoder: "encoder", Seq2Seq: "encoder-decoder"}
        by_method: Kind = "block" if hasattr(block, "init_cache") else "layer"
        by_method = "model" if hasattr(block, "vocab_size") else by_method
        kind = by_class.get(type(block), by_method)
    if causal is None:
        not_causal = any(getattr(module, "causal", True) is False for module in _modules(block))
        causal = kind == "encoder-decoder" or not not_causal
    parts: dict[str, Any] = {"module": block, "kind": kind, "causal": causal, "idle": idle}
    random = np.random.default_rng(seed)
    if kind in ("layer", "block"):
        if d_model is None:
            raise UserError(f"d_model must be given to check the {kind}.")
        x, other = random.normal(size=(2, BATCH, seq, d_model)).astype(np.float32)
        parts |= {"x": x, "other": other, "width": d_model}
        if kind == "layer":
            call = lambda module, x, lengths, key: module(x)  # noqa: E731
            return Subject(**parts, call=call, init_cache=lambda module, x: ())
        return Subject(**parts, call=_call_block, init_cache=_block_cache, extend=_extend_block)

    vocab = _vocab_size(block, kind)
    context = getattr(getattr(block, "config", None), "context_length", seq + 2)
    seq = min(seq, context - 2)
    require(
        seq >= 4 and vocab >= 4,
        f"it is too small to be checked, with a vocabulary of {vocab} and a context of {context}: "
        "at least 4 and 6 are needed.",
    )
    x = random.integers(vocab, size=(BATCH, seq)).astype(np.int32)
    other = (x + random.integers(1, vocab, size=x.shape).astype(np.int32)) % vocab
    parts |= {"x": x, "other": other, "width": vocab}
    if kind == "encoder":
        return Subject(**(parts | {"width": block.config.d_model}), call=_call_model)
    if kind == "encoder-decoder":
        parts |= {"width": block.decoder.vocab_size, "source": x[0]} | _calls_of_targets(x[0])
        return Subject(**parts)
    if hasattr(block, "extend"):
        cache = lambda module, x: module.init_cache(x.shape[:-1])  # noqa: E731
        return Subject(**parts, call=_call_model, init_cache=cache, extend=_extend_model)
    return Subject(**parts, call=lambda module, x, lengths, key: module(x))


# How each kind is called.


def _call_block(block: Any, x: Any, lengths: Any, key: Any) -> Any:
    out = block(x, None, Context(lengths=lengths), key=key)
    require(
        isinstance(out, tuple) and len(out) in (2, 3),
        f"{type(block).__name__} must return (y, cache), as attention, or (y, cache, aux_loss), as "
        "a whole block.",
    )
    return out[0]


def _block_cache(block: Any, x: Any) -> Any:
    # With more room than is ever read.
    return block.init_cache(x.shape[:-2], x.shape[-2] + 3, x.dtype)


def _extend_block(block: Any, x: Any, cache: Any, start: Any, lengths: Any) -> Any:
    return block(x, cache, Context(start=start, lengths=lengths), key=None)[:2]


def _call_model(model: Any, ids: Any, lengths: Any, key: Any) -> Any:
    return model(ids, lengths=lengths, key=key)


def _extend_model(model: Any, ids: Any, cache: Any, start: Any, lengths: Any) -> Any:
    # `start` is in the cache, as the length.
    cache = eqx.tree_at(lambda cache: cache.length, cache, start.astype(jnp.int32))
    hidden, cache = model.extend(ids, cache, lengths)
    return model.logits(hidden), cache


def _calls_of_targets(source: Any, source_lengths: Any = None) -> dict[str, Callable[..., Any]]:
    """An encoder-decoder, called as a model of its targets."""

    def given(batch):
        lengths = source_lengths
        lengths = None if lengths is None else jnp.broadcast_to(lengths, batch)
        return jnp.broadcast_to(source, (*batch, len(source))), lengths

    def call(model, ids, lengths, key):
        sources, source_lengths = given(ids.shape[:-1])
        return model(sources, ids, source_lengths=source_lengths, lengths=lengths, key=key)

    def extend(model, ids, cache, start, lengths):
        return _extend_model(model.decoder, ids, cache, start, lengths)

    def init_cache(model, x):
        return model.init_cache(*given(x.shape[:-1]))

    return {"call": call, "init_cache": init_cache, "extend": extend}


# The checks. Each returns a message if the block fails it.


def check_parameters(s: Subject) -> str | None:
    if any(map(jnp.iscomplexobj, jax.tree.leaves(eqx.filter(s.module, eqx.is_array)))):
        return "complex ones are cast to real ones in training."
    for module in _modules(s.module):
        for field in dataclasses.fields(module):
            value = getattr(module, field.name, None)
            if field.metadata.get("static", False) and isinstance(value, jax.Array | np.ndarray):
                return (
                    f"{type(module).__name__}.{field.name} is an array in a static field, which is "
                    "neither trained nor saved."
                )
    return None


def check_shapes(s: Subject) -> str | None:
    gives_logits = s.kind in ("model", "encoder-decoder")
    for x in (s.x, s.x[0]):
        for dtype in (jnp.float32, jnp.bfloat16):
            given = jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == np.float32 else x.dtype)
            out = eqx.filter_eval_shape(s.call, _shapes_in(s.module, dtype), given, None, None)
            shape = (*(x.shape[:-1] if x.dtype == np.float32 else x.shape), s.width)
            wanted = jnp.dtype(jnp.float32 if gives_logits else dtype)
            if out.shape != shape or out.dtype != wanted:
                return (
                    f"{given.dtype}{list(given.shape)} in, {out.dtype}{list(out.shape)} out "
                    f"instead of {wanted}{list(shape)}."
                )
    return None


def check_jit(s: Subject) -> str | None:
    again = eqx.filter_jit(lambda *arguments: s.call(*arguments))(s.module, s.x, None, None)
    return _compare(again, s.run(s.x), "compiled again", "compiled")


def check_causal(s: Subject) -> str | None:
    for key in (None, jax.random.key(0)):  # as in evaluation, and as in training
        before = s.run(s.x, key=key)
        for place in range(1, s.seq):
            x = np.concatenate([s.x[:, :place], s.other[:, place:]], axis=1)
            moved = _distance(s.run(x, key=key), before)[:, :place]
            if not moved.max() <= NO_INFLUENCE * _size(before):
                i = np.unravel_index(moved.argmax(), moved.shape)[1]
                return (
                    f"the output at position {i} depends on inputs from position {place} on: it "
                    f"moves by {moved.max():.2g} (numbers are up to {_size(before):.2g})"
                    + ("." if key is None else " (given a key).")
                )
    return None


def check_both_ways(s: Subject) -> str | None:
    if s.source is None:
        run, inputs, others, what = s.run, s.x, s.other, "output"
        return _depends_on_all(run, inputs, others, what, "input")
    call = lambda model, source: model(source, jnp.asarray(s.x[0]))  # noqa: E731
    encode = lambda model, source: model.encode(source)  # noqa: E731
    for what, function in (("output", call), ("encoder's output", encode)):
        run = functools.partial(_run, function, s.module)
        message = _depends_on_all(run, s.source, s.other[0], what, "source")
        if message:
            return message
    return None


def _depends_on_all(
    run: Callable[[Any], np.ndarray], x: np.ndarray, other: np.ndarray, what: str, of: str
) -> str | None:
    before, axis = run(x), x.ndim - 1 if x.dtype != np.float32 else x.ndim - 2
    for place in range(x.shape[axis]):
        here = (slice(None),) * axis + (place,)
        changed = x.copy()
        changed[here] = other[here]
        moved = _distance(run(changed), before)
        moved = moved.reshape(-1, moved.shape[-1]).max(axis=0)
        if not moved.min() > NO_INFLUENCE * _size(before):
            return (
                f"the {what} at position {moved.argmin()} does not depend on the {of} at {place}."
            )
    return None


def check_batch(s: Subject) -> str | None:
    together = s.run(s.x)
    for row, x in enumerate(s.x):
        message = _compare(together[row], s.run(x), f"sequence {row} in a batch", "alone")
        if message:
            return message
    mapped = _run(eqx.filter_vmap(s.call, in_axes=(None, 0, None, None)), s.module, s.x, None, None)
    message = _compare(mapped, together, "under vmap", "as a batch")
    if message or s.source is None:
        return message
    # Each with a source of its own, of its own length.
    sources = np.stack([np.roll(s.source, row) for row in range(BATCH)])
    lengths = np.maximum(1, len(s.source) - np.arange(BATCH))

    def call(model, source, ids, lengths):
        return model(source, ids, source_lengths=lengths)

    together = _run(call, s.module, sources, s.x, lengths)
    for row, length in enumerate(lengths):
        alone = _run(call, s.module, sources[row, :length], s.x[row], None)
        message = _compare(together[row], alone, f"pair {row} in a batch", "alone")
        if message:
            return message
    return None


def check_cached(s: Subject) -> str | None:
    whole = s.run(s.x)
    half = s.seq // 2
    ways: dict[str, list[Any]] = {
        "one token at a time": [1] * s.seq,
        "in portions": [s.seq - half, half],
    }
    if s.kind != "layer":
        first = np.array([2, 3, 4][:BATCH])
        ways["in portions of another length in each row"] = [first, s.seq - first]
    for what, portions in ways.items():
        message = _compare(_read(s, s.x, portions), whole, f"read {what}", "at once")
        if message:
            return message
    # A cache without a batch axis, as generation makes one for a single text.
    message = _compare(
        _read(s, s.x[0], ways["in portions"]), whole[0], "alone, read in portions", "at once"
    )
    if message or s.source is None:
        return message
    padded = np.concatenate([s.source, s.source[:2]])
    calls = _calls_of_targets(padded, np.asarray(len(s.source)))
    found = _read(dataclasses.replace(s, **calls), s.x, ways["in portions"])
    return _compare(found, whole, "cached, with padding behind the source", "without")


def _read(s: Subject, x: np.ndarray, portions: Sequence[Any]) -> np.ndarray:
    """The outputs for `x`, read with a cache in portions of so many tokens: a number for all rows,
    or one for each. The first portion is followed by padding, as generation pads prompts."""
    assert s.init_cache is not None
    batch = x.shape[:1] if x.ndim == s.x.ndim else ()
    other = s.other if batch else s.other[0]
    cache, done = _jit(s.init_cache, s.module, x), np.zeros((), np.int32)
    kind = _kind_of(cache)
    out = np.zeros((*batch, s.seq, s.width), np.float64)
    for portion in portions:
        count = np.asarray(portion, np.int32)
        width = s.seq if not done.any() and s.kind != "layer" else int(count.max())
        places = np.broadcast_to(done[..., None] + np.arange(width), (*batch, width))
        real = np.broadcast_to(np.arange(width) < count[..., None], (*batch, width))
        rows = tuple(np.indices((*batch, width))[:-1])
        inside = (*rows, np.minimum(places, s.seq - 1))
        shaped = real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
        part = np.where(shaped, x[inside], other[inside])
        y, cache = _jit(s.extend, s.module, part, cache, done, count)
        require(
            _kind_of(cache) == kind, f"a cache of {kind} comes back as one of {_kind_of(cache)}."
        )
        out[(*(index[real] for index in rows), places[real])] = np.asarray(y, np.float64)[real]
        done = done + count
    return out


def check_padding(s: Subject) -> str | None:
    lengths = np.array([s.seq - 3, s.seq - 1, s.seq][:BATCH])
    real = np.arange(s.seq) < lengths[:, None]
    shaped = real if s.x.ndim == 2 else real[..., None]
    padded = s.run(np.where(shaped, s.x, s.other), lengths)
    for row, length in enumerate(lengths):
        alone = s.run(s.x[row, :length])
        what = f"row {row} with {s.seq - length} tokens of padding behind it"
        message = _compare(padded[row, :length], alone, what, "without")
        if message:
            return message
    return None


def check_gradients(s: Subject) -> str | None:
    with jax.enable_x64(True):
        params, static = eqx.partition(s.module, eqx.is_inexact_array)
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        stacked = jax.tree.leaves(inside(params, Stack))
        leaves, structure = jax.tree.flatten(params)
        if not leaves:
            return None
        leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
        x = jnp.asarray(s.x, np.float64 if s.x.dtype == np.float32 else None)
        random = np.random.default_rng(0)
        directions = [random.normal(size=leaf.shape) for leaf in leaves]

        def call(leaves):
            module = eqx.combine(jax.tree.unflatten(structure, leaves), static)
            return s.call(module, x, None, None)

        weights = random.normal(size=jax.eval_shape(call, leaves).shape)

        def loss(leaves):
            return jnp.sum(weights * jnp.sin(call(leaves)))

        @jax.jit
        def slopes(leaves, directions):
            """Along each parameter's direction: by the gradient, and by differences."""
            grads = jax.grad(loss)(leaves)

            def moved(steps):
                return loss([p + t * d for p, t, d in zip(leaves, steps, directions, strict=True)])

            eye = jnp.eye(len(leaves))
            along = [jnp.vdot(g, d) for g, d in zip(grads, directions, strict=True)]
            steps = jnp.concatenate([sign * h * eye for h in DIFFERENCES for sign in (1, -1)])
            ends = jax.lax.map(moved, steps).reshape(len(DIFFERENCES), 2, -1)
            widths = 2 * jnp.array(DIFFERENCES)[:, None]
            return grads, jnp.stack(along), (ends[:, 0] - ends[:, 1]) / widths

        grads, along, by_difference = jax.device_get(slopes(leaves, directions))
    for name, grad, layers in zip(names, grads, stacked, strict=True):
        for layer, part in enumerate(grad if layers else [grad]):
            of = name + (f" of layer {layer}" if layers else "")
            if not np.isfinite(part).all():
                return f"the gradient of {of} is not finite."
            if name not in s.idle and not np.abs(part).max() > 1e-12:
                return (
                    f"{of} changes nothing: its gradient is zero. (If it is known to do "
                    f"nothing, idle=[{name!r}].)"
                )
    error = np.abs(by_difference - along).min(axis=0)
    size = np.maximum(np.abs(along), np.abs(by_difference).min(axis=0))
    # What is almost nothing is compared with the largest.
    wrong = error / np.maximum(size, 1e-3 * np.max(size)) > DERIVATIVE
    if wrong.any():
        i = int(wrong.argmax())
        return (
            f"the gradient of {names[i]} is wrong: {along[i]:.4g} along a direction in which "
            f"the output changes by {by_difference[-1][i]:.4g}."
        )
    return None


def check_bfloat16(s: Subject) -> str | None:
    # What the arithmetic loses is compared, not what parameters and inputs lose by rounding.
    rounded = _cast(s.module, jnp.bfloat16)
    x = s.x.astype(jnp.bfloat16) if s.x.dtype == np.float32 else s.x
    wide = x.astype(np.float32) if s.x.dtype == np.float32 else x
    half = s.run(x, module=rounded).astype(np.float32)
    full = s.run(wide, module=_cast(rounded, np.float32))
    error = np.linalg.norm(half - full, axis=-1) / np.linalg.norm(full, axis=-1).clip(1e-6)
    # The median: a choice, as of experts, may differ for a token here and there.
    if not np.median(error) < BFLOAT16:
        return (
            f"in bfloat16 the output is off by {np.median(error):.2g} of its size (the median over "
            f"positions; at most {BFLOAT16:g} is rounding)."
        )
    return None


class _AsBlock(eqx.Module):
    """Attention, called as a whole block."""

    inner: Any

    def __call__(self, x: Any, cache: Any, context: Any, *, key: Any) -> Any:
        return (*self.inner(x, cache, context, key=key), 0.0)[:3]


def check_scan(s: Subject) -> str | None:
    arrays, rest = eqx.partition(s.module, eqx.is_array)
    arrays = jax.tree.map(lambda a: np.stack([a, 1.1 * np.asarray(a)]).astype(a.dtype), arrays)

    def run(arrays, x, scan):
        stack = Stack(lambda key: _AsBlock(s.module), 2, scan=scan, key=jax.random.key(0))
        blocks = _AsBlock(eqx.combine(arrays, rest))
        return eqx.tree_at(lambda stack: stack.blocks, stack, blocks)(x)[0]

    unrolled, scanned = (_run(run, arrays, s.x, scan) for scan in (False, True))
    return _compare(scanned, unrolled, "scanned", "unrolled")


CHECKS: dict[str, Callable[[Subject], str | None]] = {
    "parameters": check_parameters,
    "shapes": check_shapes,
    "jit": check_jit,
    "causal": check_causal,
    "both ways": check_both_ways,
    "batch": check_batch,
    "cached": check_cached,
    "padding": check_padding,
    "gradients": check_gradients,
    "bfloat16": check_bfloat16,
    "scan": check_scan,
}


def _left_out(s: Subject) -> set[str]:
    """Checks that say nothing of such a block."""
    left_out = set() if s.causal else {"causal"}
    if s.causal and s.source is None:
        left_out.add("both ways")
    if not s.causal or s.init_cache is None:
        left_out.add("cached")
    if s.kind == "layer" or (s.kind == "model" and s.init_cache is None):
        left_out.add("padding")
    if s.kind != "block":
        left_out.add("scan")
    return left_out


def _move_parameters(block: Any, random: np.random.Generator, idle: Sequence[str]) -> Any:
    """Every parameter a little moved, and far from zero where it was zero."""

    def move(path, leaf):
        if not eqx.is_inexact_array(leaf) or path_name(path) in idle:
            return leaf
        value = np.asarray(leaf)
        size = float(np.sqrt(np.mean(np.abs(value) ** 2))) if value.size else 0.0
        scale = 0.1 * size or (value.shape[-1] ** -0.5 if value.ndim > 1 else 0.1)
        return jnp.asarray((value + scale * random.normal(size=value.shape)).astype(value.dtype))

    return jax.tree_util.tree_map_with_path(move, block)


def _vocab_size(model: Any, kind: Kind) -> int:
    if kind == "encoder":
        return len(model.embedding.weight)
    if kind == "encoder-decoder":
        source = model.decoder if model.shares_embedding else model.encoder
        return min(len(source.embedding.weight), model.decoder.vocab_size)
    out = eqx.filter_eval_shape(model, jnp.zeros((1, 1), jnp.int32))
    require(
        out.ndim == 3,
        f"it cannot be checked: it makes {list(out.shape)} of ids of the shape [1, 1], and not "
        "logits for each of them. (Check its parts.)",
    )
    return out.shape[-1]


def _modules(tree: Any) -> Iterator[Any]:
    """All modules in `tree`."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, eqx.Module)):
        if isinstance(node, eqx.Module):
            yield node
            for field in dataclasses.fields(node):
                if not field.metadata.get("static", False):
                    yield from _modules(getattr(node, field.name, None))


def _kind_of(cache: Any) -> str:
    """Dtypes and shapes of a cache's arrays, without a model's length, which may be one for all
    rows or one for each."""
    arrays = [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)


@eqx.filter_jit
def _jit(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _run(function: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """`function(*arguments)`, compiled."""
    return np.asarray(_jit(function, *arguments))


def _cast(module: Any, dtype: Any) -> Any:
    """`cast`, without compiling a program for each shape."""
    return jax.tree.map(
        lambda a: np.asarray(a).astype(dtype) if eqx.is_inexact_array(a) else a, module
    )


def _shapes_in(module: Any, dtype: Any) -> Any:
    """The shapes of `module`, its parameters in `dtype`."""
    return eqx.filter_eval_shape(cast, module, dtype)


def _size(x: Any) -> float:
    return float(np.abs(np.asarray(x, np.float64)).max())


def _distance(found: Any, wanted: Any) -> np.ndarray:
    """For each token, the largest difference; infinite where one is not a number."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))
    return np.nan_to_num(difference, nan=np.inf).max(axis=-1)


def _compare(found: Any, wanted: Any, what: str, than: str) -> str | None:
    """A message if the two differ by more than rounding."""
    error = _distance(found, wanted)
    if error.max() <= SAME * _size(wanted):
        return None
    place = np.unravel_index(error.argmax(), error.shape)[-1]
    return (
        f"{what}, the output at position {place} is off by {error.max():.2g} from {than} "
        f"(numbers are up to {_size(wanted):.2g})."
    )


def describe(error: Exception) -> str:
    """An exception as a line, with the last line outside of packages that it came through."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}: {' '.join(lines[:4])}"
    packages = ("site-packages", str(Path(__file__).parents[1]), "<")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(part in frame.filename for part in packages):
            return f"{what} ({Path(frame.filename).name}, line {frame.lineno})"
    return what


def main(
    block: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:CLASS")],
    *,
    idle: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = (),
    both_ways: bool = False,
    debug: bool = False,
) -> None:
    """Check a block of your own, built as CLASS(config, key=key).

    Args:
        block: The file and the class.
        idle: A parameter that is known to have no gradient; may be given several times.
        both_ways: It is an encoder's block: every output depends on every input.
        debug: Show where in the code an error came from.
    """
    with errors_as_sentences(debug):
        require(is_custom(block), f"A block is named as FILE.py:CLASS, got {block!r}.")
        try:
            causal = False if both_ways else None
            print(check_block(load_class(block), causal=causal, idle=idle))
        except CheckError as error:
            print(error)
            sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m gptlite.research.check_block")
