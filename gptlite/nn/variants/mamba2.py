"""Mamba-2: a state-space layer, written as a linear recurrence."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.machine.fields import Count
from gptlite.nn.context import Context
from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.layout import split_columns
from gptlite.nn.kernels.linear_recurrence import Tokens
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import silu
from gptlite.nn.norms import RMSNorm
from gptlite.nn.variants.matrix_state import (
    ConvolutionSize,
    MatrixState,
    ShortConvolution,
    init_decays,
    join_heads,
    split_heads,
)


class Mamba2(MatrixState):
    """`S = exp(-rate · step_t) S + step_t k_t v_tᵀ`, `y_t = Sᵀ q_t + skip · v_t`, with a step for
    each head, `softplus(step(x) + bias)`, and queries and keys that all heads share (Dao and Gu,
    2024, "Transformers are SSMs", section 7: there, C, B and X). There are `expand` times as many
    heads as `n_heads`. Queries, keys and values see the last `conv` tokens, and have a SiLU; the
    output is multiplied with a gate of SiLU, and normalised."""

    query: Linear
    key: Linear
    value: Linear
    step: Linear
    log_rate: Float[Array, " heads"]
    step_bias: Float[Array, " heads"]
    skip: Float[Array, " heads"]
    gate: Linear
    norm: RMSNorm
    output: Linear

    def __init__(
        self,
        config: Any,
        *,
        state: Count = 64,
        expand: Count = 2,
        conv: ConvolutionSize = 4,
        key: PRNGKeyArray,
    ):
        """`state`: the width of queries and keys."""
        d_model, n_heads = config.d_model, expand * config.n_heads
        d = n_heads * config.d_head
        std, output_std = config.init_stds
        keys = jax.random.split(key, 8)
        self.n_heads, self.d_key, self.d_value = n_heads, state, config.d_head
        self.conv = ShortConvolution(2 * state + d, conv, bias=True, key=keys[0])
        self.query, self.key = (Linear(d_model, state, std=std, key=k) for k in keys[1:3])
        self.value, self.gate = (Linear(d_model, d, std=std, key=k) for k in keys[3:5])
        self.step = Linear(d_model, n_heads, std=std, key=keys[5])
        self.log_rate, self.step_bias = init_decays((n_heads,), (n_heads,), keys[6])
        self.skip = jnp.ones(n_heads)
        self.norm = RMSNorm(d)
        self.output = Linear(d, d_model, std=output_std, key=keys[7])

    def before(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """Queries, keys and values."""
        return jnp.concatenate([self.query(x), self.key(x), self.value(x)], axis=-1)

    def _split(self, u: Float[Array, "*batch seq d"]) -> list[Float[Array, "*batch _ seq _"]]:
        widths = (self.d_key, self.d_key, self.n_heads * self.d_value)
        parts: Any = split_columns(silu(u), widths)
        return [split_heads(a, n) for a, n in zip(parts, (1, 1, self.n_heads), strict=True)]

    def tokens(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Float[Array, "*batch seq d"],
        context: Context,
    ) -> Tokens:
        """See the class."""
        q, k, v = self._split(u)
        step = jax.nn.softplus(widen(self.step(x)) + widen(self.step_bias))
        rate = jnp.exp(widen(self.log_rate))
        step, log_decay = (split_heads(a, self.n_heads) for a in (step, -rate * step))
        return Tokens(q, k, step * widen(v), log_decay)

    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Float[Array, "*batch seq d"],
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output."""
        y += widen(self.skip)[:, None, None] * widen(self._split(u)[2])
        y = join_heads(y) * widen(silu(self.gate(x)))
        return self.output(self.norm(y).astype(x.dtype))
