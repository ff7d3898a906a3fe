"""Which device computes what, said by hand where the compiler would exchange more.

Each function maps another one over devices. Its reference is a plain call of that function, which
it is on one device.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from gptlite.nn.kernels.row_keys import row_key
from gptlite.sharding import (
    AXES,
    MESH_AXES,
    constrain,
    current_mesh,
    is_sharded,
    spec_for,
    targets_cpu,
)

T = TypeVar("T")

# The most tokens for which a device of a CPU computes the gradient at once: 4 windows of 257 ids.
# Their activations stay in its caches. (benchmarks/NOTES.md)
CPU_TOKENS = 1100

# With JAX_DISABLE_JIT, these reach what would have been compiled.
NUMPY = (np.ndarray, np.generic)


def map_over_devices(function: Callable[[Array], Array], x: Array) -> Array:
    """`function(x)` with the first axis sharded over all devices. The function must treat each
    `x[i]` independently."""
    mesh = current_mesh()
    if mesh is None:
        return function(x)
    count = len(x)
    padding = [(0, -count % math.prod(mesh.shape[axis] for axis in AXES))]
    rest = (None,) * (x.ndim - 1)
    x = jnp.pad(x, padding + [(0, 0)] * len(rest))
    # Step by step, each of them one exchange at most. Left to itself, the compiler would gather
    # all of `x` on each device.
    cut = (*rest[:-1], "shards")
    x = constrain(constrain(x, None, *cut), "shards", *rest)
    y = constrain(function(constrain(x, "all", *rest)), "all", *rest)
    return constrain(constrain(y, "shards", *rest), None, *cut)[:count]


def n_row_shards() -> int:
    """How many devices `mean_by_rows` divides a batch over."""
    mesh = current_mesh()
    if mesh is None or mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
        return 1
    return mesh.shape["data"]


def mean_by_rows(
    function: Callable[[Any, Any, PRNGKeyArray], T], shared: Any, rows: Any, key: PRNGKeyArray
) -> T:
    """The mean of `function(shared, rows, key)` over the `n_row_shards` equal shards of a batch's
    rows, each on its device. `key` draws for each row what it draws if one device has all rows.

    For gradients: what a device computes is exchanged once, when it is complete. Left to itself,
    the compiler would exchange each layer's gradient when it is computed, in every micro-batch.
    """
    n_shards = n_row_shards()
    if n_shards == 1:
        return function(shared, rows, key)

    def on_device(shared, rows, key):
        out = function(shared, rows, row_key(key, jax.lax.axis_index("data"), n_shards))
        if not targets_cpu():
            return jax.lax.pmean(out, "data")
        # As one array: each one that the devices of a CPU exchange takes 50 µs, whatever its size.
        flat, unravel = jax.flatten_util.ravel_pytree(out)
        return unravel(jax.lax.pmean(flat, "data"))

    return jax.shard_map(
        on_device,
        in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(shared, rows, key)


def default_parts(rows: int, tokens: int) -> int:
    """In how many parts a device computes the gradient of its rows of so many tokens, if the config
    does not say."""
    if not targets_cpu() or is_sharded("fsdp") or is_sharded("tensor"):
        return 1
    divisors = (parts for parts in range(1, rows) if rows % parts == 0)
    return next((parts for parts in divisors if rows // parts * tokens <= CPU_TOKENS), rows)


def map_rows(function: Callable[[Any, Any], T], mesh: Mesh | None, shared: Any, rows: Any) -> T:
    """`function(shared, rows)`, in which each device of `mesh` (None: the current one) computes
    its share of the rows: the first axis of the arrays in `rows` and in the result. Scalars in
    `rows` are shared.

    By `shard_map`, so that each device's program is that of its rows alone: for a single row, it
    has no batch axis."""
    rows = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, NUMPY) else x, rows)
    if mesh is None:
        return function(shared, rows)
    arrays, rest = eqx.partition(shared, eqx.is_array)
    specs = jax.tree.map(lambda x: PartitionSpec("data") if x.ndim else PartitionSpec(), rows)
    return jax.shard_map(
        lambda arrays, rows: function(eqx.combine(arrays, rest), rows),
        mesh=mesh,
        in_specs=(PartitionSpec(), specs),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )(arrays, rows)


def map_heads(function: Callable[..., Any], *arrays: Array) -> Array:
    """`function(*arrays)`, of arrays and a result `[batch, heads, ...]`, in which each device
    computes its share of the rows and heads: for kernels, which the compiler does not divide."""
    mesh = current_mesh()
    if mesh is None:
        return function(*arrays)
    specs = [spec_for([MESH_AXES["batch"], MESH_AXES["heads"]], x.shape[:2], mesh) for x in arrays]
    return jax.shard_map(function, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)(
        *arrays
    )
