"""Delta rules: what the state has for a key is replaced, and not only added to."""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.machine.fields import Count
from gptlite.nn.context import Context
from gptlite.nn.dtypes import widen
from gptlite.nn.kernels.linear_recurrence import Tokens
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import silu
from gptlite.nn.norms import RMSNorm
from gptlite.nn.variants.matrix_state import (
    ConvolutionSize,
    HeadsState,
    LowRank,
    init_decays,
    split_heads,
    unit,
)


class Delta(HeadsState):
    """`S = (I - b_t k_t k_tᵀ) (a_t ⊙ S) + b_t k_t v_tᵀ`, `y_t = Sᵀ q_t`: the value that the state
    has for the key k_t is replaced by its mean with v_t, weighted by b_t, between 0 and 1. Queries,
    keys and values see the last `conv` tokens, and have a SiLU; keys have length 1, queries
    1 / sqrt(d_key); what is read is normalised.

    With `negative`, b_t is between 0 and 2, so that a token can turn the sign of what the state has
    for its key (Grazzi et al., 2024, "Unlocking state-tracking in linear RNNs through negative
    eigenvalues")."""

    negative: bool = eqx.field(static=True)
    strength: Linear
    norm: RMSNorm

    def __init__(
        self,
        config: Any,
        *,
        conv: ConvolutionSize = 4,
        negative: bool = False,
        key: PRNGKeyArray,
        **sizes: int | None,
    ):
        """`sizes`: see `HeadsState`."""
        super_key, strength_key = jax.random.split(key)
        super().__init__(config, conv=conv, key=super_key, **sizes)
        std = config.init_stds[0]
        self.negative = negative
        self.strength = Linear(config.d_model, self.n_heads, std=std, key=strength_key)
        self.norm = RMSNorm(self.d_value)

    @abc.abstractmethod
    def log_decay(
        self, x: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch heads seq rows"]:
        """The logarithm of a_t, in at least float32: `rows` is 1 or d_key."""

    def gated(
        self, x: Float[Array, "*batch seq d_model"], y: Float[Array, "*batch heads seq d_value"]
    ) -> Float[Array, "*batch heads seq d_value"]:
        """What is read, normalised, with a gate if there is one."""
        return y

    def tokens(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Float[Array, "*batch seq d"],
        context: Context,
    ) -> Tokens:
        """See the class."""
        q, k, v = self.split_qkv(silu(u))
        q, k = unit(q) * self.d_key**-0.5, unit(k)
        strength = jax.nn.sigmoid(widen(split_heads(self.strength(x), self.n_heads)))
        strength = 2 * strength if self.negative else strength
        log_decay = self.log_decay(x)
        return Tokens(
            query=q,
            key=k,
            value=strength * widen(v),
            log_decay=log_decay,
            read=jnp.exp(log_decay) * k,
            strength=-strength,
        )

    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Any,
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output."""
        return self.join(self.gated(x, self.norm(y)), x.dtype)


class DeltaNet(Delta):
    """`Delta` without decay (Yang et al., 2024, "Parallelizing linear transformers with the delta
    rule over sequence length")."""

    def log_decay(
        self, x: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch heads seq 1"]:
        """Of 1."""
        *batch, seq, _ = x.shape
        return jnp.zeros((*batch, self.n_heads, seq, 1), widen(x).dtype)


class GatedDeltaNet(Delta):
    """`Delta` with a decay for each head, `exp(-rate · softplus(decay(x) + bias))`, and a gate of
    the output (Yang et al., 2025, "Gated delta networks", section 3)."""

    decay: Linear
    log_rate: Float[Array, " heads"]
    decay_bias: Float[Array, " heads"]
    gate: Linear

    def __init__(
        self,
        config: Any,
        *,
        heads: Count | None = None,
        key_heads: Count | None = None,
        key_size: Count | None = None,
        value_size: Count | None = None,
        conv: ConvolutionSize = 4,
        negative: bool = False,
        key: PRNGKeyArray,
    ):
        """`heads`: how many states there are, of `key_size` rows and `value_size` columns, by
        default as the heads of `config`. `key_heads`: of queries and keys, by default as many."""
        super_key, decay_key, gate_key, rate_key = jax.random.split(key, 4)
        super().__init__(
            config,
            n_heads=heads,
            n_key_heads=key_heads,
            d_key=key_size,
            d_value=value_size,
            conv=conv,
            negative=negative,
            key=super_key,
        )
        d, std = self.n_heads * self.d_value, config.init_stds[0]
        self.decay = Linear(config.d_model, self.n_heads, std=std, key=decay_key)
        self.log_rate, self.decay_bias = init_decays((self.n_heads,), (self.n_heads,), rate_key)
        self.gate = Linear(config.d_model, d, std=std, key=gate_key)

    def log_decay(
        self, x: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch heads seq 1"]:
        """See the class."""
        step = jax.nn.softplus(widen(self.decay(x)) + widen(self.decay_bias))
        return split_heads(-jnp.exp(widen(self.log_rate)) * step, self.n_heads)

    def gated(
        self, x: Float[Array, "*batch seq d_model"], y: Float[Array, "*batch heads seq d_value"]
    ) -> Float[Array, "*batch heads seq d_value"]:
        """With a gate of SiLU."""
        return y * widen(silu(split_heads(self.gate(x), self.n_heads)))


class KimiDeltaAttention(Delta):
    """`Delta` with a decay for each row of the state, as of `GatedDeltaNet` but by matrices of low
    rank, and a sigmoid gate of the output (Kimi Team, 2025, "Kimi Linear", section 3)."""

    decay: LowRank
    log_rate: Float[Array, " heads"]
    decay_bias: Float[Array, " d"]
    gate: LowRank

    def __init__(
        self,
        config: Any,
        *,
        conv: ConvolutionSize = 4,
        negative: bool = False,
        key: PRNGKeyArray,
    ):
        super_key, decay_key, gate_key, rate_key = jax.random.split(key, 4)
        super().__init__(config, conv=conv, negative=negative, key=super_key)
        d, std, rank = self.n_heads * self.d_key, config.init_stds[0], self.d_key
        sizes = (config.d_model, rank, d)
        self.decay = LowRank(*sizes, std=std, bias=False, key=decay_key)
        self.log_rate, self.decay_bias = init_decays((self.n_heads,), (d,), rate_key)
        self.gate = LowRank(*sizes, std=std, bias=False, key=gate_key)

    def log_decay(
        self, x: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch heads seq d_key"]:
        """See the class."""
        step = jax.nn.softplus(widen(self.decay(x)) + widen(self.decay_bias))
        rate = jnp.exp(widen(self.log_rate))[:, None, None]
        return -rate * split_heads(step, self.n_heads)

    def gated(
        self, x: Float[Array, "*batch seq d_model"], y: Float[Array, "*batch heads seq d_value"]
    ) -> Float[Array, "*batch heads seq d_value"]:
        """With a sigmoid gate."""
        return y * widen(jax.nn.sigmoid(split_heads(self.gate(x), self.n_heads)))
