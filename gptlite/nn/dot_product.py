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
from gptlite.sharding import targets_nvidia

Queries = Float[Array, "*batch heads queries d_head"]
Keys = Float[Array, "*batch kv_heads keys d_head"]

CAUSAL = Causal()


def attend(
    query: Queries,
    key: Keys,
    value: Keys,
    offset: Offset = 0,
    *,
    mask: Mask = CAUSAL,
    score_bias: ALiBi | RelativeBias | None = None,
    padding_mask: Bool[Array, "*batch keys"] | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Queries:
    """`softmax(Q Kᵀ / sqrt(d_head) + bias) V`, where query i, at position `offset + i`, sees the
    keys that `mask` says (Vaswani et al., 2017, eq. 1).

    The same for a whole sequence (`offset` 0) and for the next tokens after `offset` cached ones:
    no query sees what a cache holds beyond them. `heads` is a multiple of `kv_heads`; successive
    heads share one of keys and values. `padding_mask` is False where there is no token; a query
    that sees none gives zeros. `dropout` acts on the weights.

    On a mesh of NVIDIA GPUs, as training sets one, cuDNN's flash attention computes whole sequences
    in half precision, where there is neither bias nor padding nor dropout.
    """

    d_head = query.shape[-1]
    whole = isinstance(offset, int) and offset == 0 and query.shape[-2] == key.shape[-2]
    half = query.dtype in (jnp.float16, jnp.bfloat16) and d_head % 8 == 0 and d_head <= 128
    bare = score_bias is None and padding_mask is None and dropout_key is None
    # (Not by `lax.platform_dependent`: to trace cuDNN's attention, cuDNN must be installed.)
    if whole and half and bare and targets_nvidia():
        return _attend_flash(query, key, value, mask)
    weights, total = _exponentials(query, key, offset, mask, score_bias, padding_mask)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key, inference=dropout_key is None)
    # The sum divides the product with V, d_head numbers a query in place of one a key. But for a
    # single query, XLA's CPU compiler would divide anew for every output of the layer that follows.
    single = query.shape[-2] == 1
    weights = (weights / total if single else weights).astype(value.dtype)
    out = product(weights, jnp.swapaxes(value, -1, -2))
    return (out if single else out / total).astype(value.dtype).reshape(query.shape)


def _attend_flash(query: Queries, key: Keys, value: Keys, mask: Mask) -> Queries:
    """`attend` by cuDNN, for a whole sequence."""
    everywhere = isinstance(mask, Bidirectional)

    def turned(x):
        return jnp.swapaxes(x.reshape(-1, *x.shape[-3:]), 1, 2)  # [batch, seq, heads, d_head]

    out = jax.nn.dot_product_attention(
        turned(query),
        turned(key),
        turned(value),
        is_causal=not everywhere,
        local_window_size=(mask.window - 1, 0) if isinstance(mask, SlidingWindow) else None,
        implementation="cudnn",
    )
    return jnp.swapaxes(out, 1, 2).reshape(query.shape)


def attention_weights(
    query: Queries,
    key: Keys,
    offset: Offset = 0,
    *,
    mask: Mask = CAUSAL,
    score_bias: ALiBi | RelativeBias | None = None,
    padding_mask: Bool[Array, "*batch keys"] | None = None,
) -> Float[Array, "*batch heads queries keys"]:
    """The softmax in `attend`: what it multiplies `value` with."""
    weights, total = _exponentials(query, key, offset, mask, score_bias, padding_mask)
    return (weights / total).reshape(*query.shape[:-1], key.shape[-2])


def _exponentials(
    query: Queries,
    key: Keys,
    offset: Offset,
    mask: Mask,
    score_bias: ALiBi | RelativeBias | None,
    padding_mask: Bool[Array, "*batch keys"] | None,
) -> tuple[
    Float[Array, "*batch kv_heads grouped_queries keys"],
    Float[Array, "*batch kv_heads grouped_queries 1"],
]:
    """The softmax's numerators and denominators. Queries that share keys come one below the other,
    as if they were one longer sequence."""
    wide = wide_dtype(query.dtype)
    *batch, heads, queries, d_head = query.shape
    kv_heads, keys = key.shape[-3:-1]
    group = heads // kv_heads
    query = query.reshape(*batch, kv_heads, group * queries, d_head)
    scores = product(query, key) / math.sqrt(d_head)
    if score_bias is not None:
        bias = score_bias(queries, keys, offset).astype(wide)
        scores = scores + bias.reshape(kv_heads, group * queries, keys)
    seen = mask(queries, keys, offset)
    if group > 1:
        seen = jnp.tile(seen, (group, 1))
    if padding_mask is not None:
        seen = seen & padding_mask[..., None, None, :]
    scores = jnp.where(seen, scores, jnp.finfo(wide).min)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    if padding_mask is not None:
        weights = jnp.where(seen, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if padding_mask is not None:
        total = jnp.where(total > 0, total, 1)
    return weights, total
