"""Laws of agreement: two ways to the same output."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.errors import UserError, require
from gptlite.nn.context import WHOLE_SEQUENCE
from gptlite.nn.stack import Stack
from gptlite.research.laws.form import shapes_in
from gptlite.research.laws.law import (
    LARGE,
    NO_INFLUENCE,
    SAME,
    NotApplicableError,
    NotAskedError,
    compare,
    distance,
    pairs,
    size_of,
)
from gptlite.research.laws.numbers import far_inputs
from gptlite.research.laws.training import draw, one_row
from gptlite.research.subject import BATCH, RATE_FIELDS, Subject, calls_of_targets

# The share that is dropped in the comparison with a reference, and by how much of it what varies
# over keys may differ: over 512 draws of three rows, it is known to a few per cent.
NOISY, NOISE = 0.4, 0.2
# The same of the mean over keys, as a share of the output without one.
MEAN = 0.08


def check_batch(s: Subject) -> str | None:
    """A sequence gives the same output alone, in a batch, with two batch axes and under vmap."""
    together = s.run(s.x)
    for row, x in enumerate(s.x):
        message = compare(together[row], s.run(x), f"sequence {row} of a batch", "the same alone")
        if message:
            return message
    mapped = s.compiled(_mapped(s))(s.module, s.x)
    message = compare(mapped, together, "vmap", "the batch")
    if message:
        return message
    two = s.run(np.stack([s.x, s.other]))
    for i, x in enumerate((s.x, s.other)):
        what = f"part {i} of a batch with two leading axes"
        message = compare(two[i], s.run(x), what, "the same with one")
        if message:
            return message
    return None if s.source is None else _check_sources(s)


def _mapped(s: Subject) -> Any:
    return lambda module, x: eqx.filter_vmap(lambda x: s.call(module, x, None, None))(x)


def _check_sources(s: Subject) -> str | None:
    """Each with a source of its own, of its own length."""
    assert s.source is not None
    sources = np.stack([np.roll(s.source, row) for row in range(BATCH)])
    lengths = np.maximum(1, len(s.source) - np.arange(BATCH))

    def call(model, source, ids, lengths):
        return model(source, ids, source_lengths=lengths)

    call = s.compiled(call)
    together = call(s.module, sources, s.x, lengths)
    for row, length in enumerate(lengths):
        alone = call(s.module, sources[row, :length], s.x[row], None)
        message = compare(together[row], alone, f"pair {row} of a batch", "the same alone")
        if message:
            return message
    return None


def check_cached(s: Subject) -> str | None:
    """Decoding with a cache gives the output of one call, to the cache's last place.

    Token by token and in chunks, also of different lengths in each row, and of none; without a
    batch, and with two batch axes.
    """
    if not s.causal or s.init_cache is None:
        raise NotApplicableError("it has no cache")
    message = _check_decoding(s)
    if message:
        return message
    # A table or a cache may be as long as the context.
    full = None
    with contextlib.suppress(Exception):  # it may need a longer one
        full = s.rebuilt(context_length=s.seq)
    if full is None or _form(full) == _form(s.module):
        return None
    message = _check_decoding(dataclasses.replace(s, module=full, longest=s.seq))
    return message and f"with a context_length of {s.seq}, {message}"


def _form(module: Any) -> Any:
    """All of it but the numbers in arrays."""
    arrays, rest = eqx.partition(module, eqx.is_array)
    return jax.tree.map(jnp.shape, arrays), jax.tree.leaves(rest)


def _check_decoding(s: Subject) -> str | None:
    whole, both = s.run(s.x), np.stack([s.x, s.other])
    half = s.seq // 2
    # How, of what, in chunks of which lengths, and of which widths: equal ones are one program.
    # Padding follows the first, as it follows a prompt. No chunk, with its padding, ends after the
    # last token, where a model has no place.
    ways: list[tuple[str, np.ndarray, np.ndarray, list[Any], list[int]]] = [
        ("token by token", s.x, whole, [1] * s.seq, [s.seq] + [1] * (s.seq - 1)),
        ("in two chunks", s.x, whole, [half, s.seq - half], [s.seq, s.seq - half]),
        # A cache without a batch axis, as generation makes one for a single text.
        ("one text", s.x[0], whole[0], [half - 1, s.seq - half + 1], [s.seq - half + 1] * 2),
    ]
    if s.kind != "layer":
        chunks = [[0, 3, half - 1], [2, 0, 1], [half - 2, half - 3, 0], [s.seq - half] * BATCH]
        chunks = [np.array(chunk) for chunk in chunks]
        widths = [s.seq - half] * len(chunks)
        ways.append(("in chunks of a different length in each row", s.x, whole, chunks, widths))
        first, wanted = np.array([[2, 3, 3], [2, 3, 2]]), np.stack([whole, s.run(s.other)])
        chunks = [first, 3 - first, np.full_like(first, s.seq - 3)]
        ways.append(("with two batch axes", both, wanted, chunks, [s.seq - 3] * len(chunks)))
    one_call = "one call without a cache"
    for what, x, wanted, chunks, widths in ways:
        least = [int(np.max(chunk)) for chunk in chunks]
        widths = least if s.kind == "layer" else widths
        message = compare(_decode(s, x, chunks, widths), wanted, f"decoding {what}", one_call)
        if (
            message
            and widths != least
            and not compare(_decode(s, x, chunks, least), wanted, "", "")
        ):
            return (
                f"{message} With less padding after the chunks it is right: look at what is done "
                "with context.lengths."
            )
        if message:
            return message
    message = _check_large(s) if s.has_floats else None
    message = message or (None if s.kind == "layer" else _check_formats(s))
    if message or s.source is None:
        return message
    padded = np.concatenate([s.source, s.source[:2]])
    calls = calls_of_targets(padded, np.asarray(len(s.source)))
    _, _, _, chunks, widths = ways[1]
    chunked = _decode(dataclasses.replace(s, **calls), s.x, chunks, widths)
    return compare(chunked, whole, "decoding with padding after the source", one_call)


def _check_large(s: Subject) -> str | None:
    """A softmax without its maximum, or a mask of -30, may be in decoding alone."""
    x = LARGE * s.x
    whole = s.run(x)
    decoded = _decode(s, x, [1] * s.seq, [s.seq if s.kind != "layer" else 1] + [1] * (s.seq - 1))
    error = np.median(distance(decoded, whole))
    if error <= 1e-2 * size_of(whole):
        return None
    return (
        f"decoding inputs {LARGE:g} times as large token by token differs from one call by "
        f"{error:.2g} (the median over positions; the largest value is {size_of(whole):.2g})."
    )


def _check_formats(s: Subject) -> str | None:
    """A cache keeps its shapes and dtypes, in bfloat16, too."""
    assert s.init_cache is not None
    for dtype in (jnp.float32, jnp.bfloat16):
        module = shapes_in(s.module, dtype)
        x = jax.ShapeDtypeStruct(s.x.shape, dtype if s.has_floats else s.x.dtype)
        cache = eqx.filter_eval_shape(s.init_cache, module, x, s.seq)
        start = jax.ShapeDtypeStruct((), np.int32)
        _, after = eqx.filter_eval_shape(s.extend, module, x, cache, start, None)
        if _cache_spec(s, after) != _cache_spec(s, cache):
            return (
                f"in {jnp.dtype(dtype)}, a cache of {_cache_spec(s, cache)} is returned as one of "
                f"{_cache_spec(s, after)}."
            )
    return None


def _decode(s: Subject, x: np.ndarray, chunks: Sequence[Any], widths: Sequence[int]) -> np.ndarray:
    """The outputs for `x`, decoded with a cache in chunks of these lengths: a number for all rows,
    or one for each. Padding makes each as long as `widths` says."""
    assert s.init_cache is not None
    batch = x.shape[: x.ndim - s.x.ndim + 1]
    other = np.roll(x, 1, axis=len(batch))  # no token that comes next
    starts = np.cumsum([np.zeros_like(chunks[0]), *chunks[:-1]], axis=0)
    # Filled to its last place: none is left. Of one text, some are.
    capacity = max(int(np.max(start)) + width for start, width in zip(starts, widths, strict=True))
    capacity = capacity if batch else min(capacity + 3, s.longest)
    cache = s.compiled(s.init_cache)(s.module, x, capacity)
    spec, done = _cache_spec(s, cache), np.zeros((), np.int32)
    out = np.zeros((*batch, s.seq, s.width), np.float64)
    for chunk, width in zip(chunks, widths, strict=True):
        count = np.asarray(chunk, np.int32)
        places = np.broadcast_to(done[..., None] + np.arange(width), (*batch, width))
        real = np.broadcast_to(np.arange(width) < count[..., None], (*batch, width))
        rows = tuple(np.indices((*batch, width))[:-1])
        inside = (*rows, np.minimum(places, s.seq - 1))
        shaped = real.reshape(*real.shape, *(1,) * (x.ndim - real.ndim))
        part = np.where(shaped, x[inside], other[inside])
        y, cache = s.compiled(s.extend)(s.module, part, cache, done, count)
        after = _cache_spec(s, cache)
        require(after == spec, f"a cache of {spec} is returned as one of {after}.")
        out[(*(index[real] for index in rows), places[real])] = np.asarray(y, np.float64)[real]
        done = done + count
    return out


def check_padding(s: Subject) -> str | None:
    """Padding after a sequence changes nothing."""
    if s.kind == "layer" or (s.kind == "model" and s.init_cache is None):
        raise NotApplicableError("it has no padding")
    lengths = np.array([s.seq - 3, s.seq // 2, s.seq])
    real = np.arange(s.seq) < lengths[:, None]
    shaped = real if s.x.ndim == 2 else real[..., None]
    padded = s.run(np.where(shaped, s.x, s.other), lengths)
    for row, length in enumerate(lengths):
        # Where no output depends on a later input, that is so.
        alone = s.run(s.x)[row, :length] if s.causal else s.run(s.x[row, :length])
        what = f"row {row} with {s.seq - length} padding tokens"
        message = compare(padded[row, :length], alone, what, "the same row without")
        if message:
            return message
    return None


class _AsBlock(eqx.Module):
    """Attention, called as a whole block."""

    inner: Any

    def __call__(self, x: Any, cache: Any, context: Any, *, key: Any) -> Any:
        return (*self.inner(x, cache, context, key=key), 0.0)[:3]


def check_scan(s: Subject) -> str | None:
    """A scanned stack of blocks gives the output of one block after the other."""
    if s.kind != "block":
        raise NotApplicableError("it is not a block")
    arrays, rest = eqx.partition(s.module, eqx.is_array)
    layers = [arrays, jax.tree.map(lambda a: (1.1 * np.asarray(a)).astype(a.dtype), arrays)]

    def run_stack(arrays, x):
        stack = Stack(lambda key, layer: _AsBlock(s.module), 2, scan=True, key=jax.random.key(0))
        blocks = _AsBlock(eqx.combine(arrays, rest))
        return eqx.tree_at(lambda stack: stack.blocks, stack, blocks)(x)[0]

    scanned = s.compiled(run_stack)(jax.tree.map(lambda *a: np.stack(a), *layers), s.x)
    y = s.x
    for layer in layers:
        y = s.run(y, module=eqx.combine(layer, rest))
    return compare(scanned, y, "the scanned stack", "one block after the other")


def check_reference(s: Subject) -> str | None:
    """Outputs, gradients, `weights` and what dropout changes are those of the reference."""
    if s.reference is None:
        raise NotAskedError(
            "a wrong formula shows only beside another form of it, which reference names"
        )
    reference = s.reference()
    try:
        shape = s.run(s.x, module=reference).shape
    except Exception as error:
        raise UserError(f"the reference raised {type(error).__name__}: {error}") from error
    if shape != s.run(s.x).shape:
        return f"the reference gives {list(shape)}, and the block {list(s.run(s.x).shape)}."
    weights = np.random.default_rng(0).normal(size=(*s.x.shape[:2], s.width)).astype(np.float32)
    for x in (s.x, s.other, *([5 * s.x] if s.has_floats else [])):
        y, params, inputs = s.pull(x, weights)
        wanted, wanted_params, wanted_inputs = s.pull(x, weights, module=reference)
        message = compare(y, wanted, "the output", "the reference's")
        if message:
            return message
        grads = pairs(params, wanted_params)
        if s.has_floats:
            grads.append(("the input", inputs, wanted_inputs))
        for name, grad, right in grads:
            if not size_of(grad - right) <= 10 * SAME * size_of(right):
                return (
                    f"the gradient of {name} differs from the reference's by "
                    f"{size_of(grad - right):.2g} (the largest value is {size_of(right):.2g})."
                )
    if s.aux_loss is not None:
        lengths = np.array([s.seq, s.seq - 3, s.seq - 5], np.int32)
        aux_loss = s.compiled(s.aux_loss)
        for given in (None, lengths):
            own, right = (aux_loss(module, s.x, given) for module in (s.module, reference))
            if not abs(own - right) <= SAME * max(abs(right), 1e-6):
                return f"the auxiliary loss is {own:.6g}, and the reference's {right:.6g}."
    far = far_inputs(s)
    if far is not None:
        message = compare(s.run(far), s.run(far, module=reference), "the output", "the reference's")
        if message:
            return message
    if s.kind == "block" and all(_has_weights(module) for module in (s.module, reference)):
        run = s.compiled(_weights)
        message = compare(run(s.module, s.x), run(reference, s.x), "weights", "the reference's")
        if message:
            return message
    return None if s.kind == "layer" else _check_noise(s)


def _check_noise(s: Subject) -> str | None:
    """What dropout changes, as much as in the reference: at each token, and in their sum, which
    tells whether tokens share what is dropped."""
    x = one_row(s)
    for field in RATE_FIELDS:
        rates = dict.fromkeys(RATE_FIELDS, 0.0) | {field: NOISY}
        modules = s.rebuilt(**rates), s.reference and s.reference(**rates)
        if None in modules:
            s.notes["reference of dropout"] = "a class is built with it, and a module is built"
            return None
        own, wanted = (_noise(s, module, x) for module in modules)
        means = [noise.pop("mean") for noise in (own, wanted)]
        if not abs(means[0] - means[1]) <= MEAN:
            return (
                f"with {field} {NOISY:g}, the mean over keys is {means[0]:.3g} times the output "
                f"without one, and the reference's {means[1]:.3g} times."
            )
        for what, size in own.items():
            if not abs(size - wanted[what]) <= NOISE * max(wanted[what], 1e-6):
                return (
                    f"with {field} {NOISY:g}, {what} varies over keys by {size:.3g}, and the "
                    f"reference's by {wanted[what]:.3g}."
                )
    return None


def _noise(s: Subject, module: Any, x: np.ndarray) -> dict[str, float]:
    """Standard deviations of outputs over keys, and their mean as a share of the output without
    one."""
    still, drawn = draw(s, module, x)
    by_token = drawn.std(axis=0).mean(axis=(0, -1))
    places = {f"the output at position {i}": float(size) for i, size in enumerate(by_token)}
    mean = float(np.mean(drawn * still) / np.mean(still**2))
    return places | {
        "the sum of the outputs": float(drawn.sum(axis=2).std(axis=0).mean()),
        "mean": mean,
    }


def check_weights(s: Subject) -> str | None:
    """`weights` returns those that the call takes.

    The gradient of an output by a row of the value matrix is a sum over heads of the weighted means
    of the inputs, `sum_j w_ij x_j`. At the first token, where there is one weight, it is a multiple
    of the input whatever the weight is: so the value matrix is found.
    """
    if s.kind != "block" or not _has_weights(s.module):
        raise NotApplicableError("it has no method weights")
    if not s.causal:
        raise NotApplicableError("it is not causal")
    x = s.x[0]
    weights = np.asarray(s.compiled(_weights)(s.module, x), np.float64)
    if weights.shape[-2:] != (s.seq, s.seq) or weights.ndim != 3:
        return f"weights gives {list(weights.shape)}, and not [heads, {s.seq}, {s.seq}]."
    later = np.triu(np.abs(weights).max(axis=0), 1)
    if later.max() > NO_INFLUENCE * size_of(weights):
        query, key = np.unravel_index(later.argmax(), later.shape)
        return (
            f"weights gives the token at position {query} a weight of {later.max():.2g} for the "
            f"later one at {key}."
        )
    means = weights @ x.astype(np.float64)  # [heads, seq, d_model]
    places = [0, 1, 2, s.seq // 2, s.seq - 1]
    cotangents = np.zeros((len(places), *s.x.shape[:2], s.width), np.float32)
    random = np.random.default_rng(0)
    for i, place in enumerate(places):
        cotangents[i, 0, place] = random.normal(size=s.width)
    grads = [s.pull(s.x, cotangent)[1] for cotangent in cotangents]
    named, best = pairs(*grads), None
    # Where softmax has one score, queries and keys have no gradient, but for rounding.
    least = 1e-4 * max(size_of(first) for _, first, *_ in named)
    for name, *by_place in named:
        if by_place[0].ndim != 2 or by_place[0].shape[-1] != x.shape[-1]:
            continue
        left, own = (
            [
                _outside(grad.astype(np.float64), rows[:, place])
                for grad, place in zip(by_place, places, strict=True)
            ]
            for rows in (means, x[None].astype(np.float64))
        )
        if size_of(by_place[0]) < least or left[0] > 1e-3 or max(own) < 1e-3:
            continue  # a matrix that makes no values: of queries, keys or outputs, or of a gate
        # Without softmax, or with a sink, it may be a matrix of keys: the best one is of values.
        if best is None or max(left) < max(best[1]):
            best = name, left
    if best is None:
        raise NotApplicableError("no matrix makes values of the inputs")
    name, left = best
    worst = int(np.argmax(left))
    if left[worst] <= 1e-2:
        return None
    return (
        f"weights are not those of the call: the gradient of {name} by the output at position "
        f"{places[worst]} is not a sum of means of the inputs with these weights "
        f"({left[worst]:.2g} of it is not)."
    )


def _has_weights(module: Any) -> bool:
    return callable(getattr(module, "weights", None))


def _weights(module: Any, x: Any) -> Any:
    return module.weights(x, None, WHOLE_SEQUENCE, key=None)  # as the module is called


def _outside(rows: np.ndarray, basis: np.ndarray) -> float:
    """The share of `rows` that is no sum of multiples of `basis`."""
    q, _ = np.linalg.qr(basis.T)
    rest = rows - rows @ q @ q.T
    return float(np.linalg.norm(rest) / max(np.linalg.norm(rows), 1e-30))


def _cache_spec(s: Subject, cache: Any) -> str:
    """Dtypes and shapes of a cache's arrays, without a model's length, which may be one for all
    rows or one for each."""
    arrays = [
        x for x in jax.tree.leaves(cache) if s.has_floats or jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays) or "nothing"
