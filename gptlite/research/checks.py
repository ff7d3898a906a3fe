"""The checks of `check_block`. Each returns a message if a block fails it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.errors import require
from gptlite.machine.pytrees import cast, inside, is_parameter, path_name
from gptlite.nn.stack import Stack
from gptlite.research.subject import (
    BATCH,
    Subject,
    call_jitted,
    calls_of_targets,
    modules_in,
    run_compiled,
)

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
# The name of the input among the parameters.
INPUT = "the input"


def check_parameters(s: Subject) -> str | None:
    for module in modules_in(s.module):
        for field in dataclasses.fields(module):
            value = getattr(module, field.name, None)
            if field.metadata.get("static", False) and isinstance(value, jax.Array | np.ndarray):
                return (
                    f"{type(module).__name__}.{field.name} is an array in a static field, which is "
                    "neither trained nor saved."
                )
    for path, leaf in jax.tree_util.tree_leaves_with_path(s.module):
        if is_parameter(leaf) and leaf.dtype != jnp.float32:
            return f"{path_name(path)} is in {leaf.dtype} instead of float32."
    return None


def check_shapes(s: Subject) -> str | None:
    gives_logits = s.kind in ("model", "encoder-decoder")
    for x in (s.x, s.x[0]):
        for dtype in (jnp.float32, jnp.bfloat16):
            inputs = jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == np.float32 else x.dtype)
            out = eqx.filter_eval_shape(s.call, _shapes_in(s.module, dtype), inputs, None, None)
            shape = (*(x.shape[:-1] if x.dtype == np.float32 else x.shape), s.width)
            wanted = jnp.dtype(jnp.float32 if gives_logits else dtype)
            if out.shape != shape or out.dtype != wanted:
                return (
                    f"{inputs.dtype}{list(inputs.shape)} in, {out.dtype}{list(out.shape)} out "
                    f"instead of {wanted}{list(shape)}."
                )
    return None


def check_jit(s: Subject) -> str | None:
    again = eqx.filter_jit(lambda *arguments: s.call(*arguments))(s.module, s.x, None, None)
    return _compare(again, s.run(s.x), "a second compilation", "the first")


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
                    f"changes by {moved.max():.2g} (the largest value is {_size(before):.2g})"
                    + ("." if key is None else " (given a key).")
                )
    return None


def check_bidirectional(s: Subject) -> str | None:
    if s.source is None:
        return _depends_on_all(s.run, s.x, s.other, "output", "input")
    functions: dict[str, Callable[..., Any]] = {
        "output": lambda model, source: model(source, jnp.asarray(s.x[0])),
        "encoder's output": lambda model, source: model.encode(source),
    }
    for what, function in functions.items():
        run = functools.partial(run_compiled, function, s.module)
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
        message = _compare(together[row], s.run(x), f"sequence {row} of a batch", "the same alone")
        if message:
            return message
    mapped = run_compiled(
        eqx.filter_vmap(s.call, in_axes=(None, 0, None, None)), s.module, s.x, None, None
    )
    message = _compare(mapped, together, "vmap", "the batch")
    if message or s.source is None:
        return message
    # Each with a source of its own, of its own length.
    sources = np.stack([np.roll(s.source, row) for row in range(BATCH)])
    lengths = np.maximum(1, len(s.source) - np.arange(BATCH))

    def call(model, source, ids, lengths):
        return model(source, ids, source_lengths=lengths)

    together = run_compiled(call, s.module, sources, s.x, lengths)
    for row, length in enumerate(lengths):
        alone = run_compiled(call, s.module, sources[row, :length], s.x[row], None)
        message = _compare(together[row], alone, f"pair {row} of a batch", "the same alone")
        if message:
            return message
    return None


def check_cached(s: Subject) -> str | None:
    whole = s.run(s.x)
    half = s.seq // 2
    ways: dict[str, list[Any]] = {
        "token by token": [1] * s.seq,
        "in two chunks": [s.seq - half, half],
    }
    if s.kind != "layer":
        first = np.array([2, 3, 4][:BATCH])
        ways["in chunks of a different length in each row"] = [first, s.seq - first]
    one_call = "one call without a cache"
    for what, chunks in ways.items():
        message = _compare(_decode(s, s.x, chunks), whole, f"decoding {what}", one_call)
        if message:
            return message
    # A cache without a batch axis, as generation makes one for a single text.
    message = _compare(
        _decode(s, s.x[0], ways["in two chunks"]), whole[0], "decoding one text", one_call
    )
    if message or s.source is None:
        return message
    padded = np.concatenate([s.source, s.source[:2]])
    calls = calls_of_targets(padded, np.asarray(len(s.source)))
    chunked = _decode(dataclasses.replace(s, **calls), s.x, ways["in two chunks"])
    return _compare(chunked, whole, "decoding with padding after the source", one_call)


def _decode(s: Subject, x: np.ndarray, chunks: Sequence[Any]) -> np.ndarray:
    """The outputs for `x`, decoded with a cache in chunks of these lengths: a number for all rows,
    or one for each. The first chunk is followed by padding, as generation pads prompts."""
    assert s.init_cache is not None
    batch = x.shape[:1] if x.ndim == s.x.ndim else ()
    other = s.other if batch else s.other[0]
    cache, done = call_jitted(s.init_cache, s.module, x), np.zeros((), np.int32)
    spec = _cache_spec(cache)
    out = np.zeros((*batch, s.seq, s.width), np.float64)
    for chunk in chunks:
        count = np.asarray(chunk, np.int32)
        width = s.seq if not done.any() and s.kind != "layer" else int(count.max())
        places = np.broadcast_to(done[..., None] + np.arange(width), (*batch, width))
        real = np.broadcast_to(np.arange(width) < count[..., None], (*batch, width))
        rows = tuple(np.indices((*batch, width))[:-1])
        inside = (*rows, np.minimum(places, s.seq - 1))
        shaped = real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
        part = np.where(shaped, x[inside], other[inside])
        y, cache = call_jitted(s.extend, s.module, part, cache, done, count)
        require(
            _cache_spec(cache) == spec,
            f"a cache of {spec} is returned as one of {_cache_spec(cache)}.",
        )
        out[(*(index[real] for index in rows), places[real])] = np.asarray(y, np.float64)[real]
        done = done + count
    return out


def check_padding(s: Subject) -> str | None:
    lengths = np.array([s.seq - 3, s.seq - 3, s.seq][:BATCH])
    real = np.arange(s.seq) < lengths[:, None]
    shaped = real if s.x.ndim == 2 else real[..., None]
    padded = s.run(np.where(shaped, s.x, s.other), lengths)
    for row, length in enumerate(lengths):
        alone = s.run(s.x[row, :length])
        what = f"row {row} with {s.seq - length} padding tokens"
        message = _compare(padded[row, :length], alone, what, "the same row without")
        if message:
            return message
    return None


def check_documents(s: Subject) -> str | None:
    for place in (1, s.seq // 2):
        x = s.x.copy()
        x[:, place] = s.module.separator
        what = f"a document from position {place} on"
        message = _compare(s.run(x)[:, place:], s.run(x[:, place:]), what, "the same alone")
        if message:
            return message
    return None


def check_gradients(s: Subject) -> str | None:
    with jax.enable_x64(True):
        params, static = eqx.partition(s.module, eqx.is_inexact_array)
        names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        stacked = jax.tree.leaves(inside(params, Stack))
        leaves, structure = jax.tree.flatten(params)
        # Layers below learn by the gradient of the input, if it is not ids.
        is_float = s.x.dtype == np.float32
        has_gradient = is_float and INPUT not in s.zero_grad
        x = jnp.asarray(s.x, np.float64 if is_float else None)
        if has_gradient:
            leaves, names, stacked = [*leaves, x], [*names, INPUT], [*stacked, False]
        if not leaves:
            return None
        leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
        random = np.random.default_rng(0)
        directions = [random.normal(size=leaf.shape) for leaf in leaves]

        def call(leaves):
            *params, inputs = leaves if has_gradient else [*leaves, x]
            module = eqx.combine(jax.tree.unflatten(structure, params), static)
            return s.call(module, inputs, None, None)

        try:
            out = jax.eval_shape(call, leaves)
        except TypeError as error:
            return (
                "it does not compute in float64, in which derivatives are compared. If it fixes a "
                "dtype, such as that of a carry, take that of the input, x.dtype, instead. "
                f"({str(error).splitlines()[0]})"
            )
        weights = random.normal(size=out.shape)

        def loss(leaves):
            return jnp.sum(weights * jnp.sin(call(leaves)))

        @jax.jit
        def directional_derivatives(leaves, directions):
            """Along each parameter's direction: by the gradient, and by finite differences."""
            grads = jax.grad(loss)(leaves)

            def moved(steps):
                return loss([p + t * d for p, t, d in zip(leaves, steps, directions, strict=True)])

            eye = jnp.eye(len(leaves))
            analytic = [jnp.vdot(g, d) for g, d in zip(grads, directions, strict=True)]
            steps = jnp.concatenate([sign * h * eye for h in DIFFERENCES for sign in (1, -1)])
            ends = jax.lax.map(moved, steps).reshape(len(DIFFERENCES), 2, -1)
            widths = 2 * jnp.array(DIFFERENCES)[:, None]
            return grads, jnp.stack(analytic), (ends[:, 0] - ends[:, 1]) / widths

        grads, analytic, numeric = jax.device_get(directional_derivatives(leaves, directions))
    for name, grad, layers in zip(names, grads, stacked, strict=True):
        for layer, part in enumerate(grad if layers else [grad]):
            of = name + (f" of layer {layer}" if layers else "")
            if not np.isfinite(part).all():
                return f"the gradient of {of} is not finite."
            if name not in s.zero_grad and not np.abs(part).max() > 1e-12:
                return (
                    f"the gradient of {of} is zero. (If that is by design: zero_grad=[{name!r}].)"
                )
    error = np.abs(numeric - analytic).min(axis=0)
    size = np.maximum(np.abs(analytic), np.abs(numeric).min(axis=0))
    # Errors of derivatives below 1e-3 of the largest are relative to that.
    wrong = error / np.maximum(size, 1e-3 * np.max(size)) > DERIVATIVE
    if wrong.any():
        i = int(wrong.argmax())
        return (
            f"the gradient of {names[i]} is wrong: its directional derivative is "
            f"{analytic[i]:.4g}, and finite differences give {numeric[-1][i]:.4g}."
        )
    return None


