"""The mesh of devices, and how arrays are sharded over it.

All other code computes on whole arrays, as if there were one device, except in `mean_by_rows` and
`map_rows`. A mesh has three axes:

    data     each device has rows of the batch of its own, and a copy of the parameters
    fsdp     as data, but each device keeps a part of every matrix, and gathers a layer's matrices
             when the layer runs (Rajbhandari et al., 2020, "ZeRO", stage 3). Gathered, they are
             kept for the backward pass; `model.remat` "block" gathers them again.
    tensor   each device computes some of the heads, and some of the MLP's width (Shoeybi et al.,
             2019, "Megatron-LM", section 3)

The compiler divides the work (Xu et al., 2021, "GSPMD") according to where parameters and batches
are, and to a few constraints in the model. Without a mesh, the constraints do nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from gptlite.config import MeshConfig, ModelConfig
from gptlite.errors import UserError
from gptlite.machine.pytrees import is_array, is_stacked, path_name

T = TypeVar("T")

AXES = ("data", "fsdp", "tensor")
# Models trained side by side, each on one device: see `seeds_mesh`.
SEEDS = "seeds"
# The axes of the mesh over which an axis of an array is sharded.
MESH_AXES = {
    "batch": ("data", "fsdp"),
    "heads": "tensor",
    "vocab": "tensor",
    "shards": ("fsdp", "tensor"),
    "all": ("fsdp", "tensor", "data"),
}


# Matrices `[d_out, d_in]`, by their module. Those that read the residual stream are cut along their
# outputs, those that write to it along their inputs. So a tensor-parallel branch needs one sum, at
# its end.
BY_OUTPUT = ("query", "key", "value", "gate", "up", "head", "embedding", "previous")
BY_INPUT = ("output", "down")


def make_mesh(
    *, data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of `devices`, by default all. One of the sizes may be -1: what the others leave.

    **Raises:** `UserError` if the sizes do not make up the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = MeshConfig(data, fsdp, tensor).shape(len(devices))
    return Mesh(arranged(devices, shape), AXES, axis_types=(AxisType.Auto,) * 3)


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
    if rows % devices:
        raise UserError(
            f"training.batch_size / training.accumulation must be a multiple of the {devices} "
            f"devices that share it, got {rows}."
        )


def parameter_spec(path: str, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """How the parameter at `path` of a model, or the optimizer's state for it, is sharded.

    Matrices are cut over `fsdp` and `tensor`, along axes that these divide. Vectors are not cut. In
    a `Stack`, the axis of layers comes first.
    """
    if len(shape) - is_stacked(path) < 2:
        return PartitionSpec()
    module = next((name for name in path.split(".")[-2::-1] if not name.isdigit()), "")
    cut = (None, "fsdp")
    if module in BY_OUTPUT:
        cut = ("tensor", "fsdp")
    elif module in BY_INPUT:
        cut = ("fsdp", "tensor")
    return spec_for((*(None,) * (len(shape) - 2), *cut), shape, mesh)


def place(tree: T, mesh: Mesh) -> T:
    """`tree`, a model or a training state, sharded over `mesh`."""
    return _shard(tree, mesh, jax.device_put)


def place_seeds(tree: T, mesh: Mesh) -> T:
    """`tree`, whose arrays begin with an axis of seeds, sharded over a `seeds_mesh`."""
    return eqx.filter_shard(tree, NamedSharding(mesh, PartitionSpec(SEEDS)))


def place_batches(tree: T, mesh: Mesh) -> T:
    """Batches `[steps, batch, ...]`, of which this process has the `local_rows`, with their rows
    sharded over `mesh`; of a `seeds_mesh`, `[steps, seeds, batch, ...]`."""
    rows = SEEDS if SEEDS in mesh.shape else MESH_AXES["batch"]
    sharding = NamedSharding(mesh, PartitionSpec(None, rows))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def local_rows(mesh: Mesh, rows: int) -> Int[np.ndarray, " local"]:
    """Which of the `rows` rows of a batch the devices of this process have."""
    if SEEDS in mesh.shape:
        return np.arange(rows)
    sharding = NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))
    found = sharding.addressable_devices_indices_map((rows,)).values()
    parts = {place[0].indices(rows)[:2] for place in found if place is not None}
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


def skeleton(tree: T, mesh: Mesh) -> T:
    """`place`, with the shapes, dtypes and shardings of arrays in place of the arrays."""

    def shape(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return _shard(tree, mesh, shape)


# The functions below are for code that is compiled for the mesh that `jax.set_mesh` sets.


def constrain(x: Array, *axes: str | None) -> Array:
    """`x` with its last axes sharded as `axes` say: names in `MESH_AXES`, or None. An axis that the
    devices do not divide evenly is not sharded."""
    mesh = current_mesh()
    if mesh is None:
        return x
    wanted = (*(None,) * (x.ndim - len(axes)), *axes[max(0, len(axes) - x.ndim) :])
    names = [None if axis is None else MESH_AXES[axis] for axis in wanted]
    return jax.lax.with_sharding_constraint(x, spec_for(names, x.shape, mesh))


def constrain_parameters(tree: T) -> T:
    """`tree`, inside a compiled function, sharded as `place` does it."""
    mesh = current_mesh()
    return tree if mesh is None else _shard(tree, mesh, jax.lax.with_sharding_constraint)


def gathered(module: T, path: str) -> T:
    """`module`, the part of a model at `path`, with its parameters gathered from the devices of
    `fsdp`. Their gradients are cut again as soon as they are computed."""
    mesh = current_mesh()
    if mesh is None or mesh.shape["fsdp"] == 1:
        return module

    def gather(place, leaf):
        if not eqx.is_array(leaf):
            return leaf
        spec = parameter_spec(f"{path}.{path_name(place)}", leaf.shape, mesh)
        whole = PartitionSpec(*[None if axis == "fsdp" else axis for axis in spec])
        return leaf if whole == spec else _gather(leaf, whole, spec, path == "embedding")

    return jax.tree_util.tree_map_with_path(gather, module)


def n_shards(axis: str, length: int) -> int:
    """Over how many devices `constrain` cuts an axis of that length, which is named as there."""
    mesh = current_mesh()
    if mesh is None:
        return 1
    (names,) = spec_for([MESH_AXES[axis]], [length], mesh)
    names = () if names is None else (names,) if isinstance(names, str) else names
    return math.prod(mesh.shape[name] for name in names)


def is_sharded(axis: str) -> bool:
    """Whether there are several devices along an axis of the mesh."""
    mesh = current_mesh()
    return mesh is not None and mesh.shape[axis] > 1


def targets_nvidia() -> bool:
    """Whether the devices are NVIDIA's GPUs: those of the mesh, or without one JAX's default."""
    return "NVIDIA" in _device_kind()


def targets_tpu() -> bool:
    """As `targets_nvidia`, of TPUs."""
    return _device_kind().startswith("TPU")


def targets_cpu() -> bool:
    """As `targets_nvidia`, of a CPU."""
    return _device_kind() == "cpu"


def n_seeds_devices() -> int:
    """The devices of a `seeds_mesh`, each of which trains models of its own; 0 on other meshes."""
    return jax.sharding.get_abstract_mesh().shape.get(SEEDS, 0)


def is_mesh_set() -> bool:
    """Whether `jax.set_mesh` says for which devices is compiled."""
    return jax.sharding.get_abstract_mesh().abstract_device is not None


def _device_kind() -> str:
    """The kind of the devices, as JAX calls it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def current_mesh() -> Any:
    """The current mesh, if it has several devices for one model. None inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.shape) or mesh.manual_axes:
        return None
    return mesh if math.prod(mesh.shape[axis] for axis in AXES) > 1 else None


def _shard(tree: T, mesh: Any, put: Callable[[Any, NamedSharding], Any]) -> T:
    """`tree` with `put(array, sharding)` in place of each array, or shape of an array."""

    def of(path, leaf):
        if not is_array(leaf):
            return leaf
        return put(leaf, NamedSharding(mesh, parameter_spec(path_name(path), leaf.shape, mesh)))

    return jax.tree_util.tree_map_with_path(of, tree)


def spec_for(axes: Sequence[Any], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """`axes`, with None where an axis has one device, or does not divide the length."""

    def fitting(axis, length):
        if axis is None:
            return None
        names = (axis,) if isinstance(axis, str) else axis
        devices = math.prod(mesh.shape[name] for name in names)
        return axis if devices > 1 and length % devices == 0 else None

    return PartitionSpec(*map(fitting, axes, shape))


def _gather(x: Array, whole: PartitionSpec, cut: PartitionSpec, is_table: bool) -> Array:
    constraint = jax.lax.with_sharding_constraint

    @jax.custom_vjp
    def gather(x):
        return constraint(x, whole)

    def backward(_, grad):
        # The gradient of a table is a scatter, which the compiler divides by rows of the batch. To
        # divide it by columns of the table, it would gather the rows.
        grad = constraint(grad, whole) if is_table else grad
        return (constraint(grad, cut),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather(x)
