"""Scaled dot-product attention: the one function that computes it."""

import functools
import math

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gptlite.nn.context import Start
from gptlite.nn.kernels.fused_attention import fused_attention
from gptlite.nn.kernels.product import product
from gptlite.nn.kernels.query_blocks import in_query_blocks
from gptlite.nn.positions import token_positions

Queries = Float[Array, "*batch heads queries d_head"]
Keys = Float[Array, "*batch kv_heads keys d_head"]


def attend(
    query: Queries,
    key: Keys,
    value: Float[Array, "*batch kv_heads keys d_value"],
    bias: Float[Array, "*#batch heads queries keys"] | None = None,
    mask: Bool[Array, "*#batch #heads #queries keys"] | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
    starts: Int[Array, "*batch queries"] | None = None,
    dropout: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch heads queries d_value"]:
    """`softmax(Q Kᵀ / sqrt(d_head) + bias) V` (Vaswani et al., 2017, eq. 1).

    The arguments follow those of `jax.nn.dot_product_attention`, with heads before the sequence.

    On NVIDIA's GPUs and on TPUs, `fused_attention` computes whole sequences in half precision, if
    there is no bias, mask or dropout; elsewhere, `in_query_blocks` computes causal attention.

    **Arguments:**

    - `key`, `value`: may have fewer heads than `query`: successive heads share one.
    - `mask`: False where a query may not see a key. One that sees none gets some mean.
    - `is_causal`: query i sees the keys 0 to i, with `window` the last `window` of these.
    - `starts`: a query sees no key before that place. With `is_causal`, it must be the place where
      the query's document begins: a TPU's kernel compares starts.
    - `dropout`: the share of the weights that is dropped, if there is a `dropout_key`.
    """
    if dropout == 0:
        dropout_key = None
    is_plain = bias is None and mask is None and dropout_key is None
    queries, keys = query.shape[-2], key.shape[-2]
    if starts is not None:
        own = jnp.arange(keys) >= starts[..., None, :, None]
        mask = own if mask is None else mask & own
    if is_causal:
        causal = causal_mask(queries, keys, 0, window)
        mask = causal if mask is None else mask & causal

    def reference(query, key, value):
        attend = functools.partial(_attend, dropout=dropout)
        if not is_causal:
            return attend(query, key, value, bias, mask, dropout_key)
        return in_query_blocks(attend, query, key, value, bias, mask, dropout_key, window)

    if not is_plain:
        return reference(query, key, value)
    return fused_attention(
        query, key, value, reference, is_causal=is_causal, window=window, starts=starts
    )


def _attend(
    query: Queries,
    key: Keys,
    value: Float[Array, "*batch kv_heads keys d_value"],
    bias: Float[Array, "*#batch heads queries keys"] | None,
    mask: Bool[Array, "*#batch #heads #queries keys"] | None,
    dropout_key: PRNGKeyArray | None,
    dropout: float,
) -> Float[Array, "*batch heads queries d_value"]:
    """`attend` of all queries to all keys that the mask lets them see."""
    *batch, heads, queries, d_head = query.shape
    kv_heads, keys = key.shape[-3:-1]
    # Heads of queries that share keys are joined into one longer sequence.
    grouped = (*batch, kv_heads, heads // kv_heads * queries)
    scores = product(query.reshape(*grouped, d_head), key) / math.sqrt(d_head)
    scores = scores.reshape(*batch, heads, queries, keys)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if dropout_key is not None:
        weights = eqx.nn.Dropout(dropout)(weights, key=dropout_key)
    # The product with V is divided by the sum, because it has fewer numbers than the weights. For
    # a single query, XLA's CPU compiler would divide again for every output of the next layer.
    single = queries == 1
    weights = (weights / total if single else weights).astype(value.dtype)
    out = product(weights.reshape(*grouped, keys), jnp.swapaxes(value, -1, -2))
    out = out.reshape(*batch, heads, queries, value.shape[-1])
    return (out if single else out / total).astype(value.dtype)


def causal_mask(
    queries: int, keys: int, start: Start, window: int | None = None
) -> Bool[Array, "*rows 1 queries keys"]:
    """Query i, at position `start + i`, sees the keys up to that position, with `window` the last
    `window` of these."""
    query, key = token_positions(queries, start)[..., None, :, None], jnp.arange(keys)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
