"""How arrays are sharded over the mesh of devices.

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
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from gptlite.machine.pytrees import is_array, is_stacked, path_name

T = TypeVar("T")

AXES = ("data", "fsdp", "tensor")
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
    constrain_one = jax.lax.with_sharding_constraint
    return tree if mesh is None else map_shardings(constrain_one, tree, mesh)


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


def map_shardings(put: Callable[[Any, NamedSharding], Any], tree: T, mesh: Any) -> T:
    """`tree`, a model or a training state, with `put(array, sharding)` in place of each array, or
    shape of an array."""

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
