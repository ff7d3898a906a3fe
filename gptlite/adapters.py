"""Low-rank adapters (Hu et al., 2021, "LoRA: low-rank adaptation of large language models")."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.errors import require
from gptlite.machine.names import LoRA
from gptlite.machine.pytrees import path_name
from gptlite.nn.linear import Linear, project
from gptlite.nn.stack import Stack

T = TypeVar("T")


class LoRALinear(Linear):
    """`y = x (W + s B A)ᵀ + b` with `s = alpha / rank`, `A` (`lora_down`) and `B` (`lora_up`).

    `B` begins at zero, so that the layer begins as the one that it was made from.
    """

    lora_down: Float[Array, "rank d_in"]
    lora_up: Float[Array, "d_out rank"]
    scale: float = eqx.field(static=True)

    def __init__(self, layer: Linear, lora: LoRA, *, key: PRNGKeyArray):
        """`layer`: of one layer, or of a `Stack` of them."""
        *layers, d_out, d_in = layer.weight.shape
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_down = d_in**-0.5 * jax.random.normal(key, (*layers, lora.rank, d_in))
        self.lora_up = jnp.zeros((*layers, d_out, lora.rank))
        self.scale = lora.alpha / lora.rank

    def __call__(self, x: Float[Array, "*batch d_in"]) -> Float[Array, "*batch d_out"]:
        small = project(self.scale * x, self.lora_down, x.dtype).astype(x.dtype)
        return super().__call__(x) + project(small, self.lora_up, x.dtype).astype(x.dtype)

    def merged(self) -> Linear:
        """One layer with the matrix `W + s B A`."""
        change = self.scale * jnp.einsum("...or,...ri->...oi", self.lora_up, self.lora_down)
        # A layer of any shape, whose arrays are replaced.
        return eqx.tree_at(
            lambda layer: (layer.weight, layer.bias),
            Linear(1, 1, std=0.0, bias=self.bias is not None, key=jax.random.key(0)),
            (self.weight + change, self.bias),
            is_leaf=lambda x: x is None,
        )


def with_adapters(model: T, lora: LoRA, *, key: PRNGKeyArray) -> T:
    """`model` with adapters beside the matrices in its stack that `lora` names.

    **Raises:** `UserError` if there are none.
    """
    count = 0

    def replace(path: tuple[Any, ...], node: Any) -> Any:
        nonlocal count
        if type(node) is not Linear or path_name(path).split(".")[-1] not in lora.matrices:
            return node
        count += 1
        return LoRALinear(node, lora, key=jax.random.fold_in(key, count))

    def adapted(stack: Any) -> Any:
        if not isinstance(stack, Stack):
            return stack
        return jax.tree_util.tree_map_with_path(
            replace, stack, is_leaf=lambda node: isinstance(node, Linear)
        )

    model = jax.tree.map(adapted, model, is_leaf=lambda node: isinstance(node, Stack))
    names = ", ".join(lora.matrices)
    require(count > 0, f"model.lora: no layer of this model has a Linear named {names}.")
    return model


def merged(model: T) -> T:
    """`model` with each matrix and its adapter as one matrix."""
    return jax.tree.map(
        lambda node: node.merged() if isinstance(node, LoRALinear) else node,
        model,
        is_leaf=lambda node: isinstance(node, LoRALinear),
    )
