"""The matrix product that linear layers and attention share, with a backward pass of its own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of sums, exponentials and losses: float32, or float64 if `dtype` is float64."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`x` in `wide_dtype`."""
    return x.astype(wide_dtype(x.dtype))


@jax.custom_vjp
def product(
    a: Float[Array, "*batch m k"], b: Float[Array, "*batch n k"]
) -> Float[Array, "*batch m n"]:
    """`a @ b.T`, accumulated and returned in at least float32.

    The backward pass casts the incoming gradient to `a.dtype`. Reverse mode only: no `jax.jvp`.

    The order in memory of the factors decides the speed on a CPU, so programs that are compiled for
    a CPU multiply differently: see `_row_major` and `_weight_grad_on_cpu`.
    """
    return _forward(a, b)[0]


def _by_platform(function: Callable, on_cpu: Callable, a: Array, b: Array) -> Array:
    """`on_cpu(a, b)` in a program that is compiled for a CPU, else `function(a, b)`.

    They differ for bfloat16 alone, which XLA's CPU compiler multiplies at twice float32's speed if
    both factors are in row-major order, and at float32's speed if not.
    """
    if a.dtype != jnp.bfloat16:
        return function(a, b)
    return lax.platform_dependent(a, b, cpu=on_cpu, default=function)


def _abt(a: Array, b: Array) -> Array:
    """`a @ b.T`."""
    # One operation, no swapped axes: for a single row, XLA's CPU compiler would fetch the swapped
    # factor element by element.
    batch = tuple(range(a.ndim - 2))
    dimensions = ((a.ndim - 1,), (a.ndim - 1,)), (batch, batch)
    return lax.dot_general(a, b, dimensions, preferred_element_type=wide_dtype(a.dtype))


def _abt_on_cpu(a: Array, b: Array) -> Array:
    return _ab_on_cpu(a, jnp.swapaxes(b, -1, -2))


def _ab(a: Array, b: Array) -> Array:
    """`a @ b`."""
    return jnp.matmul(a, b, preferred_element_type=wide_dtype(a.dtype))


def _ab_on_cpu(a: Array, b: Array) -> Array:
    if a.dtype == jnp.bfloat16:
        a, b = _row_major(a), _row_major(b)
    return _ab(a, b)


def _row_major(x: Array) -> Array:
    """`x`, stored in row-major order: a flat array has only one order, and the barrier keeps the
    compiler from seeing through it. (`with_layout_constraint` is as fast on one device, but with
    several it gathers `x` on each.)"""
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _weight_grad(grad: Array, a: Array) -> Array:
    """`grad.T @ a`."""
    return _ab(jnp.swapaxes(grad, -1, -2), a)


def _weight_grad_on_cpu(grad: Array, a: Array) -> Array:
    """`grad.T @ a`. The narrower factor is transposed, which is up to 1.6 times as fast, also in
    float32."""
    if a.shape[-1] > grad.shape[-1]:
        return _atb_on_cpu(grad, a)
    out = _atb_on_cpu(a, grad)
    # The barrier keeps XLA from transposing both factors in place of the result.
    return jnp.swapaxes(lax.optimization_barrier(out), -1, -2)


def _atb_on_cpu(
    a: Float[Array, "*batch m k"], b: Float[Array, "*batch m n"]
) -> Float[Array, "*batch k n"]:
    """`a.T @ b`."""
    return _ab_on_cpu(jnp.swapaxes(a, -1, -2), b)


def _forward(a, b):
    return _by_platform(_abt, _abt_on_cpu, a, b), (a, b)


def _backward(factors, grad):
    a, b = factors
    # A float32 gradient would make this a float32 product.
    grad = grad.astype(a.dtype)
    grad_a = _by_platform(_ab, _ab_on_cpu, grad, b)
    grad_b = lax.platform_dependent(grad, a, cpu=_weight_grad_on_cpu, default=_weight_grad)
    return grad_a.astype(a.dtype), grad_b.astype(b.dtype)


product.defvjp(_forward, _backward)
