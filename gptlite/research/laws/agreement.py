"""Laws of agreement: two ways to the same output."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.errors import require
from gptlite.nn.stack import Stack
from gptlite.research.laws.form import shapes_in
from gptlite.research.laws.law import SAME, NotApplicableError, NotAskedError, compare, size_of
from gptlite.research.laws.order import pairs
from gptlite.research.subject import BATCH, Subject, calls_of_targets


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
    whole = s.run(s.x)
    half = s.seq // 2
    ways: dict[str, list[Any]] = {
        "token by token": [1] * s.seq,
        "in two chunks": [half, s.seq - half],
    }
    if s.kind != "layer":
        # No chunk, with its padding, ends after the last token, where a model has no place.
        chunks = [[0, 3, half], [2, 0, 1], [half - 1, half - 2, 0], [s.seq - half - 1] * BATCH]
        ways["in chunks of a different length in each row"] = [
            np.array(x) for x in chunks if any(x)
        ]
    one_call = "one call without a cache"
    for what, chunks in ways.items():
        message = compare(_decode(s, s.x, chunks), whole, f"decoding {what}", one_call)
        if message:
            return message
    # A cache without a batch axis, as generation makes one for a single text.
    chunks = ways["in two chunks"]
    message = compare(_decode(s, s.x[0], chunks), whole[0], "decoding one text", one_call)
    if message:
        return message
    if s.kind != "layer":
        first = np.array([[2, 3, 3], [2, 3, 2]])
        both = np.stack([s.x, s.other])
        two = _decode(s, both, [first, 3 - first, np.array(s.seq - 3)])
        wanted = np.stack([whole, s.run(s.other)])
        message = compare(two, wanted, "decoding with two batch axes", one_call)
        message = message or _check_formats(s)
    if message or s.source is None:
        return message
    padded = np.concatenate([s.source, s.source[:2]])
    calls = calls_of_targets(padded, np.asarray(len(s.source)))
    chunked = _decode(dataclasses.replace(s, **calls), s.x, chunks)
    return compare(chunked, whole, "decoding with padding after the source", one_call)


def _check_formats(s: Subject) -> str | None:
    """A cache keeps its shapes and dtypes, in bfloat16, too."""
    assert s.init_cache is not None
    for dtype in (jnp.float32, jnp.bfloat16):
        module = shapes_in(s.module, dtype)
        x = jax.ShapeDtypeStruct(s.x.shape, dtype if s.has_floats else s.x.dtype)
        cache = eqx.filter_eval_shape(s.init_cache, module, x, s.seq)
        start = jax.ShapeDtypeStruct((), np.int32)
        _, after = eqx.filter_eval_shape(s.extend, module, x, cache, start, None)
        if _cache_spec(after) != _cache_spec(cache):
            return (
                f"in {jnp.dtype(dtype)}, a cache of {_cache_spec(cache)} is returned as one of "
                f"{_cache_spec(after)}."
            )
    return None


def _decode(s: Subject, x: np.ndarray, chunks: Sequence[Any]) -> np.ndarray:
    """The outputs for `x`, decoded with a cache in chunks of these lengths: a number for all rows,
    or one for each. The first chunk is followed by padding, as generation pads prompts."""
    assert s.init_cache is not None
    batch = x.shape[: x.ndim - s.x.ndim + 1]
    other = np.broadcast_to(s.other if len(batch) > 0 else s.other[0], x.shape)
    widths = [s.seq if s.kind != "layer" else int(np.max(chunks[0]))]
    widths += [int(np.max(chunk)) for chunk in chunks[1:]]
    starts = np.cumsum([np.zeros_like(chunks[0]), *chunks[:-1]], axis=0)
    # Filled to its last place: none is left.
    capacity = max(int(np.max(start)) + width for start, width in zip(starts, widths, strict=True))
    cache = s.compiled(s.init_cache)(s.module, x, capacity)
    spec, done = _cache_spec(cache), np.zeros((), np.int32)
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
        require(
            _cache_spec(cache) == spec,
            f"a cache of {spec} is returned as one of {_cache_spec(cache)}.",
        )
        out[(*(index[real] for index in rows), places[real])] = np.asarray(y, np.float64)[real]
        done = done + count
    return out


def check_padding(s: Subject) -> str | None:
    """Padding after a sequence changes nothing."""
    if s.kind == "layer" or (s.kind == "model" and s.init_cache is None):
        raise NotApplicableError("it has no padding")
    lengths = np.array([s.seq - 3, s.seq - 3, s.seq][:BATCH])
    real = np.arange(s.seq) < lengths[:, None]
    shaped = real if s.x.ndim == 2 else real[..., None]
    padded = s.run(np.where(shaped, s.x, s.other), lengths)
    for row, length in enumerate(lengths):
        alone = s.run(s.x[row, :length])
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
    """A stack of blocks gives the same output unrolled and scanned."""
    if s.kind != "block":
        raise NotApplicableError("it is not a block")
    arrays, rest = eqx.partition(s.module, eqx.is_array)
    arrays = jax.tree.map(lambda a: np.stack([a, 1.1 * np.asarray(a)]).astype(a.dtype), arrays)

    def run_stack(arrays, x, scan):
        stack = Stack(lambda key, layer: _AsBlock(s.module), 2, scan=scan, key=jax.random.key(0))
        blocks = _AsBlock(eqx.combine(arrays, rest))
        return eqx.tree_at(lambda stack: stack.blocks, stack, blocks)(x)[0]

    run = s.compiled(run_stack)
    unrolled, scanned = (run(arrays, s.x, scan) for scan in (False, True))
    return compare(scanned, unrolled, "the scanned stack", "the unrolled stack")


def check_reference(s: Subject) -> str | None:
    """The output and the gradients of the reference, with the same parameters."""
    if s.reference is None:
        raise NotAskedError("reference names another form of the block, with the same parameters")
    weights = np.random.default_rng(0).normal(size=(*s.x.shape[:2], s.width)).astype(np.float32)
    for x in (s.x, s.other):
        y, params, inputs = s.pull(x, weights)
        wanted, wanted_params, wanted_inputs = s.pull(x, weights, module=s.reference)
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
    return None


def check_weights(s: Subject) -> str | None:
    """`weights` returns those that the call takes.

    The gradient of an output by a row of the value matrix is a sum over heads of the weighted means
    of the inputs, `sum_j w_ij x_j`. At the first token, where there is one weight, it is a multiple
    of the input whatever the weight is: so the value matrix is found.
    """
    if s.kind != "block" or not hasattr(s.module, "weights"):
        raise NotApplicableError("it has no method weights")
    if not s.causal:
        raise NotApplicableError("it is not causal")
    x = s.x[0]
    weights = np.asarray(s.compiled(lambda module, x: module.weights(x))(s.module, x), np.float64)
    if weights.shape[-2:] != (s.seq, s.seq) or weights.ndim != 3:
        return f"weights gives {list(weights.shape)}, and not [heads, {s.seq}, {s.seq}]."
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


def _outside(rows: np.ndarray, basis: np.ndarray) -> float:
    """The share of `rows` that is no sum of multiples of `basis`."""
    q, _ = np.linalg.qr(basis.T)
    rest = rows - rows @ q @ q.T
    return float(np.linalg.norm(rest) / max(np.linalg.norm(rows), 1e-30))


def _cache_spec(cache: Any) -> str:
    """Dtypes and shapes of a cache's arrays, without a model's length, which may be one for all
    rows or one for each."""
    arrays = [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
