"""Attention with a gate of its output."""

from typing import Any

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.attention import Attention
from gptlite.nn.cache import KVCache
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.linear import Linear


class GatedAttention(Attention):
    """`Attention` whose heads' results are multiplied, channel by channel, with the sigmoid of a
    linear layer of the input, before the output layer (Qiu et al., 2025, "Gated attention for large
    language models", section 2.2)."""

    gate: Any = None

    @classmethod
    def of(cls, attention: Attention, *, std: float, key: PRNGKeyArray) -> "GatedAttention":
        """`attention` with a gate of standard deviation `std`."""
        d, d_model = attention.heads.query.weight.shape[-2:]
        return cls(**vars(attention), gate=Linear(d_model, d, std=std, key=key))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: KVCache | None = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], KVCache | None]:
        """See `Attention`."""
        q, k, v, cache = self._qkv(x, cache, context)
        y = self._attend(q, k, v, context, cache is not None, key)
        return self.heads.join(y * jax.nn.sigmoid(self.heads.split(self.gate(x)))), cache
