"""The mesh of devices: how it is made, and how arrays get onto it, and off it again.

Which part of an array is where, `gptlite.sharding` says.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from gptlite.config import MeshConfig, ModelConfig
from gptlite.errors import UserError, require
from gptlite.sharding import AXES, MESH_AXES, map_shardings

T = TypeVar("T")

# Bytes of the largest model that is copied to each device of a CPU, to generate: see `row_mesh`.
MAX_COPIED = 2**25


def make_mesh(
    *, data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of `devices`, by default all. `data`, `fsdp` and `tensor` are its sizes, as in
    `MeshConfig`. One of them may be -1: what the others leave.

    **Raises:** `UserError` if the sizes do not make up the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = mesh_shape(MeshConfig(data, fsdp, tensor), len(devices))
    return Mesh(arranged(devices, shape), AXES, axis_types=(AxisType.Auto,) * 3)


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, int, int]:
    """The sizes of the axes for so many devices.

    **Raises:** `UserError` if these are too many or too few.
    """
    sizes, must = [config.data, config.fsdp, config.tensor], "must be it"
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(1, devices // -math.prod(sizes))
        must = "of those that are not -1 must divide it"
    require(
        math.prod(sizes) == devices,
        f"mesh.data {config.data}, mesh.fsdp {config.fsdp} and mesh.tensor {config.tensor} do not "
        f"make up the number of devices, {devices}: the product {must} (on a CPU, "
        "--training.cpu-devices says how many there are).",
    )
    return sizes[0], sizes[1], sizes[2]


def arranged(devices: Sequence[Any], shape: tuple[int, int, int]) -> np.ndarray:
    """`devices` in a mesh of that shape. Those of a slice (a TPU slice, a host with GPUs) have fast
    links; slices are joined along `data`, as far as it goes, then `fsdp`, then `tensor`."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    slow, left = [], slices
    for size in shape:
        slow.append(math.gcd(size, left))
        left //= slow[-1]
    fast = [size // count for size, count in zip(shape, slow, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(fast, slow, devices, allow_split_physical_axes=True)


def check_tensor(tensor: int, model: ModelConfig) -> None:
    """**Raises:** `UserError` if so many devices along `tensor` cannot share the heads evenly."""
    kv_heads = model.n_kv_heads or model.n_heads
    common = math.gcd(model.n_heads, kv_heads)
    if common % tensor:
        fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise UserError(
            f"mesh.tensor must divide model.n_heads, {model.n_heads}, and model.n_kv_heads, "
            f"{kv_heads}: {fitting} would do, got {tensor}."
        )


def check_rows(mesh: Mesh | AbstractMesh, rows: int) -> None:
    """**Raises:** `UserError` if the devices of `mesh` cannot share `rows` rows evenly."""
    devices = mesh.shape["data"] * mesh.shape["fsdp"]
    require(
        rows % devices == 0,
        f"training.batch_size / training.accumulation must be a multiple of the {devices} "
        f"devices that share it, got {rows}.",
    )


def place(tree: T, mesh: Mesh) -> T:
    """`tree`, a model or a training state, sharded over `mesh`."""
    return map_shardings(jax.device_put, tree, mesh)


def place_batches(tree: T, mesh: Mesh) -> T:
    """Batches `[steps, batch, ...]`, of which this process has the `local_rows`, with their rows
    sharded over `mesh`."""
    sharding = NamedSharding(mesh, PartitionSpec(None, MESH_AXES["batch"]))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def local_rows(mesh: Mesh, rows: int) -> Int[np.ndarray, " local"]:
    """Which of the `rows` rows of a batch the devices of this process have."""
    sharding = NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))
    places = sharding.addressable_devices_indices_map((rows,)).values()
    parts = {place[0].indices(rows)[:2] for place in places if place is not None}
    return np.concatenate([np.arange(*part) for part in sorted(parts)])


def replicate(tree: T, mesh: Mesh) -> T:
    """`tree`, whole on every device of `mesh`."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def is_whole(tree: Any) -> bool:
    """Whether every device holds all of the arrays of `tree`."""
    return all(x.is_fully_replicated for x in arrays_of(tree))


def is_on_cpu(tree: Any) -> bool:
    """Whether the arrays of `tree` are on devices of a CPU."""
    return all(device.platform == "cpu" for x in arrays_of(tree) for device in x.devices())


def arrays_of(tree: Any) -> list[jax.Array]:
    """The arrays in `tree`."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def local(tree: T) -> T:
    """`tree` on the first device, if every device holds all of it; else as it is."""
    if not is_whole(tree):
        return tree
    return jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, tree)


def is_local(x: Array) -> bool:
    """Whether the devices of this process have all of `x`."""
    return x.is_fully_replicated or x.is_fully_addressable


def whole(x: Array) -> np.ndarray:
    """`x` in host memory, gathered from all processes."""
    if is_local(x):
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def abstract(tree: T, mesh: Mesh) -> T:
    """`place`, with the shapes, dtypes and shardings of arrays in place of the arrays."""

    def shape(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return map_shardings(shape, tree, mesh)


def row_mesh(rows: int, model: Any) -> Mesh | None:
    """A mesh of devices that share `rows` rows evenly, each with the whole of `model`. None if that
    is one device, the model is on another one, or a mesh is set already.

    The devices of a CPU read their copies of the model from one memory. Where the model is larger
    than the processor's cache, several devices are no faster than one, so it is not copied.
    """
    devices, arrays = jax.local_devices(), arrays_of(model)
    count = math.gcd(len(devices), rows)
    too_large = is_on_cpu(model) and sum(x.nbytes for x in arrays) > MAX_COPIED
    elsewhere = any(devices[0] not in x.devices() for x in arrays)
    is_set = not jax.sharding.get_abstract_mesh().empty
    if count == 1 or too_large or elsewhere or is_set:
        return None
    return make_mesh(devices=devices[:count])
