"""Number formats of sums."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of sums, exponentials and losses: float32, or float64 if `dtype` is float64."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`x` in `wide_dtype`."""
    return x.astype(wide_dtype(x.dtype))
