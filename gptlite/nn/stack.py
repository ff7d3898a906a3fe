"""Layers in a row, stored as one block whose every array has a leading layer axis."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from gptlite.nn.block import require_pair, split
from gptlite.nn.positions import Offset
from gptlite.sharding import constrain, gathered


class Layers(eqx.Module):
    """Blocks one after the other, each with arrays of its own."""

    blocks: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """The first block."""
        return self.blocks[0]

    def init_cache(
        self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike, **shared: Any
    ) -> PyTree:
        """An empty cache for every layer, each of which is given `shared`: see
        `Attention.init_cache`."""
        return tuple(block.init_cache(batch, capacity, dtype, **shared) for block in self.blocks)

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        caches: PyTree = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], PyTree]:
        """`caches` as made by `init_cache`, or None; `offset`: see `Attention`; `key` switches
        dropout on; every block is given `shared`."""
        keys = split(key, len(self.blocks))
        nothing = (None,) * len(self.blocks)
        new_caches = []
        for block, cache, layer_key in zip(self.blocks, caches or nothing, keys, strict=True):
            x, new_cache = _run(block, x, cache, offset, key=layer_key, **shared)
            new_caches.append(new_cache)
        return x, None if caches is None else tuple(new_caches)


class Stack(eqx.Module):
    """`n_layers` blocks of one kind, one after the other.

    `blocks` holds all layers' parameters, stacked: what is `[d_out, d_in]` in one block is
    `[n_layers, d_out, d_in]` here. They run unrolled or by `lax.scan`, with the same result.
    """

    blocks: Any
    n_layers: int = eqx.field(static=True)
    scan: bool = eqx.field(static=True)

    def __init__(
        self,
        make_block: Callable[[PRNGKeyArray], Any],
        n_layers: int,
        *,
        scan: bool = False,
        key: PRNGKeyArray,
    ):
        """`make_block(key)` makes one layer."""
        self.blocks = eqx.filter_vmap(make_block)(jax.random.split(key, n_layers))
        self.n_layers = n_layers
        self.scan = scan

    def unstack(self) -> Layers:
        """The same layers, apart."""
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        # lax.unstack rather than indexing: its transpose joins the layers' gradients in one go,
        # where each index would write a full-size array of zeros.
        leaves, structure = jax.tree.flatten(arrays)
        rows = zip(*[lax.unstack(leaf) for leaf in leaves], strict=True)
        if not leaves:  # a block without parameters
            rows = [()] * self.n_layers
        return Layers(tuple(eqx.combine(jax.tree.unflatten(structure, row), rest) for row in rows))

    @property
    def first(self) -> Any:
        """The first block."""
        return jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, self.blocks)

    def init_cache(
        self, batch: tuple[int, ...], capacity: int, dtype: DTypeLike, **shared: Any
    ) -> PyTree:
        """As for `Layers`: stacked for a scan, else a tuple."""
        caches = self.unstack().init_cache(batch, capacity, dtype, **shared)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches) if self.scan else caches

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        caches: PyTree = None,
        offset: Offset = 0,
        *,
        key: PRNGKeyArray | None = None,
        **shared: Any,
    ) -> tuple[Float[Array, "*batch seq d_model"], PyTree]:
        """As for `Layers`."""
        if not self.scan:
            return self.unstack()(x, caches, offset, key=key, **shared)
        keys = None if key is None else jax.random.split(key, self.n_layers)
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def layer(x, scanned):
            arrays, cache, key = scanned
            return _run(eqx.combine(arrays, rest), x, cache, offset, key=key, **shared)

        return lax.scan(layer, x, (arrays, caches, keys), length=self.n_layers)


def _run(block: Any, x: Array, cache: Any, offset: Offset, **options: Any) -> tuple[Array, Any]:
    """One layer, whose parameters are gathered for it, and the rows of its output spread."""
    block = gathered(block, "blocks.0")
    x, cache = require_pair(block, block(x, cache, offset, **options), x)
    return constrain(x, "batch", None, None), cache
