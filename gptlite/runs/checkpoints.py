"""Checkpoints: what they hold, and reading them.

    checkpoints/STEP/state     every array of the training state
    checkpoints/STEP/record    everything else as JSON, with a digest of arrays and record

Orbax writes them (see saving.py), in the format of TensorStore, which reads them here: its import
takes a hundredth of a second, and Orbax's half a second. The files may be a stranger's.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
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
from gptlite.machine.files import MAX_NUMBER
from gptlite.machine.mesh import is_on_cpu, mesh_shape, whole
from gptlite.machine.pytrees import size_of
from gptlite.machine.records import Natural, Number, read_record
from gptlite.models.gpt import GPT
from gptlite.runs.find import checkpoint_of, list_steps
from gptlite.runs.frozen import FROZEN, read_frozen
from gptlite.runs.weights import check_shapes, fill, named_leaves, require_room
from gptlite.training.fit import Position
from gptlite.training.step import TrainState

# Prefix of the model's arrays in a training state.
MODEL = "model."
# No training state is so many times as large as its model: AdamW's is three times.
STATES = 4
# Bytes that a file of a checkpoint may have besides the arrays'.
MAX_OTHER = 2**20


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a checkpoint, besides its arrays.

    **Raises:** `ValueError` if it is none that training could have written.
    """

    position: Position
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_NUMBER)]
    """Wall-clock time of all processes that trained the run."""
    last: dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**62)] | Number | None]
    """The last line of metrics."""
    corpus_sha256: str
    frozen_sha256: str
    """The checksum of the file of parameters that stay as they are; empty if there are none."""
    parameters: Natural
    """Numbers in the model, with those that are frozen."""
    devices: Annotated[str, msgspec.Meta(max_length=200)]
    """Number and kind of the devices, and the mesh where parameters are spread."""

    def __post_init__(self):
        position, last = self.position, self.last
        msgspec.convert([position.step_seconds, *position.losses], list[Number])
        wrong = "a number is negative, or more updates were skipped than made"
        if not 0 <= position.skipped <= position.step:
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


@dataclass(frozen=True)
class Evaluated:
    """A step, and the validation loss of the model then, in nats per token."""

    step: int
    val_loss: float


def read_fields(path: Path) -> dict[str, Any]:
    """The record of a checkpoint as it is written, with its digest.

    **Raises:** `OSError` if it cannot be read; `ValueError` if it is no record.
    """
    return read_record(path / "record" / "metadata", dict[str, Any])


def newest_record(run: Path) -> Record | None:
    """The record of a run's newest checkpoint, unless it is damaged."""
    for step in list_steps(run):
        return _record(checkpoint_of(run, step))
    return None


def best_step(run: Path) -> Evaluated | None:
    """The checkpoint of a run with the lowest validation loss; of several, the newest."""
    best = None
    for step in list_steps(run):
        record = _record(checkpoint_of(run, step))
        if record is None or record.last.get("step") != step:
            continue
        val_loss = record.last.get("val_loss")
        if val_loss is not None and (best is None or val_loss < best.val_loss):
            best = Evaluated(step, val_loss)
    return best


def _record(path: Path) -> Record | None:
    try:
        fields = read_fields(path)
        fields.pop("digest", None)
        return msgspec.convert(fields, Record)
    except (OSError, ValueError):
        return None


def load_model(path: Path, abstract: GPT, is_frozen: Callable[[str], bool]) -> GPT:
    """`abstract` (`eqx.filter_eval_shape` of a model) with the model's arrays in the checkpoint
    at `path`, and those that are frozen from the run's file. The optimizer's are not read, so the
    digest is not checked.

    **Raises:** `UserError` if a file cannot be read, or its names, shapes or dtypes are not those
    of `abstract`.
    """
    require_room(str(path), abstract)
    leaves = named_leaves(abstract)
    frozen = {name: leaf for name, leaf in leaves.items() if is_frozen(name)}
    trained = {f"{MODEL}{name}": leaf for name, leaf in leaves.items() if name not in frozen}
    with as_user_error(path, "read"):
        stores = _open(path, trained, STATES * size_of(abstract) + MAX_OTHER, MODEL)
        reads = {name: store.read() for name, store in stores.items()}
        arrays = {name.removeprefix(MODEL): read.result() for name, read in reads.items()}
    if frozen:
        arrays |= read_frozen(path.parent.parent / FROZEN, frozen)
    return fill(abstract, arrays, f"The arrays of {path}")


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
        stores = _open(path, leaves, size_of(leaves) + MAX_OTHER)
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


def _open(path: Path, wanted: Mapping[str, Any], most: int, prefix: str = "") -> dict[str, Any]:
    """The arrays of a checkpoint whose names begin with `prefix`, by name, not yet read. They must
    be those of `wanted`, arrays or shapes of arrays. `most`: bytes that a file may have."""
    import tensorstore

    # TensorStore reads whole files, of whatever size, and ends the process if they do not fit.
    for file in (path, *path.rglob("*")):
        status = file.lstat()
        right = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
        require(right, f"{file} is a link or no regular file.")
        require(
            status.st_size <= most,
            f"{file} is no file of a checkpoint of this run: it has {status.st_size:,} bytes, and "
            f"at most {most:,} are expected.",
        )
    base = {"driver": "file", "path": f"{(path / 'state').absolute()}/"}
    place = {"driver": "ocdbt", "base": base}
    end = "/.zarray"
    keys = (key.decode() for key in tensorstore.KvStore.open(place).result().list().result())
    names = [key.removesuffix(end) for key in keys if key.startswith(prefix) and key.endswith(end)]
    require(bool(names), f"The checkpoint {path} is damaged: it holds no arrays.")
    opening = {
        name: tensorstore.open(
            {"driver": "zarr", "kvstore": place | {"path": f"{name}/"}}, open=True, read=True
        )
        for name in names
    }
    stores = {name: opened.result() for name, opened in opening.items()}
    shapes = {
        name: jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype)
        for name, store in stores.items()
    }
    check_shapes(dict(wanted), shapes, f"The arrays of {path}")
    for name, store in stores.items():
        # A small file may hold a chunk that fills the memory when it is unpacked.
        chunk: Any = store.chunk_layout.read_chunk.shape or ()  # None for a single number
        require(
            all(0 < c <= max(n, 1) for c, n in zip(chunk, store.shape, strict=True)),
            f"The checkpoint {path} is damaged: {name}, {list(store.shape)}, is in chunks of "
            f"{list(chunk)}.",
        )
    return stores


def _on_devices(store: Any, sharding: jax.sharding.Sharding) -> Array:
    def part(index: Any) -> np.ndarray:
        return store[index].read().result()

    return jax.make_array_from_callback(store.shape, sharding, part)


def describe_devices(mesh: MeshConfig) -> str:
    """As in a record."""
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


@contextlib.contextmanager
def as_user_error(path: Path, done: str) -> Iterator[None]:
    """Raises `UserError` for what Orbax and TensorStore raise: a dozen unrelated exceptions."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The checkpoint {path} cannot be {done}: {reason_of(error)}.") from error


def reason_of(error: Exception) -> str:
    """The reason that an error of Orbax or TensorStore gives, without the place."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    # TensorStore's messages are a page long. The reason follows the last file name.
    text = str(error).strip() or repr(error)
    reason = re.split(r" \[tensorstore_spec|\. See full|\n", text)[0]
    return reason.rpartition('": ')[2].rstrip(".")
