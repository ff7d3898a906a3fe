"""Attention without softmax: sums over earlier tokens, which a state holds."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.context import Context
from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.linear_recurrence import Tokens
from gptlite.nn.kernels.norms import normalise
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import silu
from gptlite.nn.norms import RMSNorm
from gptlite.nn.positions import Rotary
from gptlite.nn.variants.matrix_state import (
    LowRank,
    MatrixState,
    join_heads,
    split_heads,
)


class LinearAttention(MatrixState):
    """Softmax's exponential of a query times a key becomes a product of features, `elu(x) + 1`
    (Katharopoulos et al., 2020, "Transformers are RNNs", eq. 7 and 9):

        y_t = Σ_{i≤t} (φ(q_t)ᵀ φ(k_i)) v_i / Σ_{i≤t} φ(q_t)ᵀ φ(k_i)

    The sums below the line are a column of the state, for a value of 1.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        d_model, d = config.d_model, config.n_heads * config.d_head
        std, output_std = config.init_stds
        keys = jax.random.split(key, 4)
        self.n_heads, self.d_key, self.d_value = config.n_heads, config.d_head, config.d_head + 1
        self.conv = None
        self.query, self.key, self.value = (Linear(d_model, d, std=std, key=k) for k in keys[:3])
        self.output = Linear(d, d_model, std=output_std, key=keys[3])

    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """See the class."""
        q, k, v = (
            widen(split_heads(layer(x), self.n_heads))
            for layer in (self.query, self.key, self.value)
        )
        ones = jnp.ones_like(v[..., :1])
        return Tokens(
            query=jax.nn.elu(q) + 1,
            key=jax.nn.elu(k) + 1,
            value=jnp.concatenate([v, ones], axis=-1),
            log_decay=jnp.zeros_like(ones),
        )

    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Any,
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output."""
        # Features of keys far below 0 are 0.
        mean = y[..., :-1] / (y[..., -1:] + 1e-6)
        return self.output(join_heads(mean.astype(x.dtype)))


class Retention(MatrixState):
    """Queries and keys that are rotated by position, a fixed decay of 1 - 2^(-5-h) for head h, a
    norm of each head, a gate of SiLU (Sun et al., 2023, "Retentive network", section 2)."""

    query: Linear
    key: Linear
    value: Linear
    gate: Linear
    output: Linear

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        d_model, d = config.d_model, config.n_heads * config.d_head
        std, output_std = config.init_stds
        keys = jax.random.split(key, 5)
        self.n_heads, self.d_key, self.d_value = config.n_heads, config.d_head, config.d_head
        self.conv = None
        self.query, self.key, self.value, self.gate = (
            Linear(d_model, d, std=std, key=k) for k in keys[:4]
        )
        self.output = Linear(d, d_model, std=output_std, key=keys[4])

    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """See the class."""
        q, k, v = (
            split_heads(layer(x), self.n_heads) for layer in (self.query, self.key, self.value)
        )
        rotate, q = Rotary(), widen(q) * self.d_key**-0.5
        log_decay = jnp.log1p(-(2.0 ** (-5.0 - jnp.arange(self.n_heads, dtype=q.dtype))))
        return Tokens(
            query=rotate(q, context.start),
            key=rotate(widen(k), context.start),
            value=v,
            log_decay=jnp.broadcast_to(log_decay[:, None, None], (*q.shape[:-1], 1)),
        )

    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Any,
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output."""
        y = join_heads(normalise(y, None, None, 1e-6, True).astype(x.dtype))
        return self.output(y * silu(self.gate(x)))


class GatedLinearAttention(MatrixState):
    """A decay for each row of the state that depends on the token, `sigmoid(decay(x))^(1/16)`, by
    matrices of rank 16, and a gate of SiLU (Yang et al., 2024, "Gated linear attention
    transformers with hardware-efficient training", section 4.4; there, keys are half as wide)."""

    query: Linear
    key: Linear
    value: Linear
    decay: LowRank
    gate: Linear
    norm: RMSNorm
    output: Linear

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        d_model, d = config.d_model, config.n_heads * config.d_head
        std, output_std = config.init_stds
        keys = jax.random.split(key, 6)
        self.n_heads, self.d_key, self.d_value = config.n_heads, config.d_head, config.d_head
        self.conv = None
        self.query, self.key, self.value, self.gate = (
            Linear(d_model, d, std=std, key=k) for k in keys[:4]
        )
        self.decay = LowRank(d_model, 16, d, std=std, bias=True, key=keys[4])
        self.norm = RMSNorm(config.d_head)
        self.output = Linear(d, d_model, std=output_std, key=keys[5])

    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """See the class."""
        q, k, v = (
            split_heads(layer(x), self.n_heads) for layer in (self.query, self.key, self.value)
        )
        log_decay = jax.nn.log_sigmoid(widen(self.decay(x))) / 16
        return Tokens(widen(q) * self.d_key**-0.5, k, v, split_heads(log_decay, self.n_heads))

    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Any,
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output."""
        y = join_heads(self.norm(y).astype(x.dtype))
        return self.output(y * silu(self.gate(x)))
