"""Laws of numbers: odd inputs, formats, rows without tokens."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.research.laws.law import LARGE, compare, is_finite, pairs, size_of
from gptlite.research.subject import FAR, Subject

# bfloat16 has 8 bits: 0.4 % a rounding, some ten of them in a row.
BFLOAT16 = 0.1
# A gradient has come through as many more.
BFLOAT16_GRADIENT = 0.3
# Between float32 and float64, for odd inputs: sums that cancel lose everything.
ODD = 1e-2


def check_extremes(s: Subject) -> str | None:
    """Outputs and gradients for odd inputs are finite, also in bfloat16, and near float64's."""
    weights = np.random.default_rng(0).normal(size=(*s.x.shape[:2], s.width)).astype(np.float32)
    for what, x in odd_inputs(s).items():
        for dtype in (np.float32, jnp.bfloat16):
            inputs = x.astype(dtype) if s.has_floats else x
            y, params, grad = s.pull(inputs, weights, module=cast_arrays(s.module, dtype))
            for name, values in {"output": y, "gradient": (params, grad)}.items():
                if not is_finite(values):
                    return f"the {name} is not finite for {what}, in {jnp.dtype(dtype)}."
        with in_float64(s) as (run, precision):
            exact = run(x) if precision < 1e-9 else None
        if exact is not None:
            error = _relative(s.run(x), exact)
            # The median: a choice, as of experts, may differ for a token here and there.
            if not np.median(error) < ODD:
                return (
                    f"the output for {what} is off by {np.median(error):.2g} of its size (the "
                    "median over positions), against float64: look for differences of large "
                    "numbers."
                )
    return None


def odd_inputs(s: Subject) -> dict[str, np.ndarray]:
    if not s.has_floats:
        return {"one token, many times": np.broadcast_to(s.x[:, :1], s.x.shape).copy()}
    x, end = s.x, s.seq // 2
    growing = x.copy()
    growing[:, end:] *= LARGE
    level = LARGE * np.broadcast_to(x[..., :1], x.shape)
    return {
        "inputs that are all zero": np.zeros_like(x),
        f"inputs {LARGE:g} times as large": LARGE * x,
        f"later inputs {LARGE:g} times as large": growing,
        "tokens whose channels are nearly equal": (level + 1e-3 * x).astype(np.float32),
        "one token, many times": np.broadcast_to(x[:, :1], x.shape).copy(),
    }


