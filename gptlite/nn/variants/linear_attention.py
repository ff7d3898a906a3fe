"""Attention without softmax: sums over earlier tokens, which a state holds."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.errors import require
from gptlite.nn.context import Context
from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.linear_recurrence import Tokens
from gptlite.nn.kernels.norms import normalise
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import silu
from gptlite.nn.norms import RMSNorm
from gptlite.nn.positions import Rotary
from gptlite.nn.variants.matrix_state import (
    HeadsState,
    LowRank,
    join_heads,
    split_heads,
)


class LinearAttention(HeadsState):
    """Softmax's exponential of a query times a key becomes a product of features, `elu(x) + 1`
    (Katharopoulos et al., 2020, "Transformers are RNNs", eq. 7 and 9):

        y_t = Σ_{i≤t} (φ(q_t)ᵀ φ(k_i)) v_i / (Σ_{i≤t} φ(q_t)ᵀ φ(k_i) + 1e-6)

    The sums below the line are a column of the state, for a value of 1.
    """

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        super().__init__(config, key=key)
        self.d_value = config.d_head + 1

    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """See the class."""
        q, k, v = map(widen, self.split_qkv(u))
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
        return self.join(y[..., :-1] / (y[..., -1:] + 1e-6), x.dtype)


class Retention(HeadsState):
    """Queries, over sqrt(d_key), and keys that are rotated by position, a fixed decay of
    1 - 2^(-5-h) for head h, a norm of each head, a gate of SiLU (Sun et al., 2023, "Retentive
    network", section 2).

    **Raises:** `UserError` if the width of a head is odd.
    """

    gate: Linear

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        require(
            config.d_head % 2 == 0,
            "model.attention retention rotates pairs of channels, so the width of a head "
            f"(model.head_size, or else d_model / n_heads) must be even, got {config.d_head}.",
        )
        super_key, gate_key = jax.random.split(key)
        super().__init__(config, key=super_key)
        d = self.n_heads * self.d_value
        self.gate = Linear(config.d_model, d, std=config.init_stds[0], key=gate_key)

    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """See the class."""
        q, k, v = self.split_qkv(u)
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


class GatedLinearAttention(HeadsState):
    """A decay for each row of the state that depends on the token, `sigmoid(decay(x))^(1/16)`, by
    matrices of rank 16, queries over sqrt(d_key), an RMSNorm of each head, and a gate of SiLU (Yang
    et al., 2024, "Gated linear attention transformers with hardware-efficient training", section
    4.4; there, keys are half as wide)."""

    decay: LowRank
    gate: Linear
    norm: RMSNorm

    def __init__(self, config: Any, *, key: PRNGKeyArray):
        super_key, decay_key, gate_key = jax.random.split(key, 3)
        super().__init__(config, key=super_key)
        d, std = self.n_heads * self.d_value, config.init_stds[0]
        self.decay = LowRank(config.d_model, 16, d, std=std, bias=True, key=decay_key)
        self.gate = Linear(config.d_model, d, std=std, key=gate_key)
        self.norm = RMSNorm(self.d_value)

    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """See the class."""
        q, k, v = self.split_qkv(u)
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
