"""The transformer block: attention, then MLP, each on a normalised copy of the residual stream."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.cache import LayerCache
from gptlite.nn.positions import Offset


class Block(eqx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`: pre-norm (Xiong et al., 2020, fig. 1b).

    Built from its parts. `norm` and `mlp` are any modules from `[*batch, seq, d_model]` to the
    same shape; `attention` has `Attention`'s call.
    """

    attention_norm: Callable
    attention: Callable
    mlp_norm: Callable
    mlp: Callable
    dropout: eqx.nn.Dropout

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: LayerCache | None = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], LayerCache | None]:
        """`cache` and `offset` as in `Attention`; `key` switches dropout on."""
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        attended, cache = self.attention(self.attention_norm(x), cache, offset, key=keys[0])
        x = x + self.dropout(attended, key=keys[1], inference=key is None)
        x = x + self.dropout(self.mlp(self.mlp_norm(x)), key=keys[2], inference=key is None)
        return x, cache
