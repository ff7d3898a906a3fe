"""The transformer block: attention and MLP on a residual stream, in the orders that are in use."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.positions import Offset


class Branches(eqx.Module):
    """What all blocks have in common: attention, MLP, and dropout on what either adds.

    Built from its parts: `mlp` and the norms are any modules from `[*batch, seq, d_model]` to the
    same shape; `attention` has `Attention`'s call. A block's own call is

        block(x, cache=None, offset=0, *, key=None, **shared) -> (y, cache)

    with `cache` and `offset` as in `Attention`; `key` switches dropout on; `shared` is the same
    for all layers and goes to the attention as it is (`padding_mask`, `first_values`).
    """

    attention: Any
    mlp: Callable
    dropout: eqx.nn.Dropout

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> Any:
        """An empty cache for `batch` sequences, their leading axes in one."""
        return self.attention.init_cache(batch, capacity, dtype)

    def _drop(
        self, x: Float[Array, "*batch seq d_model"], key: PRNGKeyArray | None
    ) -> Float[Array, "*batch seq d_model"]:
        return self.dropout(x, key=key, inference=key is None)


class Block(Branches):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`: pre-norm (Xiong et al., 2020, fig. 1b)."""

    attention_norm: Callable
    mlp_norm: Callable

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """See `Attention`."""
        return self.attention.first_values(self.attention_norm(x))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        keys = split(key, 3)
        y, cache = self.attention(self.attention_norm(x), cache, offset, key=keys[0], **shared)
        x = x + self._drop(y, keys[1])
        return x + self._drop(self.mlp(self.mlp_norm(x)), keys[2]), cache


class PostNormBlock(Branches):
    """`norm(x + attention(x))`, then `norm(x + mlp(x))`: post-norm (Vaswani et al., 2017, section
    3.1)."""

    attention_norm: Callable
    mlp_norm: Callable

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """See `Attention`."""
        return self.attention.first_values(x)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        keys = split(key, 3)
        y, cache = self.attention(x, cache, offset, key=keys[0], **shared)
        x = self.attention_norm(x + self._drop(y, keys[1]))
        return self.mlp_norm(x + self._drop(self.mlp(x), keys[2])), cache


class SandwichBlock(Branches):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))` (Ding et al., 2021, "CogView",
    section 2.4)."""

    attention_norm: Callable
    attention_out_norm: Callable
    mlp_norm: Callable
    mlp_out_norm: Callable

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """See `Attention`."""
        return self.attention.first_values(self.attention_norm(x))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        keys = split(key, 3)
        y, cache = self.attention(self.attention_norm(x), cache, offset, key=keys[0], **shared)
        x = x + self._drop(self.attention_out_norm(y), keys[1])
        y = self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        return x + self._drop(y, keys[2]), cache


class ParallelBlock(Branches):
    """`x + attention(norm(x)) + mlp(norm(x))`, with one norm for both (Wang and Komatsuzaki, 2021,
    "GPT-J"; Chowdhery et al., 2022, "PaLM", section 2)."""

    norm: Callable

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """See `Attention`."""
        return self.attention.first_values(self.norm(x))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        keys = split(key, 3)
        h = self.norm(x)
        y, cache = self.attention(h, cache, offset, key=keys[0], **shared)
        return x + self._drop(y, keys[1]) + self._drop(self.mlp(h), keys[2]), cache


def split(key: PRNGKeyArray | None, count: int) -> Any:
    """`count` keys from one, or as many Nones from None."""
    return (None,) * count if key is None else jax.random.split(key, count)
