"""Layers whose heads each keep a matrix of the past, in place of keys and values."""

import abc
import math
from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.errors import require
from gptlite.machine.fields import Between
from gptlite.nn.cache import read_at
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.dtypes import wide_dtype, widen
from gptlite.nn.kernels.layout import split_columns, swap_heads
from gptlite.nn.kernels.linear_recurrence import Tokens, linear_recurrence
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import identity
from gptlite.nn.positions import token_positions
from gptlite.nn.variants.recurrence import real_and_begins
from gptlite.sharding import constrain

# Tokens that a `ShortConvolution` sees.
ConvolutionSize = Annotated[int, Between(1, 64)]


class ShortConvolution(eqx.Module):
    """The sum of the last tokens, each times a trained vector of its own: a causal convolution of
    each channel by itself, `y_t = Σ_i w_i ⊙ u_{t-i}`, plus a `bias`, if there is one."""

    weights: tuple[Float[Array, " d"], ...]
    """Of the token itself, the one before it, and so on."""
    bias: Float[Array, " d"] | None

    def __init__(self, d: int, size: int, *, bias: bool = False, key: PRNGKeyArray):
        """`size`: how many tokens it sees."""
        keys = jax.random.split(key, size)
        self.weights = tuple(jax.random.normal(key, (d,)) / size**0.5 for key in keys)
        self.bias = jnp.zeros(d) if bias else None

    def init_cache(self, batch: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*batch back d"]:
        """Zeros for the tokens before the first one."""
        return jnp.zeros((*batch, len(self.weights) - 1, len(self.weights[0])), dtype)

    def __call__(
        self,
        u: Float[Array, "*batch seq d"],
        earlier: Float[Array, "*batch back d"],
        context: Context = WHOLE_SEQUENCE,
    ) -> tuple[Float[Array, "*batch seq d"], Float[Array, "*batch back d"]]:
        """The sums, and the last tokens for the next call. A token sees its own document alone."""
        y = jnp.zeros_like(widen(u)) if self.bias is None else widen(self.bias)
        for lag, weight in enumerate(self.weights):
            # Its gradient is a product, too. That of `*` is a sum over tokens, for which XLA's CPU
            # compiler takes 6 times as long.
            seen = widen(lagged(u, earlier, lag, context))
            y += jnp.einsum("...d,d->...d", seen, widen(weight))
        return y.astype(u.dtype), last_tokens(u, earlier, context)


class TokenShift(eqx.Module):
    """For each token, the one before it, called as a `ShortConvolution`."""

    d: int = eqx.field(static=True)

    def init_cache(self, batch: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*batch 1 d"]:
        """A zero for the token before the first one."""
        return jnp.zeros((*batch, 1, self.d), dtype)

    def __call__(
        self,
        u: Float[Array, "*batch seq d"],
        earlier: Float[Array, "*batch 1 d"],
        context: Context = WHOLE_SEQUENCE,
    ) -> tuple[Float[Array, "*batch seq d"], Float[Array, "*batch 1 d"]]:
        """The tokens before, 0 where a document begins, and the last token for the next call."""
        return lagged(u, earlier, 1, context), last_tokens(u, earlier, context)


def lagged(
    u: Float[Array, "*batch seq d"],
    earlier: Float[Array, "*batch back d"],
    lag: int,
    context: Context,
) -> Float[Array, "*batch seq d"]:
    """The token `lag` tokens before each one; 0 where that is in another document."""
    back, seq = earlier.shape[-2], u.shape[-2]
    extended = jnp.concatenate([earlier, u], axis=-2)
    seen = extended[..., back - lag : back - lag + seq, :]
    if not lag or context.document_starts is None:
        return seen
    places = token_positions(seq, context.start) - lag
    return jnp.where((places >= context.document_starts)[..., None], seen, 0)


def last_tokens(
    u: Float[Array, "*batch seq d"], earlier: Float[Array, "*batch back d"], context: Context
) -> Float[Array, "*batch back d"]:
    """The last real ones, as many as `earlier` has."""
    lengths = jnp.asarray(u.shape[-2] if context.lengths is None else context.lengths)
    return read_at(jnp.concatenate([earlier, u], -2), lengths, earlier.shape[-2], axis=-2)


class MatrixState(eqx.Module):
    """A layer with the call of `Attention`, whose heads each have a matrix as state, which
    `linear_recurrence` passes from token to token: in training and for prompts, in chunks of tokens
    that are made of products; in generation, one by one, in memory that does not grow.

    A subclass has the fields below, which its `__init__` sets, and the methods `tokens` and
    `after`; if it sees earlier tokens otherwise, also `before` and a `conv`. The state is kept in
    float32 (or float64).
    """

    n_heads: int = eqx.field(static=True)
    d_key: int = eqx.field(static=True)
    d_value: int = eqx.field(static=True)
    conv: ShortConvolution | TokenShift | None

    def before(self, x: Float[Array, "*batch seq d_model"]) -> Array:
        """What `tokens` is given of each token, `[*batch, seq, d]`: after `conv`, if there is one.
        By default `x` itself."""
        return x

    @abc.abstractmethod
    def tokens(self, x: Float[Array, "*batch seq d_model"], u: Any, context: Context) -> Tokens:
        """What the recurrence is given, `[*batch, n_heads, seq, ...]`, of `x` and of what `before`
        and `conv` make of it. Without documents and padding."""

    @abc.abstractmethod
    def after(
        self,
        x: Float[Array, "*batch seq d_model"],
        u: Any,
        y: Float[Array, "*batch heads seq d_value"],
    ) -> Float[Array, "*batch seq d_model"]:
        """The output, also of `y`, which is read from the states."""

    def init_cache(self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike) -> Any:
        """The state and the last tokens of `conv`, for any capacity."""
        shape = (*batch, self.n_heads, self.d_key, self.d_value)
        earlier = None if self.conv is None else self.conv.init_cache(batch, dtype)
        return jnp.zeros(shape, wide_dtype(dtype)), earlier

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        """The output, and the cache after `x` (None without a cache)."""
        *batch, seq, _ = x.shape
        state, earlier = self.init_cache(tuple(batch), seq, x.dtype) if cache is None else cache
        u = self.before(x)
        if self.conv is not None:
            u, earlier = self.conv(u, earlier, context)
        is_real, begins = (
            None if flag is None else flag[..., None, :]  # for all heads
            for flag in real_and_begins(context, x.shape[:-1])
        )
        tokens = self.tokens(x, u, context)._replace(is_real=is_real, begins=begins)
        y, state = linear_recurrence(tokens, state)
        out = self.after(x, u, y).astype(x.dtype)
        return out, None if cache is None else (state, earlier)


class HeadsState(MatrixState):
    """A `MatrixState` with the matrices `query`, `key`, `value` and `output`. A subclass adds what
    it has beside these, and may replace `conv`. Fewer `n_key_heads` than `n_heads` are shared by
    neighbours."""

    n_key_heads: int = eqx.field(static=True)
    query: Linear
    key: Linear
    value: Linear
    output: Linear

    def __init__(
        self,
        config: Any,
        *,
        n_heads: int | None = None,
        n_key_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        conv: int | None = None,
        key: PRNGKeyArray,
    ):
        """`n_heads` and the widths `d_key` and `d_value` of a head are those of `config` by
        default. `conv`: how many tokens queries, keys and values see; None: their own alone.

        **Raises:** `UserError` if `n_key_heads` does not divide `n_heads`.
        """
        self.n_heads = n_heads or config.n_heads
        self.n_key_heads = n_key_heads or self.n_heads
        self.d_key, self.d_value = d_key or config.d_head, d_value or config.d_head
        require(
            self.n_heads % self.n_key_heads == 0,
            "The heads of a state must be a multiple of n_key_heads (the option key_heads), got "
            f"{self.n_heads} and {self.n_key_heads}.",
        )
        std, output_std = config.init_stds
        conv_key, output_key, *keys = jax.random.split(key, 5)
        widths = self.widths
        self.conv = None if conv is None else ShortConvolution(sum(widths), conv, key=conv_key)
        self.query, self.key, self.value = (
            Linear(config.d_model, d, std=std, key=k) for d, k in zip(widths, keys, strict=True)
        )
        self.output = Linear(widths[2], config.d_model, std=output_std, key=output_key)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The channels of queries, keys and values, of all heads."""
        keys = self.n_key_heads * self.d_key
        return keys, keys, self.n_heads * self.d_value

    def before(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d"]:
        """Queries, keys and values side by side, for a convolution; without one, `x`."""
        if not isinstance(self.conv, ShortConvolution):
            return x
        return jnp.concatenate([self.query(x), self.key(x), self.value(x)], axis=-1)

    def split_qkv(
        self, u: Float[Array, "*batch seq d"]
    ) -> tuple[Float[Array, "*batch heads seq d_head"], ...]:
        """Queries, keys and values of each head, of the `u` that `tokens` is given."""
        if isinstance(self.conv, ShortConvolution):
            parts: Any = split_columns(u, self.widths)
            q, k, v = parts
        else:
            q, k, v = self.query(u), self.key(u), self.value(u)
        q, k = (split_heads(part, self.n_key_heads) for part in (q, k))
        if self.n_key_heads < self.n_heads:
            q, k = (jnp.repeat(part, self.n_heads // self.n_key_heads, axis=-3) for part in (q, k))
        return q, k, split_heads(v, self.n_heads)

    def join(
        self, y: Float[Array, "*batch heads seq d_head"], dtype: DTypeLike
    ) -> Float[Array, "*batch seq d_model"]:
        """The output layer, applied to the heads' results side by side, in the model's `dtype`."""
        return self.output(join_heads(y).astype(dtype))


class LowRank(eqx.Module):
    """Two matrices, one after the other, with a narrow middle, and perhaps an activation there."""

    down: Linear
    up: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        d_in: int,
        rank: int,
        d_out: int,
        *,
        activation: Callable[[Array], Array] = identity,
        std: float,
        bias: bool,
        key: PRNGKeyArray,
    ):
        down_key, up_key = jax.random.split(key)
        self.down = Linear(d_in, rank, std=std, key=down_key)
        self.up = Linear(rank, d_out, std=rank**-0.5, bias=bias, key=up_key)
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        return self.up(self.activation(self.down(x)))


def split_heads(x: Float[Array, "*batch seq d"], n_heads: int) -> Float[Array, "*batch h seq _"]:
    """The channels of each head."""
    *leading, d = x.shape
    heads = swap_heads(x.reshape(*leading, n_heads, d // n_heads))
    return constrain(heads, "batch", "heads", None, None)


def join_heads(y: Float[Array, "*batch h seq d"]) -> Float[Array, "*batch seq _"]:
    """The heads' channels side by side."""
    y = swap_heads(constrain(y, "batch", "heads", None, None))
    *leading, n_heads, d = y.shape
    return y.reshape(*leading, n_heads * d)


def unit(x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    """Vectors of length 1, in at least float32."""
    x = widen(x)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def init_decays(
    rates: tuple[int, ...], steps: tuple[int, ...], key: PRNGKeyArray
) -> tuple[Array, Array]:
    """Logarithms of rates from 1 to 16, and biases for which softplus of 0 and the bias is from
    0.001 to 0.1: the state is halved in 0.4 to 700 tokens (Gu and Dao, 2023, "Mamba", section 3.6;
    Dao and Gu, 2024, "Mamba-2")."""
    rate_key, step_key = jax.random.split(key)
    log_rate = jnp.log(jax.random.uniform(rate_key, rates, minval=1.0, maxval=16.0))
    low, high = math.log(1e-3), math.log(1e-1)
    step = jnp.exp(jax.random.uniform(step_key, steps, minval=low, maxval=high))
    return log_rate, step + jnp.log(-jnp.expm1(-step))
