"""Multi-head attention, to a sequence itself and to another."""

import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.nn.cache import LayerCache
from gptlite.nn.dot_product import CAUSAL, Keys, Queries, attend, attention_weights
from gptlite.nn.linear import Linear, project
from gptlite.nn.masks import Bidirectional, Mask
from gptlite.nn.norms import RMSNorm
from gptlite.nn.positions import ALiBi, NoPositions, Offset, RelativeBias, Rotary
from gptlite.sharding import constrain, is_spread

EVERYWHERE = Bidirectional()


class ValueResidual(eqx.Module):
    """`a · values + b · first`, the first layer's values at the same token, with trained a and b
    (Zhou et al., 2024, "Value residual learning", the learnable kind).

    The first layer, too, adds its own, which is but a factor `a + b`.

    Measured: against none, no difference found (-0.004 ± 0.008) (benchmarks/blocks.md).
    """

    weight: Float[Array, "2"]

    def __init__(self):
        self.weight = jnp.full(2, 0.5)

    def __call__(
        self, values: Float[Array, "*batch seq d"], first: Float[Array, "*batch seq d"]
    ) -> Float[Array, "*batch seq d"]:
        return self.weight[0] * values + self.weight[1] * first


class MultiHead(eqx.Module):
    """What self-attention and cross-attention have in common: the four matrices, and heads."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    qk_norm: RMSNorm | None
    dropout: eqx.nn.Dropout
    n_heads: int = eqx.field(static=True)
    n_kv_heads: int = eqx.field(static=True)
    d_head: int = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        std: float,
        output_std: float,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        """`std` and `output_std`: see `Linear`, for query, key and value, and for output.
        `n_kv_heads`: by default `n_heads`.

        **Raises:** `ValueError` if `n_heads` does not divide `d_model`, or `n_kv_heads` not
        `n_heads`.
        """
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}.")
        if n_heads % n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}."
            )
        d_head = d_model // n_heads
        keys = jax.random.split(key, 4)
        self.query = Linear(d_model, d_model, std=std, bias=bias, key=keys[0])
        self.key = Linear(d_model, n_kv_heads * d_head, std=std, bias=bias, key=keys[1])
        self.value = Linear(d_model, n_kv_heads * d_head, std=std, bias=bias, key=keys[2])
        self.output = Linear(d_model, d_model, std=output_std, bias=bias, key=keys[3])
        self.qk_norm = RMSNorm(d_head, use_weight=False) if qk_norm else None
        self.dropout = eqx.nn.Dropout(dropout)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.d_head = d_head

    def _split(
        self, projected: Float[Array, "*batch seq d"], *, normalised: bool
    ) -> Float[Array, "*batch heads seq d_head"]:
        """Heads apart; those of queries and keys are normalised, where there is a norm."""
        *leading, d = projected.shape
        x = projected.reshape(*leading, d // self.d_head, self.d_head)
        if normalised and self.qk_norm is not None:
            x = self.qk_norm(x)  # before the axes are swapped, where it is faster on a CPU
        return constrain(jnp.swapaxes(x, -2, -3), "batch", "heads", None, None)

    def _join(
        self, heads: Float[Array, "*batch heads seq d_head"]
    ) -> Float[Array, "*batch seq d_model"]:
        """The output for what the heads have found."""
        out = jnp.swapaxes(constrain(heads, "batch", "heads", None, None), -2, -3)
        return self.output(out.reshape(*out.shape[:-2], self.n_heads * self.d_head))


class Attention(MultiHead):
    """Multi-head self-attention (Vaswani et al., 2017, section 3.2.2), made of parts.

    - `positions`, on queries and keys (rotary), or `score_bias` (ALiBi, relative).
    - `mask`: what a query sees.
    - `n_kv_heads` below `n_heads`: grouped-query attention, where several heads of queries share
      one of keys and values, which shrinks the cache by as much (Ainslie et al., 2023); with a
      single one, multi-query attention (Shazeer, 2019).
    - `qk_norm`: queries and keys RMS-normalised first, which bounds the scores (QK-norm: Henry et
      al., 2020; Dehghani et al., 2023).
    - `value_residual`: see `ValueResidual`.

    Measured: one head of keys and values for two of queries, against two, no difference found
    (+0.002 ± 0.014); two for four, against four, no difference found (+0.002 ± 0.011); without QK-
    norm no difference found (-0.000 ± 0.008) (benchmarks/blocks.md).
    """

    positions: Rotary | NoPositions
    score_bias: ALiBi | RelativeBias | None
    mask: Mask
    value_residual: ValueResidual | None

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        positions: Rotary | NoPositions,
        score_bias: ALiBi | RelativeBias | None = None,
        mask: Mask = CAUSAL,
        value_residual: bool = False,
        **options: Any,
    ):
        """`options`: those of `MultiHead`."""
        super().__init__(d_model, n_heads, **options)
        self.positions = positions
        self.score_bias = score_bias
        self.mask = mask
        self.value_residual = ValueResidual() if value_residual else None

    def init_cache(self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike) -> LayerCache:
        """An empty cache for sequences with the leading axes `batch`."""
        empty = jnp.zeros((*batch, self.n_kv_heads, capacity, self.d_head), dtype)
        return LayerCache(keys=empty, values=empty)

    def first_values(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """What the layers after this one, the first, take for their value residual."""
        return self.value(x)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: LayerCache | None = None,
        offset: Offset = 0,
        *,
        padding_mask: Bool[Array, "*batch keys"] | None = None,
        first_values: Float[Array, "*batch seq d"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], LayerCache | None]:
        """Without a cache, `x` is a whole sequence. With one, `x` follows the first `offset`
        positions of it, and it comes back with `x` added.

        **Arguments:**

        - `padding_mask`: False where there is no token; for every key, which with a cache are as
          many as it has room for. What comes out at such a place means nothing.
        - `first_values`: for a value residual.
        - `key`: switches dropout on.
        """
        q, k, v, cache = self._heads(x, cache, offset, first_values)
        out = attend(
            q,
            k,
            v,
            offset,
            mask=self.mask,
            score_bias=self.score_bias,
            padding_mask=padding_mask,
            dropout=self.dropout,
            dropout_key=key if self.dropout.p > 0 else None,
        )
        return self._join(out), cache

    def weights(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: LayerCache | None = None,
        offset: Offset = 0,
        *,
        padding_mask: Bool[Array, "*batch keys"] | None = None,
        **others: Any,
    ) -> Float[Array, "*batch heads seq keys"]:
        """How much each query takes of each key, from what a call takes: the softmax inside it,
        without dropout."""
        q, k, _, _ = self._heads(x, cache, offset, None)
        return attention_weights(
            q,
            k,
            offset,
            mask=self.mask,
            score_bias=self.score_bias,
            padding_mask=padding_mask,
        )

    def _heads(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: LayerCache | None,
        offset: Offset,
        first_values: Float[Array, "*batch seq d"] | None,
    ) -> tuple[Queries, Keys, Keys, LayerCache | None]:
        """Queries, and the keys and values that they may look at."""
        q, k, v = self._project(x, cached=cache is not None)
        if self.value_residual is not None and first_values is not None:
            v = self.value_residual(v, first_values).astype(x.dtype)
        q = self.positions(self._split(q, normalised=True), offset)
        k = self.positions(self._split(k, normalised=True), offset)
        v = self._split(v, normalised=False)
        if cache is not None:
            cache = cache.write(k, v, offset)
            k, v = cache.keys, cache.values
        return q, k, v, cache

    def _project(
        self, x: Float[Array, "*batch seq d_model"], cached: bool
    ) -> Sequence[Float[Array, "*batch seq _"]]:
        layers = (self.query, self.key, self.value)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        alike = all(type(layer) is Linear for layer in layers) and len(biases) in (0, 3)
        # One wide product is faster than three narrow ones. But with a cache, where there may be a
        # single token, to join the weights would cost more than the products; and to join what is
        # cut over devices would move it.
        if cached or not alike or is_spread("tensor"):
            return [layer(x) for layer in layers]
        y = project(x, jnp.concatenate([layer.weight for layer in layers]))
        if biases:
            y = y + jnp.concatenate(biases)
        ends = itertools.accumulate(len(layer.weight) for layer in layers[:-1])
        return jnp.split(y.astype(x.dtype), list(ends), axis=-1)


class Memory(eqx.Module):
    """What a layer of a decoder remembers of an encoder's output: keys and values."""

    keys: Keys
    values: Keys
    mask: Bool[Array, "*batch keys"] | None
    """False where there is no token."""


