"""Multi-head attention of a sequence to itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.errors import require
from gptlite.machine.fields import Between, Count, Epsilon, Options
from gptlite.nn.cache import KVCache
from gptlite.nn.context import WHOLE_SEQUENCE, Context, PerSequence
from gptlite.nn.dot_product import Keys, Queries, attend, causal_mask
from gptlite.nn.kernels.joined import joined_layer
from gptlite.nn.kernels.layout import split_columns, swap_heads
from gptlite.nn.kernels.sums import thrice
from gptlite.nn.kernels.transposed import TransposedLinear
from gptlite.nn.linear import Linear
from gptlite.nn.norms import RMSNorm
from gptlite.nn.positions import NoPositions, Rotary
from gptlite.sharding import constrain, targets_cpu


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(Options):
    """The options of attention, beside the fields that all models have."""

    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    output_bias: bool = False
    """A bias of the output."""
    qk_gain: bool = False
    """Trained gains of the QK-norm."""
    qk_eps: Epsilon = 1e-6
    """The epsilon of the QK-norm."""
    theta: Annotated[float | None, Between(1.0, above=True)] = None
    """Of rotary positions. None: that of `model.positions`."""


@dataclass(frozen=True, kw_only=True)
class SlidingOptions(AttentionOptions):
    """Those of attention with a window."""

    window: Count = 64
    """How many tokens are seen, the last one included."""


class Heads(eqx.Module):
    """The matrices of multi-head attention (Vaswani et al., 2017, section 3.2.2).

    With fewer `n_kv_heads` than `n_heads`, several heads of queries share one head of keys and
    values (grouped-query attention: Ainslie et al., 2023; with a single one, multi-query attention:
    Shazeer, 2019). `qk_norm` RMS-normalises queries and keys, which bounds the scores (Henry et
    al., 2020; Dehghani et al., 2023), with `qk_gain` with trained gains of channels.

    Loss, nats per token: `n_kv_heads` 1 against 2, +0.002 ± 0.009; 2 against 4, +0.001 ±
    0.009; without `qk_norm` +0.002 ± 0.006 (benchmarks/blocks.md).
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    d_head: int = eqx.field(static=True)
    qkv_layer: Linear | TransposedLinear | None = None
    """The layers of query, key and value as one, where it has been made once: see
    kernels/decoding.py."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        qk_norm: bool = False,
        qk_gain: bool = AttentionOptions.qk_gain,
        qk_eps: float = AttentionOptions.qk_eps,
        std: float,
        output_std: float,
        qkv_bias: bool = False,
        output_bias: bool = False,
        key: PRNGKeyArray,
    ):
        """`std` is that of queries, keys and values, `output_std` that of the output (see
        `Linear`). `n_kv_heads` is `n_heads` by default, and `d_head` `d_model / n_heads`.

        **Raises:** `ValueError` if `n_heads` does not divide `d_model` and there is no `d_head`, or
        `n_kv_heads` does not divide `n_heads`.
        """
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if d_head is None and d_model % n_heads:
            raise ValueError(f"d_model must be a multiple of n_heads, got {d_model} and {n_heads}.")
        if n_heads % n_kv_heads:
            raise ValueError(
                f"n_heads must be a multiple of n_kv_heads, got {n_heads} and {n_kv_heads}."
            )
        d_head = d_model // n_heads if d_head is None else d_head
        keys = jax.random.split(key, 4)
        self.query = Linear(d_model, n_heads * d_head, std=std, bias=qkv_bias, key=keys[0])
        self.key = Linear(d_model, n_kv_heads * d_head, std=std, bias=qkv_bias, key=keys[1])
        self.value = Linear(d_model, n_kv_heads * d_head, std=std, bias=qkv_bias, key=keys[2])
        self.output = Linear(
            n_heads * d_head, d_model, std=output_std, bias=output_bias, key=keys[3]
        )
        self.query_norm, self.key_norm = (
            RMSNorm(d_head, use_weight=qk_gain, eps=qk_eps) if qk_norm else None for _ in range(2)
        )
        self.d_head = d_head
        self.qkv_layer = None

    def qkv(
        self, x: Float[Array, "*batch seq d_model"], *, fused: bool
    ) -> Sequence[Float[Array, "*batch seq _"]]:
        """Queries, keys and values, heads not yet split. `fused` computes them as one wide product,
        if that is possible, as `qkv_layer` always does."""
        layers = (self.query, self.key, self.value)
        joined = joined_layer(layers) if fused and self.qkv_layer is None else self.qkv_layer
        if joined is None:
            return [layer(x) for layer, x in zip(layers, thrice(x), strict=True)]
        return split_columns(joined(x), tuple(len(layer.weight) for layer in layers))

    def split(
        self, projected: Float[Array, "*batch seq d"], norm: Callable[..., Any] | None = None
    ) -> Float[Array, "*batch heads seq d_head"]:
        """Queries, keys or values, split into heads, and normalised if there is a `norm`."""
        *leading, d = projected.shape
        x = projected.reshape(*leading, d // self.d_head, self.d_head)
        if norm is not None:
            x = norm(x)  # before the axes are swapped: faster on a CPU
        return constrain(swap_heads(x), "batch", "heads", None, None)

    def join(
        self, heads: Float[Array, "*batch heads seq d_head"]
    ) -> Float[Array, "*batch seq d_model"]:
        """The output layer, applied to the heads' results side by side."""
        out = swap_heads(constrain(heads, "batch", "heads", None, None))
        *leading, n_heads, d_head = out.shape
        return self.output(out.reshape(*leading, n_heads * d_head))


