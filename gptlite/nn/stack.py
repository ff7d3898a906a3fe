"""Layers, one after the other, stored as one block whose arrays have a leading layer axis."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.errors import require
from gptlite.nn.block import checked, split_key
from gptlite.nn.context import WHOLE_SEQUENCE, Context
from gptlite.nn.kernels.recomputed import Recomputed
from gptlite.sharding import constrain, gathered

T = TypeVar("T")

# The cache of each layer.
Caches = tuple[Any, ...] | None
# The parts of a layer that its gradient computes once more: see `ModelConfig.remat`.
Remat = Literal["none", "attention", "block"]


class Layers(eqx.Module):
    """Blocks, one after the other, each with arrays of its own."""

    blocks: tuple[Any, ...]

    def init_cache(
        self,
        batch: tuple[int, ...],
        capacity: int,
        dtype: DTypeLike,
        context: Context = WHOLE_SEQUENCE,
    ) -> tuple[Any, ...]:
        """An empty cache for every layer: see `Block.init_cache`."""
        return tuple(block.init_cache(batch, capacity, dtype, context) for block in self.blocks)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        caches: Caches = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Caches, Float[Array, ""]]:
        """As `Block`, with a cache for every layer, and the sum of the layers' auxiliary losses."""
        keys = split_key(key, len(self.blocks))
        new_caches, aux_loss = [], jnp.zeros(())
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            x, cache, layer_loss = _run(block, x, cache, context, keys[i])
            new_caches.append(cache)
            aux_loss += layer_loss
        return x, None if caches is None else tuple(new_caches), aux_loss


class Stack(eqx.Module):
    """`n_layers` blocks of one kind, one after the other.

    `blocks` holds the parameters of all layers, stacked: a matrix `[d_out, d_in]` of a block is
    `[n_layers, d_out, d_in]` here. With `scan`, `lax.scan` runs the layers on whole sequences,
    which compiles faster and gives the same result. With caches, the layers run one by one.

    `remat` "block" or "attention" (with `scan`): what the gradient computes once more, so that it
    need not be kept (Chen et al., 2016, "Training deep nets with sublinear memory cost").
    """

    blocks: Any
    n_layers: int = eqx.field(static=True)
    scan: bool = eqx.field(static=True)
    remat: Remat = eqx.field(static=True)

    def __init__(
        self,
        make_block: Callable[[PRNGKeyArray, Int[Array, ""]], Any],
        n_layers: int,
        *,
        scan: bool = False,
        remat: Remat = "none",
        key: PRNGKeyArray,
    ):
        """`make_block(key, layer)` makes the layer of that number, from 0: one call makes all."""
        keys = jax.random.split(key, n_layers)
        self.blocks = eqx.filter_vmap(make_block)(keys, jnp.arange(n_layers))
        self.n_layers, self.scan, self.remat = n_layers, scan, remat

    def unstack(self) -> Layers:
        """The same layers, each with arrays of its own."""
        return Layers(tuple(each_layer(self.blocks, self.n_layers)))

    def init_cache(
        self,
        batch: tuple[int, ...],
        capacity: int,
        dtype: DTypeLike,
        context: Context = WHOLE_SEQUENCE,
    ) -> tuple[Any, ...]:
        """As `Layers.init_cache`."""
        return self.unstack().init_cache(batch, capacity, dtype, context)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        caches: Caches = None,
        context: Context = WHOLE_SEQUENCE,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch seq d_model"], Caches, Float[Array, ""]]:
        """As `Layers`."""
        if not self.scan or caches is not None:
            return self.unstack()(x, caches, context, key=key)
        keys = None if key is None else jax.random.split(key, self.n_layers)
        x, aux_loss = self._scan(self.blocks, self.n_layers, x, context, keys)
        return x, None, aux_loss

    def _scan(
        self, blocks: Any, count: int, x: Array, context: Context, keys: Any
    ) -> tuple[Float[Array, "*batch seq d_model"], Float[Array, ""]]:
        """The `count` layers in `blocks`, by `lax.scan`."""
        arrays, rest = eqx.partition(blocks, eqx.is_array)

        def layer(x, scanned):
            arrays, key = scanned
            block = eqx.combine(arrays, rest)
            if self.remat == "attention":
                require(
                    hasattr(block, "attention"),
                    "model.remat attention needs a block with an `attention`: "
                    f"{type(block).__name__} has none.",
                )
                block = eqx.tree_at(lambda b: b.attention, block, replace_fn=Recomputed)
            x, _, aux_loss = _run(block, x, None, context, key)
            return x, aux_loss

        if self.remat == "block":
            # With the gathering inside: else the gathered parameters of all layers would be kept.
            layer = jax.checkpoint(layer, prevent_cse=False)
        x, aux_losses = lax.scan(layer, x, (arrays, keys), length=count)
        return x, jnp.sum(aux_losses)


def each_layer(blocks: Any, count: int) -> Iterator[Any]:
    """The `count` layers in a stack's `blocks`."""
    arrays, rest = eqx.partition(blocks, eqx.is_array)
    # lax.unstack, not indexing: its transpose joins the layers' gradients in one operation, where
    # each index would write zeros for all layers. Without leaves: a block without parameters.
    leaves, structure = jax.tree.flatten(arrays)
    rows = zip(*map(lax.unstack, leaves), strict=True) if leaves else [()] * count
    return (eqx.combine(jax.tree.unflatten(structure, row), rest) for row in rows)


def unstacked(model: T, *, scanned: bool = True) -> T:
    """`model`, any pytree, with separate arrays for each layer of its stacks; without `scanned`, of
    those that do not scan. For loops over tokens: if arrays were unstacked inside the loop, they
    would be copied at every token."""

    def unstack(node: Any) -> Any:
        is_wanted = isinstance(node, Stack) and (scanned or not node.scan)
        return eqx.filter_jit(type(node).unstack)(node) if is_wanted else node

    return jax.tree.map(unstack, model, is_leaf=lambda node: isinstance(node, Stack))


def _run(
    block: Any, x: Array, cache: Any, context: Context, key: PRNGKeyArray | None
) -> tuple[Array, Any, Array]:
    """One layer, with its parameters gathered and the rows of its output sharded over devices."""
    out = gathered(block, "blocks.0")(x, cache, context, key=key)
    y, cache, aux_loss = checked(block, out, x, "y", "cache", "aux_loss")
    return constrain(y, "batch", None, None), cache, jnp.asarray(aux_loss, jnp.float32)
