"""The linear layer."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.kernels.product import product
from gptlite.sharding import targets_cpu


class Linear(eqx.Module):
    """`y = x Wᵀ + b` on the last axis.

    Not `eqx.nn.Linear`, which takes a single vector. Under `vmap` over batch and sequence it
    becomes a product of rank 3, which is slower on a CPU than one product over all rows.

    `weight` is `[d_out, d_in]`, as in `eqx.nn.Linear` and PyTorch.
    """

    weight: Float[Array, "d_out d_in"]
    bias: Float[Array, " d_out"] | None

    def __init__(self, d_in: int, d_out: int, *, std: float, bias: bool = False, key: PRNGKeyArray):
        """`std`: standard deviation of the normal that the weight is drawn from (0 for zeros)."""
        shape = (d_out, d_in)
        self.weight = std * jax.random.normal(key, shape) if std else jnp.zeros(shape)
        self.bias = jnp.zeros(d_out) if bias else None

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        # A CPU adds a bias, and sums up its gradient, faster in float32.
        dtype = None if self.bias is not None and targets_cpu() else x.dtype

        def layer(rows):
            return add_bias(product(rows, self.weight, dtype), self.bias).astype(x.dtype)

        # The bias is added to rows, so that a GPU's product adds it.
        return by_rows(layer, x)


def project(
    x: Float[Array, "*batch d_in"],
    weight: Float[Array, "d_out d_in"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*batch d_out"]:
    """`x Wᵀ` as one product over all rows, in `dtype`: see `product`."""
    return by_rows(lambda rows: product(rows, weight, dtype), x)


def capped(logits: Float[Array, "*batch vocab"], cap: float | None) -> Float[Array, "*batch vocab"]:
    """`cap · tanh(logits / cap)`, a smooth bound (Bello et al., 2016; Gemma 2, 2024), or none."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def by_rows(multiply: Callable[[Array], Array], x: Array) -> Array:
    """`multiply(x)` as one product over all rows."""
    y = multiply(x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def add_bias(y: Array, bias: Array | None) -> Array:
    """`y + bias`, if there is one."""
    return y if bias is None else y + bias
