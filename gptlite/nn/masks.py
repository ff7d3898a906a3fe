"""Which keys a query may look at: `mask(queries, keys, offset)`, for queries at positions from
`offset` on and keys from 0 on."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool

from gptlite.nn.positions import Offset, positions


class Causal(eqx.Module):
    """All that are not later (Vaswani et al., 2017, section 3.2.3)."""

    def __call__(self, queries: int, keys: int, offset: Offset) -> Bool[Array, "queries keys"]:
        return jnp.arange(keys) <= positions(queries, offset)[:, None]


class SlidingWindow(eqx.Module):
    """The last `window` that are not later, the query's own place included (Beltagy et al., 2020,
    section 3.1).

    Measured: 64 of 256 places, against all, 0.018 ± 0.009 nats better (benchmarks/blocks.md).
    """

    window: int = eqx.field(static=True)

    def __call__(self, queries: int, keys: int, offset: Offset) -> Bool[Array, "queries keys"]:
        key, query = jnp.arange(keys), positions(queries, offset)[:, None]
        return (key <= query) & (key > query - self.window)


class Bidirectional(eqx.Module):
    """All: for encoders (Vaswani et al., 2017, section 3.2.3)."""

    def __call__(self, queries: int, keys: int, offset: Offset) -> Bool[Array, "queries keys"]:
        return jnp.ones((queries, keys), bool)


Mask = Causal | SlidingWindow | Bidirectional
