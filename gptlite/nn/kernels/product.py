"""The matrix product that linear layers and attention share, with a backward pass of its own. The
reference: `a @ b.T`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from gptlite.nn.dtypes import wide_dtype


def product(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "*batch n k"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch m n"]:
    """`a @ b.T`, accumulated in at least float32, and returned in `dtype` (default: `wide_dtype`).

    The backward pass casts the incoming gradient to `a.dtype`. Reverse mode only: no `jax.jvp`.

    The order in memory of the factors decides the speed on a CPU, so programs that are compiled for
    a CPU multiply differently: see `_row_major` and `_weight_grad_on_cpu`.
    """
    return _product(a, b, wide_dtype(a.dtype) if dtype is None else jnp.dtype(dtype))


def _by_platform(
    function: Callable, on_cpu: Callable, a: Array, b: Array, dtype: DTypeLike
) -> Array:
    """`on_cpu(a, b).astype(dtype)` in a program that is compiled for a CPU, else `function(a, b,
    dtype)`.

    Other compilers than the CPU's write a float32 result to the memory before they round it, unless
    the product itself is asked for in bfloat16. XLA's CPU compiler multiplies bfloat16 at twice
    float32's speed if both factors are in row-major order, and at float32's speed if not.
    """
    return lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: on_cpu(a, b).astype(dtype),
        default=lambda a, b: function(a, b, dtype),
    )


def _abt(a: Array, b: Array, dtype: DTypeLike) -> Array:
    """`a @ b.T`."""
    # One operation, no swapped axes: for a single row, XLA's CPU compiler would fetch the swapped
    # factor element by element.
    batch = tuple(range(a.ndim - 2))
    dimensions = ((a.ndim - 1,), (a.ndim - 1,)), (batch, batch)
    return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def _abt_on_cpu(a: Array, b: Array) -> Array:
    return _ab_on_cpu(a, jnp.swapaxes(b, -1, -2))


def _ab(a: Array, b: Array, dtype: DTypeLike) -> Array:
    """`a @ b`."""
    return jnp.matmul(a, b, preferred_element_type=dtype)


def _ab_on_cpu(a: Array, b: Array) -> Array:
    if a.dtype == jnp.bfloat16:
        a, b = _row_major(a), _row_major(b)
    return _ab(a, b, wide_dtype(a.dtype))


def _row_major(x: Array) -> Array:
    """`x`, stored in row-major order: a flat array has only one order, and the barrier keeps the
    compiler from seeing through it. (`with_layout_constraint` is as fast on one device, but with
    several it gathers `x` on each.)"""
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _weight_grad(grad: Array, a: Array, dtype: DTypeLike) -> Array:
    """`grad.T @ a`."""
    return _ab(jnp.swapaxes(grad, -1, -2), a, dtype)


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


def _multiply(a: Array, b: Array, dtype: jnp.dtype) -> Array:
    if a.dtype != jnp.bfloat16:
        return _abt(a, b, dtype)
    return _by_platform(_abt, _abt_on_cpu, a, b, dtype)


def _backward(dtype, factors, grad):
    del dtype
    a, b = factors
    # A float32 gradient would make this a float32 product.
    grad = grad.astype(a.dtype)
    grad_b = _by_platform(_weight_grad, _weight_grad_on_cpu, grad, a, b.dtype)
    if a.dtype != jnp.bfloat16:
        return _ab(grad, b, a.dtype), grad_b
    return _by_platform(_ab, _ab_on_cpu, grad, b, a.dtype), grad_b


_product = jax.custom_vjp(_multiply, nondiff_argnums=(2,))
_product.defvjp(lambda a, b, dtype: (_multiply(a, b, dtype), (a, b)), _backward)
