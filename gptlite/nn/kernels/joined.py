"""Linear layers of the same input as one. The reference:

    [layer(x) for layer in layers]

One wide product is faster than three narrow ones: at batch 1, S generates 1.1 times as fast, M up
to 1.15 times (benchmarks/NOTES.md; `python benchmarks/sample_speed.py`).
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from gptlite.nn.linear import Linear
from gptlite.sharding import is_sharded


def joined_layer(layers: Sequence[Any]) -> Linear | None:
    """The layers as one, with their outputs side by side. None if there is no such layer."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    # A layer of another type, such as one with a call hook, is called itself.
    alike = all(type(layer) is Linear for layer in layers) and len(biases) in (0, len(layers))
    # Joining matrices that are cut over devices would move them.
    if not alike or is_sharded("tensor"):
        return None
    weight = jnp.concatenate([layer.weight for layer in layers])
    bias = jnp.concatenate(biases) if biases else None
    return eqx.tree_at(
        lambda layer: (layer.weight, layer.bias),
        layers[0],
        (weight, bias),
        is_leaf=lambda x: x is None,
    )
