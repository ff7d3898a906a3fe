"""The block of a decoder that reads an encoder: self-attention, cross-attention, MLP."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.nn.attention import CrossAttention, Memory
from gptlite.nn.block import require_pair, run_mlp, split
from gptlite.nn.positions import Offset


class DecoderCache(eqx.Module):
    """One layer's cache: that of its self-attention, and the encoder's output as its
    cross-attention reads it."""

    own: Any
    memory: Memory


class DecoderBranches(eqx.Module):
    """What both orders have in common; what tells them apart is `before` and `after`.

    Built from parts, as `Block` is.
    """

    attention: Any
    cross_attention: CrossAttention
    mlp: Callable
    dropout: eqx.nn.Dropout
    attention_norm: Callable
    cross_norm: Callable
    mlp_norm: Callable

    def init_cache(
        self,
        batch: tuple[int, ...],
        capacity: int,
        dtype: DTypeLike,
        *,
        memory: Float[Array, "*batch keys d_model"],
        memory_mask: Bool[Array, "*batch keys"] | None = None,
    ) -> DecoderCache:
        """An empty cache for sequences with the leading axes `batch`, that holds `memory`."""
        own = self.attention.init_cache(batch, capacity, dtype)
        return DecoderCache(own, self.cross_attention.read(memory, memory_mask))

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """See `Attention`."""
        return self.attention.first_values(self.before(self.attention_norm, x))

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: DecoderCache | None = None,
        offset: Offset = 0,
        *,
        memory: Float[Array, "*batch keys d_model"] | None = None,
        memory_mask: Bool[Array, "*batch keys"] | None = None,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], DecoderCache | None]:
        """As `Block`; `memory` is the encoder's output, which a cache holds already, and
        `memory_mask` False where that has no token.

        **Raises:** `ValueError` (while tracing) if there is neither a cache nor `memory`.
        """
        if cache is not None:
            read = cache.memory
        elif memory is not None:
            read = self.cross_attention.read(memory, memory_mask)
        else:
            raise ValueError("A decoder block needs an encoder's output: memory, or a cache.")
        keys = split(key, 5)

        def drop(y, key):
            return self.dropout(y, key=key, inference=key is None)

        h = self.before(self.attention_norm, x)
        own = None if cache is None else cache.own
        out = self.attention(h, own, offset, key=keys[0], **shared)
        y, own = require_pair(self.attention, out, h)
        x = self.after(self.attention_norm, x, drop(y, keys[1]))

        y = self.cross_attention(self.before(self.cross_norm, x), read, key=keys[2])
        x = self.after(self.cross_norm, x, drop(y, keys[3]))

        h = self.before(self.mlp_norm, x)
        y = run_mlp(self.mlp, h, cache, **shared)
        x = self.after(self.mlp_norm, x, drop(y, keys[4]))
        return x, None if cache is None else DecoderCache(own, read)

    @abc.abstractmethod
    def before(
        self, norm: Callable, x: Float[Array, "*batch seq d_model"]
    ) -> Float[Array, "*batch seq d_model"]:
        """What a branch reads."""

    @abc.abstractmethod
    def after(
        self,
        norm: Callable,
        x: Float[Array, "*batch seq d_model"],
        y: Float[Array, "*batch seq d_model"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The residual stream `x` once a branch has found `y`."""


class DecoderBlock(DecoderBranches):
    """`x + branch(norm(x))` for self-attention, cross-attention and MLP: pre-norm (Xiong et al.,
    2020, fig. 1b)."""

    def before(self, norm, x):
        return norm(x)

    def after(self, norm, x, y):
        return x + y


class PostNormDecoderBlock(DecoderBranches):
    """`norm(x + branch(x))` for self-attention, cross-attention and MLP: post-norm, as in the
    original (Vaswani et al., 2017, section 3.1)."""

    def before(self, norm, x):
        return x

    def after(self, norm, x, y):
        return norm(x + y)
