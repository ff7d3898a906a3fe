"""Checkpoints as training makes them and is resumed from them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from gptlite.config import MeshConfig
from gptlite.errors import UserError, require
from gptlite.machine.mesh import is_on_cpu, mesh_shape, whole
from gptlite.machine.pytrees import size_of
from gptlite.machine.records import NotNegative, Number
from gptlite.runs.stored import MAX_OTHER, MODEL, Summary, as_user_error, open_arrays, read_fields
from gptlite.runs.weights import fill, named_leaves
from gptlite.training.fit import Position
from gptlite.training.step import TrainState


class Record(Summary, frozen=True, forbid_unknown_fields=True):
    """The record of a checkpoint, besides its arrays.

    **Raises:** `ValueError` if it is none that training could have written.
    """

    position: Position
    seconds: NotNegative
    """Wall-clock time of all processes that trained the run."""
    corpus_sha256: str
    frozen_sha256: str
    """The checksum of the file of parameters that stay as they are; empty if there are none."""
    devices: Annotated[str, msgspec.Meta(max_length=200)]
    """Number and kind of the devices, and the mesh where parameters are spread."""

    def __post_init__(self):
        position, last = self.position, self.last
        msgspec.convert([position.step_seconds, *position.losses], list[Number])
        wrong = "a number is negative, or more updates were skipped than made"
        if not 0 <= position.skipped <= position.step or position.step_seconds < 0:
            raise ValueError(wrong)
        is_complete = (
            last.get("val_loss") is not None and last.get("step") and last.get("tokens")
        ) and (last.get("step_seconds") or 0) > 1e-9
        if "val_loss" in last and not is_complete:
            raise ValueError("its last line of metrics is not complete")
        if not self.devices.isprintable():
            raise ValueError(f"its devices are {self.devices!r}")


@dataclass(frozen=True)
class Checkpoint:
    """From where a run is resumed."""

    state: TrainState
    record: Record


def restore(
    path: Path,
    abstract_state: TrainState,
    frozen: Mapping[str, Array] = MappingProxyType({}),
) -> Checkpoint:
    """The checkpoint at `path`. Its arrays are sharded over devices as those of `abstract_state`
    are. `frozen`: the model's arrays that are not in it, by name.

    **Raises:** `UserError` if the checkpoint cannot be read or is damaged, or its arrays do not
    have the names, shapes and dtypes of `abstract_state`, which is checked before any array is
    read.
    """
    others = {f"{MODEL}{name}": array for name, array in frozen.items()}
    leaves = {x: leaf for x, leaf in named_leaves(abstract_state).items() if x not in others}
    with as_user_error(path, "read"):
        stores = open_arrays(path, leaves, size_of(leaves) + MAX_OTHER)
        fields = read_fields(path)
        arrays = {x: _on_devices(stores[x], leaf.sharding) for x, leaf in leaves.items()}
        try:
            if fields.pop("digest") != digest(arrays, survey(arrays), fields):
                raise ValueError("its digest does not match")
            record = msgspec.convert(fields, Record)
            if msgspec.to_builtins(record) != fields:
                raise ValueError("it has fields that are unknown")
        except (KeyError, ValueError) as error:
            raise UserError(f"The checkpoint {path} is damaged: {error}.") from error
    require(
        record.position.step == int(path.name),
        f"The checkpoint {path} is damaged: it is of another step.",
    )
    return Checkpoint(fill(abstract_state, arrays | others, f"The arrays of {path}"), record)


def _on_devices(store: Any, sharding: jax.sharding.Sharding) -> Array:
    def part(index: Any) -> np.ndarray:
        return store[index].read().result()

    return jax.make_array_from_callback(store.shape, sharding, part)


def describe_devices(mesh: MeshConfig) -> str:
    """The devices and their mesh, in the words of a record."""
    count = jax.device_count()
    _, fsdp, tensor = mesh_shape(mesh, count)
    cut = f" (fsdp {fsdp}, tensor {tensor})" if fsdp * tensor > 1 else ""
    return f"{count} x {jax.devices()[0].device_kind}{cut}"


def digest(arrays: dict[str, Array], sums: dict[str, np.ndarray], fields: dict[str, Any]) -> str:
    """A checksum of a checkpoint's arrays, with their `survey`, and its record."""
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        checksum.update(f"{name} {array.dtype} {array.shape} {sums[name].tolist()}".encode())
    return checksum.hexdigest()


def survey(arrays: dict[str, Array]) -> dict[str, np.ndarray]:
    """For each array, whether a number in it is NaN, and two checksums, computed where its parts
    are. They do not depend on how the array is cut."""
    sums = {}
    for name, array in arrays.items():
        sums[name] = _survey(array)
        # Elsewhere, all are started before the first is waited for. Devices of a CPU may take two
        # programs in another order, and then wait for each other until XLA ends the process.
        if is_on_cpu(array):
            jax.block_until_ready(sums[name])
    return {name: whole(numbers) for name, numbers in sums.items()}


@jax.jit  # for one array, because many have the same shape
def _survey(x: Array) -> UInt32[Array, "3"]:
    # The bits of each number, mixed with its place, added up modulo 2³²: so in any order.
    def mix(x):  # the finaliser of MurmurHash3 (Appleby, 2011)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * jnp.uint32(factor)
        return x ^ (x >> 16)

    plain = x.astype(jnp.uint8) if x.dtype == bool else x
    kind = f"uint{8 * min(4, plain.dtype.itemsize)}"
    bits = lax.bitcast_convert_type(plain, kind).astype(jnp.uint32)
    place, stride = jnp.zeros(bits.shape, jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        step = jnp.uint32(stride % 2**32)
        place += step * lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        stride *= bits.shape[axis]
    starts = (jnp.uint32(0), jnp.uint32(0x9E3779B9))
    sums = (jnp.sum(mix(bits ^ mix(place + start)), dtype=jnp.uint32) for start in starts)
    return jnp.stack([(plain != plain).any().astype(jnp.uint32), *sums])
