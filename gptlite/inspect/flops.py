"""The operations of a model, counted in the program that JAX traces."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from gptlite.family.seq2seq import Seq2Seq
from gptlite.machine.pytrees import Trainable, is_array


def flops_per_token(model: Any, trained: Trainable = is_array) -> tuple[int, int]:
    """FLOPs per token at the full context: forward, and training (forward and backward). Counts
    two per multiply-add of every matrix product and convolution, of causal attention those of the
    blocks that `attend` computes, and 5 n log2(n) for a Fourier transform of length n. Of a loop
    of unknown length (`jax.lax.while_loop`), one round counts. For an encoder-decoder: per token of
    the target, with a source of the same length.

    `trained`: the parameters that have a gradient. Default: all.
    """
    forward = eqx.filter_make_jaxpr(lambda model, *inputs: model(*inputs))(model, *inputs_of(model))
    both = (forward[0].jaxpr, _training(model, trained))
    first, second = (_count(jaxpr, _products) // model.config.context_length for jaxpr in both)
    return first, second


def operations_per_token(model: Any, trained: Trainable = is_array) -> int:
    """Floating-point operations of training per token at the full context: those of
    `flops_per_token`, and one for each number that any other arithmetic gives or sums up, also in
    scans. By this count, a recurrence costs as much written as a scan as in products of one
    element, and a layer as much in convolutions of width 1 as in products."""
    return _count(_training(model, trained), _arithmetic) // model.config.context_length


def inputs_of(model: Any, *batch: int) -> list[jax.ShapeDtypeStruct]:
    """The inputs of `model`, at the full context: ids, or for an encoder-decoder two of them."""
    ids = jax.ShapeDtypeStruct((*batch, model.config.context_length), jnp.int32)
    return [ids, ids] if isinstance(model, Seq2Seq) else [ids]


def _training(model: Any, trained: Trainable) -> Jaxpr:
    """The forward and the backward pass, without the gradients of parameters that are not trained,
    which a function with a rule of its own computes in any case."""

    def loss(params, rest, *inputs):
        # Squared, so that the gradient needs the output.
        return jnp.mean(jnp.square(eqx.combine(params, rest)(*inputs)))

    parts = eqx.partition(model, trained)
    training = eqx.filter_make_jaxpr(eqx.filter_grad(loss))(*parts, *inputs_of(model))[0]
    return dce_jaxpr(training.jaxpr, [True] * len(training.jaxpr.outvars))[0]


def _products(equation: Any) -> int:
    """Of a matrix product, a convolution or a Fourier transform."""
    name, parameters = equation.primitive.name, equation.params
    left: Any = equation.invars[0].aval if equation.invars else None
    out = equation.outvars[0].aval
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        return 2 * math.prod(left.shape[axis] for axis in contracted) * out.size
    if name in ("ragged_dot", "ragged_dot_general"):
        numbers = parameters["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        # Each row is in one group: it takes one matrix, or is summed into one.
        is_summed = numbers.lhs_ragged_dimensions[0] in contracted
        groups = equation.invars[2].aval.shape[-1] if is_summed else 1
        return 2 * math.prod(left.shape[axis] for axis in contracted) * out.size // groups
    if name == "triangular_solve":
        return out.size * left.shape[-1]
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        of_kernel = parameters["dimension_numbers"].rhs_spec  # output features, input features, ...
        return 2 * out.size * math.prod(kernel[axis] for axis in of_kernel[1:])
    if name == "fft":
        length = math.prod(parameters["fft_lengths"])
        whole = max(left.size, out.size)  # of real numbers, half of the transform is kept
        return round(5 * whole * math.log2(max(2, length)))
    return 0


# Primitives that give one number for one operation, and those that take one number for it.
ELEMENTWISE = {
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "square"),
    *("exp", "exp2", "expm1", "log", "log1p", "pow", "integer_pow", "sqrt", "rsqrt", "cbrt"),
    *("tanh", "logistic", "sin", "cos", "tan", "erf", "erfc", "erf_inv", "lgamma", "digamma"),
}
REDUCING = {
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"),
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "scatter-add", "scatter_add"),
}


def _arithmetic(equation: Any) -> int:
    name, out = equation.primitive.name, equation.outvars[0].aval
    if not equation.invars or not jnp.issubdtype(getattr(out, "dtype", int), jnp.inexact):
        return 0
    if name in ELEMENTWISE:
        return out.size
    if name in REDUCING:  # what is added by a scatter is its last operand
        of = equation.invars[-1 if name.startswith("scatter") else 0]
        return of.aval.size
    return _products(equation)


def _count(jaxpr: Jaxpr, operations: Callable[[Any], int]) -> int:
    """`operations` of all equations of `jaxpr` and of the functions that it calls."""
    total = 0
    for equation in jaxpr.eqns:
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        # Only one branch runs, as for a choice of the platform.
        add = max if equation.primitive.name == "cond" else sum
        inner = [_count(inner, operations) for inner in _inner_jaxprs(equation.params)]
        # A scatter has what it does with two numbers inside.
        total += operations(equation) or repeats * add(inner or [0])
    return total


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
