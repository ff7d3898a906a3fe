"""Scaled dot-product attention: the one function that computes it."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.nn.masks import Bidirectional, Causal, Mask, SlidingWindow
from gptlite.nn.positions import ALiBi, Offset, RelativeBias
from gptlite.nn.precision import wide_dtype
from gptlite.nn.product import product

# All heads of all sequences, one below the other: rows = batch x heads. One leading axis, because
# with two XLA's CPU compiler copies a cache that the next line only reads.
KeyRows = Float[Array, "rows keys d_head"]
QueryRows = Float[Array, "query_rows queries d_head"]

CAUSAL = Causal()


def attend(
    query: QueryRows,
    key: KeyRows,
    value: KeyRows,
    offset: Offset = 0,
    *,
    mask: Mask = CAUSAL,
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
    key: KeyRows,
    value: KeyRows,
    offset: Offset = 0,
    *,
    mask: Mask = CAUSAL,
    score_bias: ALiBi | RelativeBias | None = None,
    padding_mask: Bool[Array, "rows keys"] | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> QueryRows:
    """`attend`, written out."""
    shape = query.shape
    weights, total = _exponentials(query, key, offset, mask, score_bias, padding_mask)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key, inference=dropout_key is None)
    # The sum divides the product with V, d_head numbers a query in place of one a key. But for a
    # single query, XLA's CPU compiler would divide anew for every output of the layer that follows.
    single = shape[1] == 1
    weights = (weights / total if single else weights).astype(value.dtype)
    out = product(weights, jnp.swapaxes(value, -1, -2))
    return (out if single else out / total).astype(value.dtype).reshape(shape)


def attention_weights(
    query: QueryRows,
    key: KeyRows,
    offset: Offset = 0,
    *,
    mask: Mask = CAUSAL,
    score_bias: ALiBi | RelativeBias | None = None,
    padding_mask: Bool[Array, "rows keys"] | None = None,
) -> Float[Array, "query_rows queries keys"]:
    """The softmax in `attend`: what it multiplies `value` with."""
    weights, total = _exponentials(query, key, offset, mask, score_bias, padding_mask)
    return (weights / total).reshape(*query.shape[:2], key.shape[1])


def _exponentials(
    query: QueryRows,
    key: KeyRows,
    offset: Offset,
    mask: Mask,
    score_bias: ALiBi | RelativeBias | None,
    padding_mask: Bool[Array, "rows keys"] | None,
) -> tuple[Float[Array, "rows grouped_queries keys"], Float[Array, "rows grouped_queries 1"]]:
    """The softmax's numerators and denominators. Queries that share keys come one below the other,
    as if they were one longer sequence."""
    wide = wide_dtype(query.dtype)
    queries, keys = query.shape[1], key.shape[1]
    group = len(query) // len(key)
    query = query.reshape(len(key), group * queries, query.shape[2])
    scores = product(query, key) / math.sqrt(query.shape[2])
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
    return weights, total


def attend_fused(
    query: QueryRows,
    key: KeyRows,
    value: KeyRows,
    offset: Offset = 0,
    *,
    mask: Mask = CAUSAL,
) -> QueryRows:
    """`attend` through `jax.nn.dot_product_attention`, which on a GPU, for whole sequences in half
    precision and heads that fit it, is cuDNN's flash attention."""
    queries, keys, d_head = query.shape[1], key.shape[1], query.shape[2]
    whole = isinstance(offset, int) and offset == 0 and queries == keys
    half = query.dtype in (jnp.float16, jnp.bfloat16) and d_head % 8 == 0 and d_head <= 128
    flash = whole and half and jax.default_backend() == "gpu"
    window = mask.window - 1 if isinstance(mask, SlidingWindow) else None
    everywhere = isinstance(mask, Bidirectional)
    # It wants [batch, seq, heads, d_head]; a row of keys is a batch element with one head.
    grouped = query.reshape(len(key), len(query) // len(key), queries, d_head)
    out = jax.nn.dot_product_attention(
        jnp.swapaxes(grouped, 1, 2),
        key[:, :, None],
        value[:, :, None],
        mask=None if whole or everywhere else mask(queries, keys, offset)[None, None],
        is_causal=whole and not everywhere,
        local_window_size=(window, 0) if whole and window is not None else None,
        implementation="cudnn" if flash else "xla",
    )
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)
