"""A bounded function in place of a norm."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.nn.dtypes import widen


class DyT(eqx.Module):
    """`weight · tanh(alpha x) + bias`, in place of a norm (Zhu et al., 2025, "Transformers without
    normalization", eq. 1). `alpha` is one trained number.

    Loss against RMSNorm: +0.020 ± 0.012 nats per token (benchmarks/blocks.md).
    """

    alpha: Float[Array, ""]
    weight: Float[Array, " d"]
    bias: Float[Array, " d"] | None

    def __init__(self, d: int, *, alpha: float = 0.5, bias: bool = True):
        self.alpha = jnp.array(alpha)
        self.weight = jnp.ones(d)
        self.bias = jnp.zeros(d) if bias else None

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        y = jnp.tanh(self.alpha * widen(x)) * self.weight
        return (y if self.bias is None else y + self.bias).astype(x.dtype)
