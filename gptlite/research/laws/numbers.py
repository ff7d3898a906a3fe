"""Laws of numbers: odd inputs, formats, rows without tokens."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gptlite.research.laws.law import LARGE, compare, is_finite
from gptlite.research.subject import Subject

# bfloat16 has 8 bits: 0.4 % a rounding, some ten of them in a row.
BFLOAT16 = 0.1
# Between float32 and float64, for odd inputs: sums that cancel lose everything.
ODD = 1e-2
# Tokens of a long sequence: bfloat16 counts to 256.
FAR = 1024


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
    inputs = {"": s.x}
    if _is_loop_free(s):
        where = f" after {3 * FAR // 4} tokens"
        inputs[where] = np.resize(s.x[:1], (1, FAR, *s.x.shape[2:]))
        if s.has_floats:  # so that sums grow
            inputs[f"{where} of one sign"] = np.abs(inputs[where])
    # Only the rounding of the arithmetic is compared, not that of parameters and inputs.
    rounded = cast_arrays(s.module, jnp.bfloat16)
    for where, x in inputs.items():
        x = x.astype(jnp.bfloat16) if s.has_floats else x
        half = s.run(x, module=rounded).astype(np.float32)
        wide = x.astype(np.float32) if s.has_floats else x
        full = s.run(wide, module=cast_arrays(rounded, np.float32))
        error = _relative(half, full)[:, (3 * FAR // 4 if where else 0) :]
        if not np.median(error) < BFLOAT16:
            return (
                f"in bfloat16 the output{where} is off by {np.median(error):.2g} of its size (the "
                f"median over positions; at most {BFLOAT16:g} is rounding)."
            )
    return None


def _is_loop_free(s: Subject) -> bool:
    """Whether a long sequence may be computed: the block has no context length that is shorter,
    and its program does not grow with the sequence."""
    limit = getattr(getattr(s.module, "config", None), "context_length", FAR)
    if limit < FAR or s.seq >= FAR:
        return False

    def size(seq):
        x = jax.ShapeDtypeStruct((1, seq, *s.x.shape[2:]), s.x.dtype)
        return str(eqx.filter_make_jaxpr(s.call)(s.module, x, None, None)[0]).count("\n")

    with contextlib.suppress(Exception):
        return size(FAR) <= 1.2 * size(s.seq)
    return False


def check_lengths(s: Subject) -> str | None:
    """A sequence of one token, and a row of a batch with none, give no NaN, and the right token."""
    if s.causal:
        message = compare(s.run(s.x[:, :1]), s.run(s.x)[:, :1], "a single token", "the first")
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
    alone = s.run(s.x[1:2, :1])
    return compare(y[1:2, :1], alone, "a row of one token", "the same alone")


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
