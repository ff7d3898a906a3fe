"""A linear layer for decoding on a CPU. The reference: `Linear`."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.nn.dtypes import wide_dtype
from gptlite.nn.linear import Linear, add_bias, by_rows


class TransposedLinear(eqx.Module):
    """A `Linear` whose weight is stored as `[d_in, d_out]`, for decoding on a CPU: XLA multiplies
    it with a few rows in 0.5 to 0.75 of the time."""

    transposed: Float[Array, "d_in d_out"]
    bias: Float[Array, " d_out"] | None

    def __init__(self, layer: Linear):
        self.transposed, self.bias = layer.weight.T, layer.bias

    @property
    def weight(self) -> Float[Array, "d_out d_in"]:
        """As `Linear.weight`."""
        return self.transposed.T

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        def multiply(rows):
            return jnp.matmul(rows, self.transposed, preferred_element_type=wide_dtype(x.dtype))

        return add_bias(by_rows(multiply, x), self.bias).astype(x.dtype)
