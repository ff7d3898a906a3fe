"""The transformer block: branches that are added to the residual stream."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.errors import require
from gptlite.nn.context import WHOLE_SEQUENCE, Context, PerSequence
from gptlite.nn.kernels.sums import add_by_rows


class PreNorm(eqx.Module):
    """`x + branch(norm(x))` (Xiong et al., 2020, fig. 1b)."""

    norm: Any

    def before(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The input of the branch."""
        return self.norm(x)

    def after(self, x: Float[Array, "*batch d"], y: Array) -> Float[Array, "*batch d"]:
        """The residual stream `x` with the branch's output `y`."""
        return add_by_rows(x, y)


class PostNorm(eqx.Module):
    """`norm(x + branch(x))` (Vaswani et al., 2017, section 3.1).

    Loss against pre-norm: +0.004 ± 0.014 nats per token (benchmarks/blocks.md).
    """

    norm: Any

    def before(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The input of the branch."""
        return x

    def after(self, x: Float[Array, "*batch d"], y: Array) -> Float[Array, "*batch d"]:
        """The residual stream `x` with the branch's output `y`."""
        return self.norm(add_by_rows(x, y))


class Block(eqx.Module):
    """Attention and an MLP, each with a residual connection.

    - `attention` is any module with the call and the `init_cache` of `Attention`.
    - `attention_residual` and `mlp_residual` are a `PreNorm`, or another place of the norms.
    - `mlp` is any module from `[*batch, seq, d_model]` to the same shape. If it has a method
      `aux_loss(x, lengths)`, as `MoE` has, the block returns what that returns.
    """

    attention: Any
    attention_residual: Any
    mlp: Any
    mlp_residual: Any
    dropout: float = eqx.field(static=True, default=0.0)

    def init_cache(
        self,
        batch: tuple[int, ...],
        capacity: int,
        dtype: DTypeLike,
        context: Context = WHOLE_SEQUENCE,
    ) -> Any:
        """An empty cache for sequences with the leading axes `batch`."""
        return self.attention.init_cache(batch, capacity, dtype)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any, Float[Array, ""]]:
        """The output, the cache with `x` added (None without a cache), and the auxiliary loss.
        `key` switches dropout on."""
        keys = split_key(key, 5)  # two are for a decoder's cross-attention
        x, cache = self._add_attention(x, cache, context, keys[0], keys[1])
        x, aux_loss = self._add_mlp(x, context, keys[4])
        return x, cache, aux_loss

    def _add_attention(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any,
        context: Context,
        key: PRNGKeyArray | None,
        drop_key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        h = self.attention_residual.before(x)
        out = self.attention(h, cache, context, key=key)
        y, cache = checked(self.attention, out, h, "y", "cache")
        return self.attention_residual.after(x, drop(y, self.dropout, drop_key)), cache

    def _add_mlp(
        self,
        x: Float[Array, "*batch seq d_model"],
        context: Context,
        drop_key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Float[Array, ""]]:
        h = self.mlp_residual.before(x)
        y, aux_loss = run_mlp(self.mlp, h, context.lengths)
        return self.mlp_residual.after(x, drop(y, self.dropout, drop_key)), aux_loss


def drop(x: Float[Array, "*axes"], rate: float, key: PRNGKeyArray | None) -> Float[Array, "*axes"]:
    """`x` with dropout, if there is a key."""
    return eqx.nn.Dropout(rate)(x, key=key, inference=key is None)


def split_key(key: PRNGKeyArray | None, count: int) -> Any:
    """`count` keys from one, or as many Nones from None."""
    return (None,) * count if key is None else jax.random.split(key, count)


def run_mlp(
    mlp: Any, x: Float[Array, "*batch seq d_model"], lengths: PerSequence | None
) -> tuple[Float[Array, "*batch seq d_model"], Float[Array, ""]]:
    """The output and the auxiliary loss."""
    y = checked(mlp, mlp(x), x, "y")
    return y, mlp.aux_loss(x, lengths) if hasattr(mlp, "aux_loss") else jnp.zeros(())


def checked(part: Any, out: Any, x: Array, *names: str) -> Any:
    """`out`, which `part` returned for `x`. A custom part may return anything, and an output of
    another shape would often broadcast, and train.

    **Raises:** `UserError` (while tracing) if it is not a tuple of the values `names` (a single
    value, if there is one name), of which the first has the shape of `x`.
    """
    name = type(getattr(part, "wrapped", part)).__name__  # see `Stack`
    right = len(names) == 1 or (isinstance(out, tuple) and len(out) == len(names))
    require(right, f"{name} must return ({', '.join(names)}).")
    y: Any = out if len(names) == 1 else out[0]
    shape = jnp.shape(y)
    require(
        shape == x.shape,
        f"{name} must return the shape of its input: it returned {list(shape)} for "
        f"{list(x.shape)}.",
    )
    return out
