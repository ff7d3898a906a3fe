"""Elementwise functions that keep their input alone for the backward pass.

The reference: `function(widen(x)).astype(x.dtype)`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from gptlite.nn.dtypes import wide_dtype, widen


def from_input(function: Callable[[Array], Array], name: str) -> Callable[[Array], Array]:
    """`function`, an elementwise one, computed in at least float32. For the backward pass, it keeps
    its input alone. `name`: MODULE.NAME of what is returned, so that a model that has it can be
    copied and pickled, as one with any other function.

    Left to itself, XLA keeps each intermediate result of `function` in the format of the input, and
    reads and writes all of them. With GELU in bfloat16, a training step on a CPU takes 1.07 to 1.15
    times as long (benchmarks/NOTES.md).
    """

    @jax.custom_vjp
    def activation(x):
        return function(widen(x)).astype(x.dtype)

    def backward(x, grad):
        # A zero that XLA does not know of: it cannot see that the forward pass has computed the
        # same, whose float32 results it would keep on a GPU.
        zero = lax.optimization_barrier(jnp.zeros((), wide_dtype(x.dtype)))
        (wide,) = jax.vjp(function, widen(x) + zero)[1](widen(grad))
        return (wide.astype(x.dtype),)

    activation.defvjp(lambda x: (activation(x), x), backward)

    def named(x: Array) -> Array:
        return activation(x)

    named.__module__, _, named.__qualname__ = name.rpartition(".")
    return named
