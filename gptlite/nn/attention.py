"""Causal attention: the one function that computes it, and the multi-head layer around it."""

import itertools
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.nn.cache import LayerCache
from gptlite.nn.linear import Linear, project
from gptlite.nn.masks import Causal, SlidingWindow
from gptlite.nn.norms import RMSNorm
from gptlite.nn.positions import ALiBi, NoPositions, Offset, RelativeBias, Rotary
from gptlite.nn.precision import wide_dtype
from gptlite.nn.product import product

# All heads of all sequences, one below the other: rows = batch x heads. One leading axis, because
# with two XLA's CPU compiler copies a cache that the next line only reads.
Rows = Float[Array, "rows seq d_head"]
QueryRows = Float[Array, "query_rows queries d_head"]

CAUSAL = Causal()


def attend(
    query: QueryRows,
    key: Float[Array, "rows keys d_head"],
    value: Float[Array, "rows keys d_head"],
    offset: Offset = 0,
    *,
    mask: Causal | SlidingWindow = CAUSAL,
    score_bias: ALiBi | RelativeBias | None = None,
    padding_mask: Bool[Array, "rows keys"] | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> QueryRows:
    """`softmax(Q Kᵀ / sqrt(d_head) + bias) V`, where query i, at position `offset + i`, sees the
    keys that `mask` says (Vaswani et al., 2017, eq. 1).

    The same for a whole sequence (`offset` 0) and for the next tokens after `offset` cached ones:
    what a cache holds beyond them is in nobody's sight. There may be several rows of queries for
    each row of keys, in order. `padding_mask` is False where there is no token; a query that sees
    none gives zeros. `dropout` acts on the weights.
    """
    plainly = dropout_key is not None or score_bias is not None or padding_mask is not None
    if jax.default_backend() == "gpu" and not plainly:
        return attend_fused(query, key, value, offset, mask=mask)
    return attend_plain(
        query,
        key,
        value,
        offset,
        mask=mask,
        score_bias=score_bias,
        padding_mask=padding_mask,
        dropout=dropout,
        dropout_key=dropout_key,
    )


def attend_plain(
    query: QueryRows,
    key: Float[Array, "rows keys d_head"],
    value: Float[Array, "rows keys d_head"],
    offset: Offset = 0,
    *,
    mask: Causal | SlidingWindow = CAUSAL,
    score_bias: ALiBi | RelativeBias | None = None,
    padding_mask: Bool[Array, "rows keys"] | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> QueryRows:
    """`attend`, written out."""
    shape, wide = query.shape, wide_dtype(query.dtype)
    queries, keys = shape[1], key.shape[1]
    # Queries that share keys one below the other, as if they were one longer sequence.
    group = len(query) // len(key)
    query = query.reshape(len(key), group * queries, shape[2])
    scores = product(query, key) / math.sqrt(shape[2])
    if score_bias is not None:
        bias = score_bias(queries, keys, offset).astype(wide)
        scores = (scores.reshape(-1, *bias.shape) + bias).reshape(scores.shape)
    seen = mask(queries, keys, offset)
    if group > 1:
        seen = jnp.tile(seen, (group, 1))
    if padding_mask is not None:
        seen = seen & padding_mask[:, None]
    scores = jnp.where(seen, scores, jnp.finfo(wide).min)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    if padding_mask is not None:
        weights = jnp.where(seen, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if padding_mask is not None:
        total = jnp.where(total > 0, total, 1)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key, inference=dropout_key is None)
    # The sum divides the product with V, d_head numbers a query in place of one a key. But for a
    # single query, XLA's CPU compiler would divide anew for every output of the layer that follows.
    single = queries == 1
    weights = (weights / total if single else weights).astype(value.dtype)
    out = product(weights, jnp.swapaxes(value, -1, -2))
    return (out if single else out / total).astype(value.dtype).reshape(shape)


def attend_fused(
    query: QueryRows,
    key: Float[Array, "rows keys d_head"],
    value: Float[Array, "rows keys d_head"],
    offset: Offset = 0,
    *,
    mask: Causal | SlidingWindow = CAUSAL,
) -> QueryRows:
    """`attend` through `jax.nn.dot_product_attention`, which on a GPU, for whole sequences in half
    precision and heads that fit it, is cuDNN's flash attention."""
    queries, keys, d_head = query.shape[1], key.shape[1], query.shape[2]
    whole = isinstance(offset, int) and offset == 0 and queries == keys
    half = query.dtype in (jnp.float16, jnp.bfloat16) and d_head % 8 == 0 and d_head <= 128
    flash = whole and half and jax.default_backend() == "gpu"
    window = mask.window - 1 if isinstance(mask, SlidingWindow) else None
    # It wants [batch, seq, heads, d_head]; a row of keys is a batch element with one head.
    grouped = query.reshape(len(key), len(query) // len(key), queries, d_head)
    out = jax.nn.dot_product_attention(
        jnp.swapaxes(grouped, 1, 2),
        key[:, :, None],
        value[:, :, None],
        mask=None if whole else mask(queries, keys, offset)[None, None],
        is_causal=whole,
        local_window_size=(window, 0) if whole and window is not None else None,
        implementation="cudnn" if flash else "xla",
    )
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)


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


class Attention(eqx.Module):
    """Multi-head causal self-attention (Vaswani et al., 2017, section 3.2.2), made of parts.

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

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    qk_norm: RMSNorm | None
    positions: Rotary | NoPositions
    score_bias: ALiBi | RelativeBias | None
    mask: Causal | SlidingWindow
    value_residual: ValueResidual | None
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
        positions: Rotary | NoPositions,
        score_bias: ALiBi | RelativeBias | None = None,
        mask: Causal | SlidingWindow = CAUSAL,
        qk_norm: bool = False,
        value_residual: bool = False,
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
        self.positions = positions
        self.score_bias = score_bias
        self.mask = mask
        self.value_residual = ValueResidual() if value_residual else None
        self.dropout = eqx.nn.Dropout(dropout)
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.d_head = d_head

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> LayerCache:
        """An empty cache for `batch` sequences, their leading axes in one."""
        empty = jnp.zeros((batch * self.n_kv_heads, capacity, self.d_head), dtype)
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
        q, k, v = self._project(x, cached=cache is not None)
        if self.value_residual is not None and first_values is not None:
            v = self.value_residual(v, first_values).astype(x.dtype)
        q, k, v = (_split_heads(y, self.d_head) for y in (q, k, v))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q), self.qk_norm(k)
        q, k = self.positions(q, offset), self.positions(k, offset)
        if cache is not None:
            cache = cache.write(k, v, offset)
            k, v = cache.keys, cache.values
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1, k.shape[1])
            padding_mask = jnp.repeat(padding_mask, self.n_kv_heads, axis=0)
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
        *batch, seq, _ = x.shape
        out = jnp.swapaxes(out.reshape(*batch, self.n_heads, seq, self.d_head), -2, -3)
        return self.output(out.reshape(*batch, seq, self.n_heads * self.d_head)), cache

    def _project(
        self, x: Float[Array, "*batch seq d_model"], cached: bool
    ) -> Sequence[Float[Array, "*batch seq _"]]:
        layers = (self.query, self.key, self.value)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        alike = all(type(layer) is Linear for layer in layers) and len(biases) in (0, 3)
        # One wide product is faster than three narrow ones, but with a cache, where there may be
        # but a single token, to join the weights would cost more than the products.
        if cached or not alike:
            return [layer(x) for layer in layers]
        y = project(x, jnp.concatenate([layer.weight for layer in layers]))
        if biases:
            y = y + jnp.concatenate(biases)
        ends = itertools.accumulate(len(layer.weight) for layer in layers[:-1])
        return jnp.split(y.astype(x.dtype), list(ends), axis=-1)


def _split_heads(x: Float[Array, "*batch seq d"], d_head: int) -> Rows:
    *batch, seq, d = x.shape
    x = jnp.swapaxes(x.reshape(*batch, seq, d // d_head, d_head), -2, -3)
    return x.reshape(math.prod(batch) * (d // d_head), seq, d_head)