class CrossAttention(MultiHead):
    """Multi-head attention from a decoder's places to an encoder's output (Vaswani et al., 2017,
    section 3.2.3)."""

    def __init__(self, d_model: int, n_heads: int, **options: Any):
        """`options`: those of `MultiHead`."""
        super().__init__(d_model, n_heads, **options)

    def read(
        self,
        memory: Float[Array, "*batch keys d_model"],
        padding_mask: Bool[Array, "*batch keys"] | None = None,
    ) -> Memory:
        """Keys and values of an encoder's output, which are the same at every call.
        `padding_mask` is False where there is no token."""
        return Memory(
            keys=self._split(self.key(memory), normalised=True),
            values=self._split(self.value(memory), normalised=False),
            mask=padding_mask,
        )

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        memory: Memory,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch seq d_model"]:
        """`key` switches dropout on."""
        out = attend(
            self._queries(x),
            memory.keys,
            memory.values,
            mask=EVERYWHERE,
            padding_mask=memory.mask,
            dropout=self.dropout,
            dropout_key=key if self.dropout.p > 0 else None,
        )
        return self._join(out)

    def weights(
        self, x: Float[Array, "*batch seq d_model"], memory: Memory, **others: Any
    ) -> Float[Array, "*batch heads seq keys"]:
        """As `Attention.weights`."""
        return attention_weights(
            self._queries(x), memory.keys, mask=EVERYWHERE, padding_mask=memory.mask
        )

    def _queries(self, x: Float[Array, "*batch seq d_model"]) -> Queries:
        return self._split(self.query(x), normalised=True)
