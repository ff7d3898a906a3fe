"""RWKV-7's time mixing: a delta rule whose two vectors differ."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.machine.fields import Count
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.linear_recurrence import Tokens
from gptlite.nn.kernels.norms import normalise
from gptlite.nn.mlp import ACTIVATIONS
from gptlite.nn.variants.matrix_state import (
    HeadsState,
    LowRank,
    TokenShift,
    join_heads,
    split_heads,
    unit,
)

# Of what is mixed with the token before.
PARTS = ("query", "decay", "key", "value", "rate", "gate")


class RWKV7(HeadsState):
    """`S = diag(a_t) S - (rate_t ⊙ κ_t) (κ_tᵀ S) + k_t v_tᵀ`, with a decay `a_t` for each row of
    the state, κ a direction of its own for what is taken away, and a rate for each row (Peng et
    al., 2025, "RWKV-7 Goose", section 4). All of these are of a mean of the token and the one
    before, with shares for each channel. Without the mixing of values with the first layer's."""

    shares: dict[str, Float[Array, " d_model"]]
    decay: LowRank
    rate: LowRank
    gate: LowRank
    direction: Float[Array, " d"]
    key_rate: Float[Array, " d"]
    bonus: Float[Array, " d"]
    norm_weight: Float[Array, " d"]
    norm_bias: Float[Array, " d"]

    def __init__(self, config: Any, *, rank: Count = 32, key: PRNGKeyArray):
        """`rank`: of the matrices of decays, rates and gates."""
        d_model, d = config.d_model, config.n_heads * config.d_head
        super_key, decay_key, rate_key, gate_key = jax.random.split(key, 4)
        super().__init__(config, key=super_key)
        self.conv = TokenShift(d_model)
        self.shares = {part: jnp.full(d_model, 0.5) for part in PARTS}
        low_rank = functools.partial(LowRank, d_model, rank, d, std=config.init_stds[0])
        self.decay = low_rank(activation=ACTIVATIONS["tanh"], bias=True, key=decay_key)
        self.rate = low_rank(bias=True, key=rate_key)
        self.gate = low_rank(activation=ACTIVATIONS["sigmoid"], bias=False, key=gate_key)
        self.direction, self.key_rate, self.bonus = jnp.full(d, 0.7), jnp.ones(d), jnp.zeros(d)
        self.norm_weight, self.norm_bias = jnp.ones(d), jnp.zeros(d)

    def tokens(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Float[Array, "*batch seq d_model"],
        context: Context,
    ) -> Tokens:
        """See the class."""
        change = u - x
        query, decay, key, value, rate = (
            widen(getattr(self, part)(self._mixed(part, x, change))) for part in PARTS[:-1]
        )
        rate = jax.nn.sigmoid(rate)
        direction = unit(split_heads(key * widen(self.direction), self.n_heads))
        parts = (
            query,
            key * (1 + (rate - 1) * widen(self.key_rate)),
            value,
            -math.exp(-0.5) * jax.nn.sigmoid(decay),
            rate,
        )
        query, key, value, log_decay, rate = (split_heads(a, self.n_heads) for a in parts)
        return Tokens(query, key, value, log_decay, read=direction, write=-rate * direction)

    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Float[Array, "*batch seq d_model"],
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output: what is read, normalised for each head, and the token's own value."""
        tokens = self.tokens(x, u, WHOLE_SEQUENCE)  # which the compiler computes once
        bonus = widen(self.bonus).reshape(self.n_heads, 1, self.d_key)
        own = jnp.sum(tokens.query * tokens.key * bonus, axis=-1, keepdims=True) * tokens.value
        y = normalise(y, None, None, 1e-5 * self.d_value, True)
        y = join_heads(y) * widen(self.norm_weight) + widen(self.norm_bias) + join_heads(own)
        gate = self.gate(self._mixed("gate", x, u - x))
        return self.output((y * widen(gate)).astype(x.dtype))

    def _mixed(
        self,
        part: str,
        x: Float[Array, "*batch seq d_model"],
        change: Float[Array, "*batch seq d_model"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The weighted mean of a token and the one before. (As a product, for its gradient: see
        `ShortConvolution`.)"""
        return x + jnp.einsum("...d,d->...d", change, self.shares[part].astype(x.dtype))