class Attention(eqx.Module):
    """Multi-head self-attention.

    - `positions` rotates queries and keys; `score_bias`, such as `ALiBi`, adds to the scores.
    - `causal`: a token sees itself and earlier tokens, with `window` the last `window` of these
      (Beltagy et al., 2020, section 3.1). False is for encoders, where every token sees every other
      and there is no window.
    - `dropout`: the share of the attention weights that is dropped in training.

    Loss with a window of 64 in a context of 256, against none: -0.014 ± 0.011 nats per
    token (benchmarks/blocks.md).
    """

    heads: Heads
    positions: Rotary | NoPositions = NoPositions()
    score_bias: Any = None
    causal: bool = eqx.field(static=True, default=True)
    window: int | None = eqx.field(static=True, default=None)
    dropout: float = eqx.field(static=True, default=0.0)

    def init_cache(self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike) -> KVCache:
        """An empty cache for sequences with the leading axes `batch`."""
        n_kv_heads = self.heads.key.weight.shape[-2] // self.heads.d_head
        empty = jnp.zeros((*batch, n_kv_heads, capacity, self.heads.d_head), dtype)
        return KVCache(keys=empty, values=empty)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: KVCache | None = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], KVCache | None]:
        """Without a cache, `x` is a whole sequence. With one, `x` follows the `context.start`
        tokens in the cache, which is returned with `x` added. `key` switches dropout on.

        **Raises:** `UserError` if there is a cache and attention is not causal.
        """
        q, k, v, cache = self._qkv(x, cache, context)
        return self.heads.join(self._attend(q, k, v, context, cache is not None, key)), cache

    def weights(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: KVCache | None = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "*batch heads seq keys"]:
        """The attention weights of a call with the same arguments, without dropout."""
        q, k, _, cache = self._qkv(x, cache, context)
        return self._attend(q, k, identity_values(k), context, cache is not None, None)

    def _qkv(
        self, x: Float[Array, "*batch seq d_model"], cache: KVCache | None, context: Context
    ) -> tuple[Queries, Keys, Keys, KVCache | None]:
        """Queries, and all keys and values that there are."""
        require(self.causal or cache is None, "An attention that is not causal has no cache.")
        q, k, v = self.heads.qkv(x, fused=cache is None and targets_cpu())
        q = self.positions(self.heads.split(q, self.heads.query_norm), context.start)
        k = self.positions(self.heads.split(k, self.heads.key_norm), context.start)
        v = self.heads.split(v)
        if cache is not None:
            cache = cache.write(k, v, jnp.asarray(context.start))
            k, v = cache.keys, cache.values
        return q, k, v, cache

    def _attend(
        self,
        q: Queries,
        k: Keys,
        v: Float[Array, "*batch kv_heads keys d_value"],
        context: Context,
        cached: bool,
        key: PRNGKeyArray | None,
    ) -> Float[Array, "*batch heads seq d_value"]:
        queries, keys = q.shape[-2], k.shape[-2]
        bias = mask = None
        if self.score_bias is not None:
            bias = self.score_bias(queries, keys, context.start)
        if cached:  # the mask also hides the places that have no token yet
            mask = causal_mask(queries, keys, context.start, self.window)
        elif not self.causal:
            mask = padding_mask(keys, context.lengths)
        return attend(
            q,
            k,
            v,
            bias,
            mask,
            is_causal=self.causal and not cached,
            window=self.window,
            starts=context.document_starts,
            dropout=self.dropout,
            dropout_key=key,
        )


def padding_mask(keys: int, lengths: PerSequence | None) -> Bool[Array, "*rows 1 1 keys"] | None:
    """False for keys that are padding; None if there is no padding."""
    return None if lengths is None else (jnp.arange(keys) < lengths[..., None])[..., None, None, :]


def identity_values(keys: Keys) -> Float[Array, "*batch kv_heads keys keys"]:
    """Values for which the output of attention is its weights."""
    n = keys.shape[-2]
    return jnp.broadcast_to(jnp.eye(n, dtype=keys.dtype), (*keys.shape[:-1], n))
