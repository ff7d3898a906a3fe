"""Positions that are added to the embeddings, and not trained."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from gptlite.nn.context import Start
from gptlite.nn.positions import angles
from gptlite.nn.variants.rotary_options import frequencies


class Sinusoidal(eqx.Module):
    """Adds `sin(t / 10000^(2i/d))` to channel 2i and the cosine to 2i + 1
    (Vaswani et al., 2017, section 3.5).

    **Raises:** `ValueError` (while tracing) if `d` is odd.

    Loss against rotary: +0.129 ± 0.040 nats per token (benchmarks/blocks.md).
    """

    def __call__(
        self, x: Float[Array, "*batch seq d"], start: Start = 0
    ) -> Float[Array, "*batch seq d"]:
        angle = angles(x.shape[-2], frequencies(x.shape[-1]), start)
        table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        return x + table.reshape(*angle.shape[:-1], x.shape[-1]).astype(x.dtype)
