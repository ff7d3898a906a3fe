"""Laws of what depends on what: causality, forward and backward; what must be seen."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gptlite.nn.context import Context
from gptlite.research.laws.law import (
    LARGE,
    NO_INFLUENCE,
    NotApplicableError,
    NotAskedError,
    compare,
    distance,
    is_finite,
    pairs,
    size_of,
)
from gptlite.research.laws.numbers import far_inputs, in_float64
from gptlite.research.subject import Subject


def check_causal(s: Subject) -> str | None:
    """No output depends on a later input."""
    _require_causal(s)
    for key in (None, jax.random.key(0)):  # as in evaluation, and as in training
        # What a mask lets through shows beside large scores: of later inputs, or of all.
        large = ((1.0, LARGE), (LARGE, LARGE)) if s.has_floats else ()
        for earlier, later in ((1.0, 1.0), *large):
            first = (earlier * s.x).astype(s.x.dtype)
            before = s.run(first, key=key)
            for place in range(1, s.seq, 1 if later == 1 else 8):
                changed = (later * s.other[:, place:]).astype(s.x.dtype)
                x = np.concatenate([first[:, :place], changed], axis=1)
                moved = distance(s.run(x, key=key), before)[:, :place]
                if not moved.max() <= later * NO_INFLUENCE * size_of(before):
                    i = np.unravel_index(moved.argmax(), moved.shape)[1]
                    whose = "all" if earlier > 1 else "they"
                    return (
                        f"the output at position {i} depends on inputs from position {place} on: "
                        f"it changes by {moved.max():.2g} (the largest value is "
                        f"{size_of(before):.2g})"
                        + (f" when {whose} are {later:g} times as large" if later > 1 else "")
                        + ("." if key is None else " (given a key).")
                    )
    return _check_far(s)


def _check_far(s: Subject) -> str | None:
    """What begins beyond some number of tokens."""
    x = far_inputs(s)
    if x is None:
        return None
    seq, before = x.shape[1], s.run(x)
    for place in (1, 2, seq // 2 + 1, seq - 1):
        changed = np.concatenate([x[:, :place], x[:, :-place]], axis=1)
        moved = distance(s.run(changed), before)[:, :place]
        if not moved.max() <= NO_INFLUENCE * size_of(before):
            return (
                f"in a sequence of {seq} tokens, the output at position {moved.argmax()} depends "
                f"on inputs from position {place} on: it changes by {moved.max():.2g} (the largest "
                f"value is {size_of(before):.2g})."
            )
    return None


def check_backward(s: Subject) -> str | None:
    """No gradient of an output depends on a later input, or reaches one."""
    _require_causal(s)
    cotangent = np.random.default_rng(0).normal(size=(*s.x.shape[:2], s.width))
    for place in sorted({1, 2, s.seq // 4, s.seq // 2, 3 * s.seq // 4, s.seq - 1}):
        earlier = cotangent.astype(np.float32)
        earlier[:, place:] = 0
        x = np.concatenate([s.x[:, :place], s.other[:, place:]], axis=1)
        (_, params, inputs), (_, moved, moved_inputs) = s.pull(s.x, earlier), s.pull(x, earlier)
        what = f"the gradient of the outputs before position {place}"
        if not is_finite((params, inputs, moved, moved_inputs)):
            return f"{what} is not finite."
        if s.has_floats:
            size = size_of(inputs)
            if not size_of(inputs[:, place:]) <= NO_INFLUENCE * size:
                return (
                    f"{what} reaches later inputs, up to {size_of(inputs[:, place:]):.2g} (the "
                    f"largest one is {size:.2g}): if causal holds, look at a custom_vjp."
                )
            change = size_of(moved_inputs[:, :place] - inputs[:, :place])
            if not change <= NO_INFLUENCE * size:
                return f"{what} depends on later inputs: it changes by {change:.2g} of {size:.2g}."
        for name, grad, other in pairs(params, moved):
            change = size_of(other - grad)
            if not change <= NO_INFLUENCE * max(size_of(grad), 1e-6):
                return (
                    f"{what} by {name} depends on later inputs: it changes by {change:.2g} (the "
                    f"largest value is {size_of(grad):.2g})."
                )
    return None


def check_bidirectional(s: Subject) -> str | None:
    """Every output of an encoder depends on every input (or every token of the source)."""
    if s.causal and s.source is None:
        raise NotApplicableError("it is causal")
    if s.source is None:
        return _depends_on_all(s.run, s.x, s.other, "output", "input")
    functions: dict[str, Callable[..., Any]] = {
        "output": lambda model, source: model(source, s.x[0]),
        "encoder's output": lambda model, source: model.encode(source),
    }
    for what, function in functions.items():
        run = functools.partial(s.compiled(function), s.module)
        message = _depends_on_all(run, s.source, s.other[0], what, "source")
        if message:
            return message
    return None


def _depends_on_all(
    run: Callable[[Any], Any], x: np.ndarray, other: np.ndarray, what: str, of: str
) -> str | None:
    before, axis = np.asarray(run(x)), x.ndim - 1 if x.dtype != np.float32 else x.ndim - 2
    for place in range(x.shape[axis]):
        here = (slice(None),) * axis + (place,)
        changed = x.copy()
        changed[here] = other[here]
        moved = distance(run(changed), before)
        moved = moved.reshape(-1, moved.shape[-1]).max(axis=0)
        if not moved.min() > NO_INFLUENCE * size_of(before):
            return (
                f"the {what} at position {moved.argmin()} does not depend on the {of} at {place}."
            )
    return None


def check_sees(s: Subject) -> str | None:
    """The output depends on what `sees` says, and on nothing else."""
    if s.sees is None:
        raise NotAskedError(
            "sees says what the output must depend on: all earlier, window(64), or a function"
        )
    with in_float64(s) as (run, precision):
        x, other = s.x, s.other
        before, moved = run(x), np.zeros((s.seq, s.seq))
        for place in range(s.seq):
            for changes in (other, np.roll(other, 1, axis=0)):
                changed = x.copy()
                changed[:, place] = changes[:, place]
                change = distance(run(changed), before).max(axis=0) / size_of(before)
                moved[:, place] = np.maximum(moved[:, place], change)
    for out in range(s.seq):
        for place in range(s.seq):
            if bool(s.sees(out, place)) != bool(moved[out, place] > precision):
                must = "does not depend" if s.sees(out, place) else "depends"
                return (
                    f"the output at position {out} {must} on the input at {place} (a change there "
                    f"moves it by {moved[out, place]:.2g} of its size)."
                )
    return None


def check_documents(s: Subject) -> str | None:
    """A document gives the same output alone and between others, also decoded with a cache."""
    if s.kind not in ("block", "model"):
        raise NotApplicableError("it is told of no documents")
    separator = getattr(s.module, "separator", None)
    if not s.separate_documents and separator is None:
        raise NotAskedError("documents are kept apart only if the config has separate_documents")
    x = s.x.copy()
    ends = [[0, row + 1, s.seq // 2 + row, s.seq] for row in range(len(x))]
    starts = np.zeros(x.shape[:2], np.int32)
    for row, places in enumerate(ends):
        for place in places[1:-1]:
            starts[row, place:] = place
            if separator is not None:
                x[row, place] = separator
    if separator is not None:
        x[np.isin(x, separator) & (starts != np.arange(s.seq))] = (separator + 1) % s.width
    alone = np.empty((*x.shape[:2], s.width), np.float32)
    for row, places in enumerate(ends):
        for start, end in itertools.pairwise(places):
            # Later tokens change nothing, if it is causal: one length is one program.
            text = np.roll(x[row], -start, axis=0) if s.causal else x[row, start:end]
            alone[row, start:end] = _of_one_document(s, text)[: end - start]
    if s.kind == "model":
        return compare(s.run(x), alone, "a document between others", "the same alone")
    run = s.compiled(_run_documents)
    what = "a document between others (see context.document_starts)"
    message = compare(run(s.module, x, starts), alone, what, "the same alone")
    if message or s.init_cache is None or not s.causal:
        return message
    for padding, words in ((0, ""), (3, ", with padding in which documents begin")):
        decoded = _decode_in_halves(s, s.init_cache, x, starts, padding)
        what = f"decoding a document between others{words} (see context.document_starts)"
        message = compare(decoded, alone[:, : decoded.shape[1]], what, "the same alone")
        if message:
            return message
    return None


def _decode_in_halves(
    s: Subject, init_cache: Callable[..., Any], x: Any, starts: Any, padding: int
) -> np.ndarray:
    """Both halves one after the other, each with some tokens of padding that are documents."""
    half = s.seq // 2
    cache, parts = s.compiled(init_cache)(s.module, x, 2 * half + padding), []
    decode = s.compiled(_decode_documents)
    for first in (0, half):
        part = slice(first, first + half)
        tokens = np.concatenate([x[:, part], x[:, :padding]], axis=1)
        own = np.broadcast_to(np.arange(first + half, first + half + padding), (len(x), padding))
        begun = np.concatenate([starts[:, part], own], axis=1, dtype=np.int32)
        lengths = np.full(len(x), half, np.int32)
        y, cache = decode(s.module, tokens, cache, np.int32(first), begun, lengths)
        parts.append(y[:, :half])
    return np.concatenate(parts, axis=1)


def _of_one_document(s: Subject, text: np.ndarray) -> np.ndarray:
    if s.kind == "model":
        return s.run(text)
    return np.asarray(s.compiled(_run_documents)(s.module, text, np.zeros(len(text), np.int32)))


def _run_documents(block: Any, x: Any, starts: Any) -> Any:
    return block(x, None, Context(document_starts=starts), key=None)[0]


def _decode_documents(block: Any, x: Any, cache: Any, start: Any, starts: Any, lengths: Any) -> Any:
    context = Context(start=start, document_starts=starts, lengths=lengths)
    return block(x, cache, context, key=None)[:2]


def _require_causal(s: Subject) -> None:
    if not s.causal:
        raise NotApplicableError("it is not causal")
