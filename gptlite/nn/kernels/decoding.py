"""A model's matrices in the order in which single tokens are multiplied fastest. The reference: the
model itself."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from gptlite.nn.attention import Heads
from gptlite.nn.kernels.joined import joined_layer
from gptlite.nn.kernels.transposed import TransposedLinear
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import MLP, GatedMLP
from gptlite.nn.stack import unstacked


@eqx.filter_jit
def rearranged(model: Any, transposed: bool) -> Any:
    """`model` with its layers separate, and the matrices of queries, keys and values as one; if
    `transposed`, with matrices as XLA's library for CPUs multiplies several rows (1.2 times as
    fast)."""

    def replace(tree: Any, kinds: tuple[type, ...], new: Callable[[Any], Any]) -> Any:
        def is_leaf(node: Any) -> bool:
            return type(node) in kinds

        return jax.tree.map(
            lambda node: new(node) if is_leaf(node) else node, tree, is_leaf=is_leaf
        )

    def join(heads: Heads) -> Heads:
        # To join matrices takes longer than the product of a single token. So it is done once.
        is_single = heads.query.weight.ndim == 2  # more axes: a custom block maps over layers
        layers = (heads.query, heads.key, heads.value)
        layer = joined_layer(layers) if is_single else None
        if layer is None:
            return heads
        return eqx.tree_at(lambda x: x.qkv_layer, heads, layer, is_leaf=lambda x: x is None)

    def transpose(layer: Linear) -> Any:
        return TransposedLinear(layer) if layer.weight.ndim == 2 else layer

    model = replace(unstacked(model), (Heads,), join)
    if not transposed:
        return model
    # Only in the package's own modules: others may use a layer in a way of their own.
    return replace(model, (Heads, MLP, GatedMLP), lambda node: replace(node, (Linear,), transpose))
