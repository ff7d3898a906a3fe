"""The table from ids to vectors."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


class Embedding(eqx.Module):
    """Rows of `weight` times `scale`, for ids of any shape (`eqx.nn.Embedding` takes a single id).
    A negative id means no token and gives zeros.

    Vaswani et al., 2017, section 3.4, scale by sqrt(d).
    """

    weight: Float[Array, "vocab d"]
    scale: float = eqx.field(static=True)

    def __init__(
        self,
        vocab_size: int,
        d: int,
        *,
        std: float = 1.0,
        scale: float = 1.0,
        key: PRNGKeyArray,
    ):
        """`std`: standard deviation of the normal that the weight is drawn from (0 for zeros)."""
        shape = (vocab_size, d)
        self.weight = std * jax.random.normal(key, shape) if std else jnp.zeros(shape)
        self.scale = scale

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
        # In float32, because the gradient adds up the rows of each id. In bfloat16, small
        # gradients would be lost, and a GPU adds common ids ten times slower.
        table = self.weight.astype(jnp.promote_types(self.weight.dtype, jnp.float32))
        rows = jnp.where(ids[..., None] >= 0, table[ids], 0).astype(self.weight.dtype)
        return rows if self.scale == 1.0 else rows * self.scale
