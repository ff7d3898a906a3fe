"""The transformer block: attention and MLP on a residual stream, in the orders that are in use."""

import abc
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.config import UserError
from gptlite.nn.positions import Offset


class Branches(eqx.Module):
    """What all blocks have in common; what tells them apart is `arrange`.

    Built from parts: `mlp` and the norms are any modules from `[*batch, seq, d_model]` to the same
    shape; `attention` has `Attention`'s call.
    """

    attention: Any
    mlp: Callable
    dropout: eqx.nn.Dropout

    def init_cache(self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike) -> Any:
        """An empty cache for sequences with the leading axes `batch`."""
        return self.attention.init_cache(batch, capacity, dtype)

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """See `Attention`."""
        return self.attention.first_values(self.attention_input(x))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        """`cache` and `offset` as in `Attention`; `key` switches dropout on; `shared` is the same
        for all layers and goes to the attention as it is (`padding_mask`, `first_values`)."""
        keys = split(key, 3)
        h = self.attention_input(x)
        out = self.attention(h, cache, offset, key=keys[0], **shared)
        y, cache = require_pair(self.attention, out, h)

        def drop(y, key):
            return self.dropout(y, key=key, inference=key is None)

        def mlp(h):
            return drop(run_mlp(self.mlp, h, cache, **shared), keys[2])

        return self.arrange(x, drop(y, keys[1]), mlp), cache

    @abc.abstractmethod
    def attention_input(
        self, x: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch seq d_model"]:
        """What attention reads."""

    @abc.abstractmethod
    def arrange(
        self,
        x: Float[Array, "*batch seq d_model"],
        attended: Float[Array, "*batch seq d_model"],
        mlp: Callable,
    ) -> Float[Array, "*batch seq d_model"]:
        """The block's output, from its input and what came out of attention; `mlp` with dropout."""


class Block(Branches):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`: pre-norm (Xiong et al., 2020, fig. 1b).

    Measured: what the other orders are measured against (benchmarks/blocks.md).
    """

    attention_norm: Callable
    mlp_norm: Callable

    def attention_input(self, x):
        return self.attention_norm(x)

    def arrange(self, x, attended, mlp):
        x = x + attended
        return x + mlp(self.mlp_norm(x))


class PostNormBlock(Branches):
    """`norm(x + attention(x))`, then `norm(x + mlp(x))`: post-norm (Vaswani et al., 2017, section
    3.1).

    Measured: against pre-norm, no difference found (-0.002 ± 0.002) (benchmarks/blocks.md).
    """

    attention_norm: Callable
    mlp_norm: Callable

    def attention_input(self, x):
        return x

    def arrange(self, x, attended, mlp):
        x = self.attention_norm(x + attended)
        return self.mlp_norm(x + mlp(x))


class SandwichBlock(Branches):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))` (Ding et al., 2021, "CogView",
    section 2.4).

    Measured: against pre-norm, 0.032 ± 0.010 nats worse (benchmarks/blocks.md).
    """

    attention_norm: Callable
    attention_out_norm: Callable
    mlp_norm: Callable
    mlp_out_norm: Callable

    def attention_input(self, x):
        return self.attention_norm(x)

    def arrange(self, x, attended, mlp):
        x = x + self.attention_out_norm(attended)
        return x + self.mlp_out_norm(mlp(self.mlp_norm(x)))


class ParallelBlock(Branches):
    """`x + attention(norm(x)) + mlp(norm(x))`, with one norm for both (Wang and Komatsuzaki, 2021,
    "GPT-J"; Chowdhery et al., 2022, "PaLM", section 2).

    Measured: against pre-norm, no difference found (+0.008 ± 0.007) (benchmarks/blocks.md).
    """

    norm: Callable

    def attention_input(self, x):
        return self.norm(x)

    def arrange(self, x, attended, mlp):
        return x + attended + mlp(self.norm(x))


# A part of the user's own may return anything, and what broadcasts would train all the same.


def require_same_shape(part: Any, y: Any, x: Array) -> Any:
    """`y`, which `part` made of `x`.

    **Raises:** `UserError` (while tracing) if its shape is not that of `x`.
    """
    if jnp.shape(y) != x.shape:
        raise UserError(
            f"{type(part).__name__} must return the shape that it is given: it made "
            f"{list(jnp.shape(y))} of {list(x.shape)}."
        )
    return y


def require_pair(part: Any, out: Any, x: Array) -> Any:
    """`out`, an output and a cache, which `part` made of `x`.

    **Raises:** `UserError` (while tracing) if it is no such pair, or its shape is not that of `x`.
    """
    if not (isinstance(out, tuple) and len(out) == 2):
        raise UserError(f"{type(part).__name__} must return a pair, (y, cache).")
    return require_same_shape(part, out[0], x), out[1]


def run_mlp(
    mlp: Callable,
    h: Float[Array, "*batch seq d_model"],
    cache: Any,
    *,
    padding_mask: Bool[Array, "*batch keys"] | None = None,
    **others: Any,
) -> Float[Array, "*batch seq d_model"]:
    """`mlp(h)`; one whose call takes a `padding_mask`, as a mixture of experts, is given it, but
    with a cache, where that is of other places."""
    takes_it = padding_mask is not None and "padding_mask" in inspect.signature(mlp).parameters
    options = {"padding_mask": padding_mask} if takes_it and cache is None else {}
    return require_same_shape(mlp, mlp(h, **options), h)


def split(key: PRNGKeyArray | None, count: int) -> Any:
    """`count` keys from one, or as many Nones from None."""
    return (None,) * count if key is None else jax.random.split(key, count)
