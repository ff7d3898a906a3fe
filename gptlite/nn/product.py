"""The matrix product that linear layers and attention share, with a backward pass of its own."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gptlite.nn.precision import wide_dtype


@jax.custom_vjp
def product(
    a: Float[Array, "*batch m k"], b: Float[Array, "*batch n k"]
) -> Float[Array, "*batch m n"]:
    """`a bᵀ`, summed up and returned in at least float32.

    The same number as `a @ b.T`, and the same gradients, but that the incoming one is rounded to
    the factors' format. (Reverse mode only: no `jax.jvp`.) They are written out because the order
    in memory of what is multiplied decides the speed on a CPU: see `_wants_row_major`, and
    `_backward` for which factor is turned.
    """
    return _multiply_turned(a, b)


def _multiply_turned(
    a: Float[Array, "*batch m k"], b: Float[Array, "*batch n k"]
) -> Float[Array, "*batch m n"]:
    if _wants_row_major(a):
        return _multiply(a, jnp.swapaxes(b, -1, -2))
    # One operation, no swapped axes: for a single row, XLA's CPU compiler would fetch the swapped
    # factor element by element.
    batch = tuple(range(a.ndim - 2))
    dimensions = ((a.ndim - 1,), (a.ndim - 1,)), (batch, batch)
    return lax.dot_general(a, b, dimensions, preferred_element_type=wide_dtype(a.dtype))


def _multiply(
    a: Float[Array, "*batch m k"], b: Float[Array, "*batch k n"]
) -> Float[Array, "*batch m n"]:
    if _wants_row_major(a):
        a, b = _row_major(a), _row_major(b)
    return jnp.matmul(a, b, preferred_element_type=wide_dtype(a.dtype))


def _wants_row_major(x: Float[Array, "*axes"]) -> bool:
    """XLA's CPU compiler multiplies bfloat16 numbers at twice float32's speed if it finds both
    factors in the order of their axes, and else as float32 numbers. (Elsewhere, and in float32, to
    bring them into order would be a wasted copy.)"""
    return jax.default_backend() == "cpu" and x.dtype == jnp.bfloat16


def _row_major(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`x`, really stored in the order of its axes: a flat array has only one, and the barrier
    keeps the compiler from seeing through it."""
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _forward(a, b):
    return _multiply_turned(a, b), (a, b)


def _backward(factors, grad):
    a, b = factors
    # In the factors' own format: with one of them in float32 it would be a float32 product.
    grad = grad.astype(a.dtype)
    grad_a = _multiply(grad, b)
    # gradᵀ a. On a CPU the narrower factor is turned, up to 1.6 times as fast in float32 too.
    if jax.default_backend() == "cpu" and a.shape[-1] <= grad.shape[-1]:
        grad_b = _multiply(jnp.swapaxes(a, -1, -2), grad)
        # The barrier keeps XLA from turning both factors in place of the result.
        grad_b = jnp.swapaxes(lax.optimization_barrier(grad_b), -1, -2)
    else:
        grad_b = _multiply(jnp.swapaxes(grad, -1, -2), a)
    return grad_a.astype(a.dtype), grad_b.astype(b.dtype)


product.defvjp(_forward, _backward)
