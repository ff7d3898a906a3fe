"""Moving numbers around. The references: `jnp.swapaxes(x, -2, -3)` and `jnp.split`.

XLA's CPU compiler widens bfloat16 numbers to float32 before it moves them, and rounds them again
after; so there they are moved as whole numbers of 16 bits, also in the backward pass. A step of M
in bfloat16 takes 0.97 of the time (2 cores of an AMD EPYC, Zen 4, by turns: benchmarks/NOTES.md;
`python benchmarks/train_speed.py`).
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def _moved(move: Callable[..., Array], *arrays: Array) -> Array:
    """`move(*arrays)`, where `move` does not compute with the numbers."""

    def on_cpu(*arrays):
        bits = (lax.bitcast_convert_type(x, jnp.uint16) for x in arrays)
        return lax.bitcast_convert_type(move(*bits), jnp.bfloat16)

    if arrays[0].dtype != jnp.bfloat16:
        return move(*arrays)
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=move)


@jax.custom_vjp
def swap_heads(x: Float[Array, "*batch a b d_head"]) -> Float[Array, "*batch b a d_head"]:
    """Heads before the sequence in place of after it, and back."""
    return _moved(lambda x: jnp.swapaxes(x, -2, -3), x)


swap_heads.defvjp(lambda x: (swap_heads(x), None), lambda _, grad: (swap_heads(grad),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_columns(
    x: Float[Array, "*batch d"], widths: tuple[int, ...]
) -> tuple[Float[Array, "*batch _"], ...]:
    """The columns of `x`, cut into parts of these widths."""
    return tuple(jnp.split(x, list(itertools.accumulate(widths[:-1])), axis=-1))


split_columns.defvjp(
    lambda x, widths: (split_columns(x, widths), None),
    lambda widths, _, grads: (_moved(lambda *xs: jnp.concatenate(xs, axis=-1), *grads),),
)