def check_bfloat16(s: Subject) -> str | None:
    """bfloat16 is close to float32, also far from the beginning."""
    inputs, far, full = {"": s.x}, far_inputs(s), None
    if far is not None:
        begin = far.shape[1] * 3 // 4
        where = f" after {begin} tokens"
        inputs[where] = far
        if s.has_floats:  # so that sums grow
            inputs[f"{where} of one sign"] = np.abs(far)
    elif s.kind in ("layer", "block"):
        s.notes[f"bfloat16 after {s.seq} tokens"] = (
            "a longer sequence has a much longer program, or none"
        )
    program = str(eqx.filter_make_jaxpr(s.call)(s.module, s.x, None, None)[0])
    if re.search(r"\bb?f16\[", program):
        s.notes["bfloat16 of a float32 model"] = (
            "it rounds to 16 bits there, too; whether that is near enough, a reference tells"
        )
    # Only the rounding of the arithmetic is compared, not that of parameters and inputs.
    rounded = cast_arrays(s.module, jnp.bfloat16)
    for where, x in inputs.items():
        x = x.astype(jnp.bfloat16) if s.has_floats else x
        half = s.run(x, module=rounded).astype(np.float32)
        wide = x.astype(np.float32) if s.has_floats else x
        full = s.run(wide, module=cast_arrays(rounded, np.float32))
        error = _relative(half, full)[:, x.shape[1] * 3 // 4 if where else 0 :]
        if not np.median(error) < BFLOAT16:
            return (
                f"in bfloat16 the output{where} is off by {np.median(error):.2g} of its size (the "
                f"median over positions; at most {BFLOAT16:g} is rounding)."
            )
    whole = None if far is None else full
    return _check_decoding(s, rounded, whole) or _check_gradients(s, rounded)


def _check_decoding(s: Subject, rounded: Any, whole: np.ndarray | None) -> str | None:
    """A state that is rounded at each token. `whole`: what one call gives in float32, or None."""
    if s.kind != "block" or s.init_cache is None or not s.causal:
        return None
    length = FAR[-1]
    x = np.abs(np.resize(s.x[:1], (1, length, *s.x.shape[2:]))).astype(jnp.bfloat16)
    decode = s.compiled(functools.partial(_decode, s.init_cache, s.extend))

    def error_of(wanted):
        half = np.asarray(decode(rounded, x), np.float32)
        return np.median(_relative(half, wanted[:, :length])[:, length * 3 // 4 :])

    error = 0.0
    with contextlib.suppress(Exception):  # the law `cached` tells
        if whole is not None and error_of(whole) < BFLOAT16:
            return None
        # If that is as far off, the cache is wrong, and not the rounding.
        error = error_of(np.asarray(decode(cast_arrays(rounded, np.float32), x.astype(np.float32))))
    if error < BFLOAT16:
        return None
    return (
        f"in bfloat16 the output after {length * 3 // 4} tokens of one sign, decoded one by one, "
        f"is off by {error:.2g} of its size (at most {BFLOAT16:g} is rounding): a state that is "
        "rounded at each token is better kept in float32."
    )


def _decode(init_cache: Any, extend: Any, module: Any, x: Any) -> Any:
    def step(cache, token):
        place, token = token
        y, cache = extend(module, token[:, None], cache, place, None)
        return cache, y[:, 0]

    tokens = jnp.arange(x.shape[1], dtype=jnp.int32), jnp.moveaxis(x, 1, 0)
    _, y = jax.lax.scan(step, init_cache(module, x, x.shape[1]), tokens)
    return jnp.moveaxis(y, 0, 1)


def _check_gradients(s: Subject, rounded: Any) -> str | None:
    weights = np.random.default_rng(0).normal(size=(*s.x.shape[:2], s.width)).astype(np.float32)
    errors: dict[str, float] = {}
    for x in (s.x, s.other, s.x[:, ::-1]):  # at one of them, something may cancel, or have a kink
        x = x.astype(jnp.bfloat16) if s.has_floats else x
        _, half, half_input = s.pull(x, weights, module=rounded)
        wide = x.astype(np.float32) if s.has_floats else x
        _, full, full_input = s.pull(wide, weights, module=cast_arrays(rounded, np.float32))
        grads = [*pairs(half, full)] + [("the input", half_input, full_input)] * s.has_floats
        largest = max((size_of(right) for _, _, right in grads), default=0.0)
        for name, grad, right in grads:
            if name in s.zero_grad or size_of(right) <= 1e-2 * largest:
                errors[name] = 0.0  # rounding is all of what cancels
                continue
            error = float(np.linalg.norm(np.asarray(grad, np.float64) - right))
            error /= float(np.linalg.norm(np.asarray(right, np.float64)))
            errors[name] = min(error, errors.get(name, error))
    for name, error in errors.items():
        if not error < BFLOAT16_GRADIENT:
            return (
                f"in bfloat16 the gradient of {name} is off by {error:.2g} of its size (at most "
                f"{BFLOAT16_GRADIENT:g} is rounding)."
            )
    return None


def far_inputs(s: Subject) -> np.ndarray | None:
    """One long sequence, if it may be computed: the block has no context length that is shorter,
    and its program does not grow to more than three times its length, as an unrolled loop does."""
    limit = getattr(getattr(s.module, "config", None), "context_length", s.longest)

    def size(seq):
        x = jax.ShapeDtypeStruct((1, seq, *s.x.shape[2:]), s.x.dtype)
        return str(eqx.filter_make_jaxpr(s.call)(s.module, x, None, None)[0]).count("\n")

    for length in FAR:
        with contextlib.suppress(Exception):
            if s.seq < length <= limit and size(length) <= 3 * size(s.seq):
                return np.resize(s.x[:1], (1, length, *s.x.shape[2:]))
    return None


def check_lengths(s: Subject) -> str | None:
    """A short sequence is the beginning of a long one; rows of one token, or none, give no NaN."""
    single = s.run(s.x[:, :1])
    if s.causal:
        for length in (1, 3, s.seq - 3):
            what = "a single token" if length == 1 else f"a sequence of {length} tokens"
            of = f"the beginning of one of {s.seq}"
            message = compare(s.run(s.x[:, :length]), s.run(s.x)[:, :length], what, of)
            if message:
                return message
    if s.kind == "layer" or (s.kind == "model" and s.init_cache is None):
        return None  # it has no padding
    lengths = np.array([0, 1, s.seq], np.int32)
    real = np.arange(s.seq) < lengths[:, None]
    weights = np.where(real[..., None], np.ones((*s.x.shape[:2], s.width), np.float32), 0)
    y, params, grad = s.pull(s.x, weights, lengths)
    for name, values in {"output": y, "gradient": (params, grad)}.items():
        if not is_finite(values):
            return f"the {name} is not finite, where a row of a batch has no token or one."
    return compare(y[1, :1], single[1], "a row of one token", "the same alone")


def _relative(out: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each token, the error as a share of its size."""
    out, wanted = (np.asarray(x, np.float64) for x in (out, wanted))
    size = np.linalg.norm(wanted, axis=-1)
    return np.linalg.norm(out - wanted, axis=-1) / size.clip(1e-6 * max(size.max(), 1e-30))


@contextlib.contextmanager
def in_float64(s: Subject) -> Iterator[tuple[Callable[[np.ndarray], np.ndarray], float]]:
    """A function from inputs to outputs, computed in float64, and its precision. Of a block that
    fixes a dtype, such as that of a carry, in float32."""
    with jax.enable_x64(True):
        module = cast_arrays(s.module, np.float64)
        x = jax.ShapeDtypeStruct(s.x.shape, np.float64 if s.has_floats else s.x.dtype)
        with contextlib.suppress(TypeError):
            eqx.filter_eval_shape(s.call, module, x, None, None)
            call = s.compiled(s.call)
            yield (
                lambda x: np.asarray(
                    call(module, x.astype(np.float64) if s.has_floats else x, None, None)
                ),
                1e-10,
            )
            return
    yield s.run, 1e-6


def cast_arrays(module: Any, dtype: Any) -> Any:
    """The parameters in `dtype`, without compiling a program for each shape."""
    return jax.tree.map(
        lambda a: np.asarray(a).astype(dtype) if eqx.is_inexact_array(a) else a, module
    )
