"""Normalisation that keeps, for the backward pass, its input and two numbers a row.

The reference, with at least float32 inside:

    (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

RMSNorm has no mean: `x / sqrt(mean(x²) + eps) * weight`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from gptlite.nn.dtypes import widen


def normalise(
    x: Float[Array, "*batch d"],
    weight: Float[Array, " d"] | None,
    bias: Float[Array, " d"] | None,
    eps: float,
    centre: bool,
) -> Float[Array, "*batch d"]:
    """`(x - mean) / sqrt(var + eps) · weight + bias`, without `centre` with a mean of 0."""
    if x.ndim > 3:  # heads, which may be cut over devices: to flatten them would gather them
        return _normalised(x, weight, bias, eps, centre)
    # By rows, as products and residual connections see `x`: it is then known to be the same array.
    return _normalised(x.reshape(-1, x.shape[-1]), weight, bias, eps, centre).reshape(x.shape)


def _without_kept(x, weight, bias, eps, centre) -> Array:
    return _forward(x, weight, bias, eps, centre)[0]


def _forward(x, weight, bias, eps, centre):
    wide = widen(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centre else jnp.zeros((), wide.dtype)
    centred = wide - mean
    scale = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = centred * scale
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.astype(x.dtype), (x, mean, scale, weight, bias)


def _backward(eps, centre, residuals, grad):
    del eps
    *residuals, weight, bias = residuals
    # The forward pass keeps `x` and two numbers a row. Without the barrier, XLA would keep the
    # float32 numbers that follow from them, on a GPU.
    x, mean, scale = lax.optimization_barrier(residuals)
    wide, grad = widen(x), widen(grad)
    y = (wide - mean) * scale
    leading = tuple(range(x.ndim - 1))
    grad_weight = None if weight is None else jnp.sum(grad * y, leading).astype(weight.dtype)
    grad_bias = None if bias is None else jnp.sum(grad, leading).astype(bias.dtype)
    grad = grad if weight is None else grad * weight
    inner = grad - y * jnp.mean(grad * y, axis=-1, keepdims=True)
    if centre:
        inner = inner - jnp.mean(grad, axis=-1, keepdims=True)
    return (inner * scale).astype(x.dtype), grad_weight, grad_bias


_normalised = jax.custom_vjp(_without_kept, nondiff_argnums=(3, 4))


_normalised.defvjp(_forward, _backward)
