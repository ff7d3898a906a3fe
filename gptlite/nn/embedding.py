"""The table from ids to vectors."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


class Embedding(eqx.Module):
    """Row `id` of `weight`, for any array of ids (`eqx.nn.Embedding` takes a single one); zeros for
    a negative id, which stands for no token."""

    weight: Float[Array, "vocab d"]

    def __init__(self, vocab_size: int, d: int, *, std: float, key: PRNGKeyArray):
        """`std`: standard deviation of the normal that the weight is drawn from (0 for zeros)."""
        shape = (vocab_size, d)
        self.weight = std * jax.random.normal(key, shape) if std else jnp.zeros(shape)

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
        return jnp.where(ids[..., None] >= 0, self.weight[ids], 0)
