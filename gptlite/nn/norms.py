"""Normalisation over the last axis, for any leading axes (`eqx.nn`'s norms take one vector).

Statistics are computed in at least float32: in half precision, sums of squares overflow and lose
digits.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.norms import normalise


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · weight` (Zhang and Sennrich, 2019, eq. 4).

    Without `weight`, the bare normalisation.
    """

    weight: Float[Array, " d"] | None
    eps: float = eqx.field(static=True)

    def __init__(self, d: int, *, use_weight: bool = True, eps: float = 1e-6):
        self.weight = jnp.ones(d) if use_weight else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return normalise(x, self.weight, None, self.eps, False)


class LayerNorm(eqx.Module):
    """`(x - mean) / sqrt(var + eps) · weight + bias` (Ba et al., 2016, section 3).

    Validation loss against RMSNorm: +0.001 ± 0.007 nats per token (benchmarks/blocks.md).
    """

    weight: Float[Array, " d"]
    bias: Float[Array, " d"] | None
    eps: float = eqx.field(static=True)

    def __init__(self, d: int, *, bias: bool = True, eps: float = 1e-5):
        self.weight = jnp.ones(d)
        self.bias = jnp.zeros(d) if bias else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return normalise(x, self.weight, self.bias, self.eps, True)


class DyT(eqx.Module):
    """`weight · tanh(alpha x) + bias`, in place of a norm (Zhu et al., 2025, "Transformers without
    normalization", eq. 1). `alpha` is one trained number.

    Validation loss against RMSNorm: +0.016 ± 0.011 nats per token (benchmarks/blocks.md).
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