def check_bfloat16(s: Subject) -> str | None:
    # Only the rounding of the arithmetic is compared, not that of parameters and inputs.
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

    def run_stack(arrays, x, scan):
        stack = Stack(lambda key, layer: _AsBlock(s.module), 2, scan=scan, key=jax.random.key(0))
        blocks = _AsBlock(eqx.combine(arrays, rest))
        return eqx.tree_at(lambda stack: stack.blocks, stack, blocks)(x)[0]

    unrolled, scanned = (run_compiled(run_stack, arrays, s.x, scan) for scan in (False, True))
    return _compare(scanned, unrolled, "the scanned stack", "the unrolled stack")


CHECKS: dict[str, Callable[[Subject], str | None]] = {
    "parameters": check_parameters,
    "shapes": check_shapes,
    "jit": check_jit,
    "causal": check_causal,
    "bidirectional": check_bidirectional,
    "batch": check_batch,
    "cached": check_cached,
    "padding": check_padding,
    "documents": check_documents,
    "gradients": check_gradients,
    "bfloat16": check_bfloat16,
    "scan": check_scan,
}


def inapplicable(s: Subject) -> set[str]:
    """The checks that do not apply to the block."""
    names = set() if s.causal else {"causal"}
    if s.causal and s.source is None:
        names.add("bidirectional")
    if not s.causal or s.init_cache is None:
        names.add("cached")
    if s.kind == "layer" or (s.kind == "model" and s.init_cache is None):
        names.add("padding")
    if s.kind != "model" or getattr(s.module, "separator", None) is None:
        names.add("documents")
    if s.kind != "block":
        names.add("scan")
    return names


def _cache_spec(cache: Any) -> str:
    """Dtypes and shapes of a cache's arrays, without a model's length, which may be one for all
    rows or one for each."""
    arrays = [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)


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


def _distance(out: Any, wanted: Any) -> np.ndarray:
    """For each token, the largest difference; infinite where one is not a number."""
    difference = np.abs(np.asarray(out, np.float64) - np.asarray(wanted, np.float64))
    return np.nan_to_num(difference, nan=np.inf).max(axis=-1)


def _compare(out: Any, wanted: Any, what: str, than: str) -> str | None:
    """A message if the two differ by more than rounding."""
    error = _distance(out, wanted)
    if error.max() <= SAME * _size(wanted):
        return None
    place = np.unravel_index(error.argmax(), error.shape)[-1]
    return (
        f"{what} differs from {than} by {error.max():.2g} at position {place} (the largest value "
        f"is {_size(wanted):.2g})."
    )
