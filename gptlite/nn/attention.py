"""Causal attention: the one function that computes it, and the multi-head layer around it."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.nn.cache import LayerCache
from gptlite.nn.linear import Linear, project
from gptlite.nn.norms import RMSNorm
from gptlite.nn.positions import NoPositions, Offset, Rotary
from gptlite.nn.precision import wide_dtype
from gptlite.nn.product import product

# All heads of all sequences, one below the other: rows = batch x heads. One leading axis, because
# with two XLA's CPU compiler copies a cache that the next line only reads.
Rows = Float[Array, "rows seq d_head"]


def attend(
    query: Float[Array, "rows queries d_head"],
    key: Float[Array, "rows keys d_head"],
    value: Float[Array, "rows keys d_head"],
    offset: Offset = 0,
    *,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "rows queries d_head"]:
    """`softmax(Q Kᵀ / sqrt(d_head)) V` where query i sees keys 0 to `offset + i` and no others
    (Vaswani et al., 2017, eq. 1).

    The same for a whole sequence (`offset` 0) and for the next tokens after `offset` cached ones:
    what a cache holds beyond them is in nobody's sight. `dropout` acts on the weights.
    """
    if jax.default_backend() == "gpu" and dropout_key is None:
        return attend_fused(query, key, value, offset)
    return attend_plain(query, key, value, offset, dropout=dropout, dropout_key=dropout_key)


def attend_plain(
    query: Float[Array, "rows queries d_head"],
    key: Float[Array, "rows keys d_head"],
    value: Float[Array, "rows keys d_head"],
    offset: Offset = 0,
    *,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "rows queries d_head"]:
    """`attend`, written out."""
    wide = wide_dtype(query.dtype)
    scores = product(query, key) / math.sqrt(query.shape[-1])
    scores = jnp.where(visible(query.shape[1], key.shape[1], offset), scores, jnp.finfo(wide).min)
    weights = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key, inference=dropout_key is None)
    # The sum divides the product with V, d_head numbers a query in place of one a key. But for a
    # single query, XLA's CPU compiler would divide anew for every output of the layer that follows.
    single = query.shape[1] == 1
    weights = (weights / total if single else weights).astype(value.dtype)
    out = product(weights, jnp.swapaxes(value, -1, -2))
    return (out if single else out / total).astype(value.dtype)


def attend_fused(
    query: Float[Array, "rows queries d_head"],
    key: Float[Array, "rows keys d_head"],
    value: Float[Array, "rows keys d_head"],
    offset: Offset = 0,
) -> Float[Array, "rows queries d_head"]:
    """`attend` through `jax.nn.dot_product_attention`, which on a GPU, for whole sequences in half
    precision and heads that fit it, is cuDNN's flash attention."""
    queries, keys, d_head = query.shape[1], key.shape[1], query.shape[2]
    whole = isinstance(offset, int) and offset == 0 and queries == keys
    half = query.dtype in (jnp.float16, jnp.bfloat16) and d_head % 8 == 0 and d_head <= 128
    flash = whole and half and jax.default_backend() == "gpu"
    # It wants [batch, seq, heads, d_head]; a row is a batch element with one head.
    out = jax.nn.dot_product_attention(
        query[:, :, None],
        key[:, :, None],
        value[:, :, None],
        mask=None if whole else visible(queries, keys, offset)[None, None],
        is_causal=whole,
        implementation="cudnn" if flash else "xla",
    )
    return out[:, :, 0]


def visible(queries: int, keys: int, offset: Offset) -> Bool[Array, "queries keys"]:
    """True where query i, at position `offset + i`, may look at key j, at position j."""
    return jnp.arange(keys) <= (offset + jnp.arange(queries))[:, None]


class Attention(eqx.Module):
    """Multi-head causal self-attention (Vaswani et al., 2017, section 3.2.2).

    Optionally with rotary positions on queries and keys, and with queries and keys
    RMS-normalised first (QK-norm: Henry et al., 2020; Dehghani et al., 2023), which bounds the
    scores.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    qk_norm: RMSNorm | None
    positions: Rotary | NoPositions
    dropout: eqx.nn.Dropout
    n_heads: int = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        positions: Rotary | NoPositions,
        qk_norm: bool = False,
        dropout: float = 0.0,
        std: float,
        output_std: float,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        """`std` and `output_std`: see `Linear`, for query, key and value, and for output.

        **Raises:** `ValueError` if `n_heads` does not divide `d_model`.
        """
        if d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}.")
        keys = jax.random.split(key, 4)
        self.query = Linear(d_model, d_model, std=std, bias=bias, key=keys[0])
        self.key = Linear(d_model, d_model, std=std, bias=bias, key=keys[1])
        self.value = Linear(d_model, d_model, std=std, bias=bias, key=keys[2])
        self.output = Linear(d_model, d_model, std=output_std, bias=bias, key=keys[3])
        self.qk_norm = RMSNorm(d_model // n_heads, use_weight=False) if qk_norm else None
        self.positions = positions
        self.dropout = eqx.nn.Dropout(dropout)
        self.n_heads = n_heads

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: LayerCache | None = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], LayerCache | None]:
        """Without a cache, `x` is a whole sequence. With one, `x` follows the first `offset`
        positions of it, and it comes back with `x` added. `key` switches dropout on."""
        q, k, v = (self._split_heads(y) for y in self._project(x, cached=cache is not None))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q), self.qk_norm(k)
        q, k = self.positions(q, offset), self.positions(k, offset)
        if cache is not None:
            cache = cache.write(k, v, offset)
            k, v = cache.keys, cache.values
        dropout_key = key if self.dropout.p > 0 else None
        out = attend(q, k, v, offset, dropout=self.dropout, dropout_key=dropout_key)
        return self.output(self._merge_heads(out, x.shape)), cache

    def _project(
        self, x: Float[Array, "*batch seq d_model"], cached: bool
    ) -> Sequence[Float[Array, "*batch seq d_model"]]:
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
        return jnp.split(y.astype(x.dtype), 3, axis=-1)

    def _split_heads(self, x: Float[Array, "*batch seq d_model"]) -> Rows:
        *batch, seq, d_model = x.shape
        d_head = d_model // self.n_heads
        x = jnp.swapaxes(x.reshape(*batch, seq, self.n_heads, d_head), -2, -3)
        return x.reshape(math.prod(batch) * self.n_heads, seq, d_head)

    def _merge_heads(
        self, rows: Rows, shape: tuple[int, ...]
    ) -> Float[Array, "*batch seq d_model"]:
        rows = rows.reshape(*shape[:-2], self.n_heads, *rows.shape[-2:])
        return jnp.swapaxes(rows, -2, -3).reshape(shape)
