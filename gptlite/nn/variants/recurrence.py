"""A layer with a state, written as what one token does to it."""

import abc
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.errors import require
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.dtypes import widen


class Recurrence(eqx.Module):
    """A layer with the call of `Attention`, from the step of one token.

    A subclass has two methods, which know neither batches nor lengths. All else follows from them:
    training by `lax.scan`, generation with a cache, prompts of different lengths, documents that
    are kept apart.

    The state is kept in float32 (or float64), also where the model computes in bfloat16.
    """

    @abc.abstractmethod
    def init_state(self) -> Any:
        """The state before the first token of a sequence or a document: an array, or a pytree of
        arrays. It may be made of parameters."""

    @abc.abstractmethod
    def step(self, state: Any, x: Any) -> tuple[Any, Float[Array, " d_model"]]:
        """The next state, and the output, for one token `x`: `[d_model]`, or what `before` makes
        of it."""

    def before(self, x: Float[Array, "*batch seq d_model"]) -> Any:
        """What a step is given of each token: an array `[*batch, seq, ...]`, or a pytree of them.
        What depends on one token alone, such as a product with a matrix, is faster here, for all
        tokens at once. By default `x` itself."""
        return x

    def init_cache(self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike) -> Any:
        """The state, for sequences with the leading axes `batch`, and for any capacity."""
        return jax.tree.map(
            lambda a: jnp.broadcast_to(_wide(a), (*batch, *jnp.shape(a))), self.init_state()
        )

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        cache: Any = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Any]:
        """The output, and the state after `x` (None without a cache)."""
        *batch, seq, _ = x.shape
        inputs = self.before(x)
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(inputs)]
        wrong = [list(shape) for shape in shapes if shape[: x.ndim - 1] != x.shape[:-1]]
        require(
            shapes != [] and not wrong,
            f"{type(self).__name__}.before must return arrays [*batch, seq, ...] for an input of "
            f"{list(x.shape)}, got {f'one of {wrong[0]}' if wrong else 'none'}.",
        )
        first = self.init_cache(tuple(batch), seq, x.dtype)
        flags = real_and_begins(context, x.shape[:-1])
        step = functools.partial(self._checked_step, x.shape[-1], x.dtype)
        for _ in batch:
            step = jax.vmap(step)

        def run(state: Any, token: Any) -> tuple[Any, Array]:
            inputs, (is_real, begins) = token
            before = state if begins is None else _where(begins, first, state)
            after, y = step(before, inputs)
            return after if is_real is None else _where(is_real, after, state), y

        tokens = jax.tree.map(lambda a: jnp.moveaxis(a, len(batch), 0), (inputs, flags))
        state, y = lax.scan(run, first if cache is None else cache, tokens)
        y = jnp.moveaxis(y, 0, len(batch)).astype(x.dtype)
        return y, None if cache is None else state

    def _checked_step(
        self, d_model: int, dtype: DTypeLike, state: Any, x: Any
    ) -> tuple[Any, Array]:
        out = self.step(state, x)
        name = f"{type(self).__name__}.step"
        require(isinstance(out, tuple) and len(out) == 2, f"{name} must return (state, y).")
        shapes, wanted = (jax.tree.map(jnp.shape, tree) for tree in (out[0], state))
        require(
            shapes == wanted,
            f"{name} must return a state like that of init_state: it returned arrays of {shapes} "
            f"for {wanted}.",
        )
        require(
            jnp.shape(out[1]) == (d_model,),
            f"{name} must return an output [d_model], [{d_model}], got {list(jnp.shape(out[1]))}.",
        )

        def kept(a: Any, old: Array) -> Array:
            a = jnp.asarray(a)
            # In a model in bfloat16, a state that is made of a token alone is in bfloat16.
            require(
                a.dtype in (old.dtype, dtype) and jnp.isdtype(a.dtype, _kind(old)),
                f"{name} must return a state in {old.dtype}, as init_state does, got {a.dtype}.",
            )
            return a.astype(old.dtype)

        return jax.tree.map(kept, out[0], state), jnp.asarray(out[1])


def real_and_begins(
    context: Context, shape: tuple[int, ...]
) -> tuple[Bool[Array, "*batch seq"] | None, Bool[Array, "*batch seq"] | None]:
    """Whether each token is real, and not padding, and whether it begins a document, for a layer's
    input with the axes `shape`. None: all are real, and none begins one."""
    steps = jnp.arange(shape[-1])
    is_real = begins = None
    if context.lengths is not None:
        is_real = jnp.broadcast_to(steps < jnp.asarray(context.lengths)[..., None], shape)
    if context.document_starts is not None:
        begins = context.document_starts == jnp.asarray(context.start)[..., None] + steps
        begins = jnp.broadcast_to(begins, shape)
    return is_real, begins


def _kind(a: Array) -> Any:
    return "real floating" if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype


def _wide(a: Any) -> Array:
    a = jnp.asarray(a)
    return widen(a) if jnp.issubdtype(a.dtype, jnp.floating) else a


def _where(condition: Bool[Array, "*batch"], state: Any, other: Any) -> Any:
    """`state` in the rows where `condition` holds, `other` in the others."""

    def choose(a: Array, b: Array) -> Array:
        rows = condition.reshape(*condition.shape, *(1,) * (a.ndim - condition.ndim))
        return jnp.where(rows, a, b)

    return jax.tree.map(choose, state, other)
