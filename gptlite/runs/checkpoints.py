"""Checkpoints, which Orbax writes while training continues.

    checkpoints/STEP/state     every array of the training state
    checkpoints/STEP/record    everything else as JSON, with a digest of arrays and record

Orbax renames a checkpoint to STEP only when it is complete, deletes old checkpoints, and removes
what a killed process left.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import warnings
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

from gptlite.errors import UserError, require
from gptlite.machine.files import MAX_NUMBER
from gptlite.machine.mesh import is_on_cpu, whole
from gptlite.machine.processes import RESUME, publish
from gptlite.machine.records import Number
from gptlite.runs.weights import check_shapes, fill, named_leaves
from gptlite.training.fit import Position
from gptlite.training.step import TrainState

# Prefix of the model's arrays in a training state.
MODEL = "model."


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


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ):
        """**Arguments:**

        - `keep`: how many checkpoints to keep. Without it, checkpoints are only read.
        - `before_commit`: called on Orbax's thread when a checkpoint is written, before it is
          renamed to its step.
        """
        # Imported here: the import takes a second, which the first training step need not wait for.
        import orbax.checkpoint as ocp

        _silence_orbax()
        self._ocp, self._folder = ocp, folder
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=keep is not None,
            read_only=keep is None,
            cleanup_tmp_directories=keep is not None,
            async_options=ocp.AsyncOptions(post_finalization_callback=before_commit),
        )
        state = ocp.StandardCheckpointHandler()
        save = state.async_save

        async def async_save(directory: Any, *args: Any, **kwargs: Any) -> Any:
            return [_Writing(x, folder) for x in await save(directory, *args, **kwargs) or ()]

        state.async_save = async_save  # a subclass would need argument classes of its own
        handlers = {"state": state, "record": ocp.JsonCheckpointHandler()}
        with _as_user_error(folder, "opened"):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_handlers=handlers
            )

    def save(
        self,
        state: TrainState,
        record: Record,
        is_frozen: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Start to write the checkpoint of `record.position.step`, without the parameters that are
        frozen. `state` may change as soon as this returns.

        **Raises:** `UserError` if a number in `state` is NaN, or this checkpoint or the one before
        could not be written.
        """
        ocp, step = self._ocp, record.position.step
        path = self._folder / str(step)
        arrays = {
            name: array
            for name, array in named_leaves(state).items()
            if not (name.startswith(MODEL) and is_frozen(name.removeprefix(MODEL)))
        }
        found = survey(arrays)
        for name, (is_nan, *_) in found.items():
            # Infinity is no mistake: a custom block may have a mask of -inf.
            if is_nan:
                raise UserError(f"The checkpoint {path} is not written: {name} is NaN.")
        fields = msgspec.to_builtins(record)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(arrays),
            record=ocp.args.JsonSave({**fields, "digest": digest(arrays, found, fields)}),
        )
        self.wait()
        with _as_user_error(path, "written"):
            if not self._manager.save(step, args=items):
                raise ValueError(f"there is a checkpoint of step {self._manager.latest_step()}")

    def restore(
        self,
        step: int,
        abstract_state: TrainState,
        frozen: Mapping[str, Array] = MappingProxyType({}),
    ) -> Checkpoint:
        """The checkpoint of `step`. Its arrays are sharded over devices as those of
        `abstract_state` are. `frozen`: the model's arrays that are not in it, by name.

        **Raises:** `UserError` if the checkpoint cannot be read or is damaged, or its arrays do not
        have the names, shapes and dtypes of `abstract_state`, which is checked before any array is
        read.
        """
        ocp, path = self._ocp, self._folder / str(step)
        with _as_user_error(path, "read"):
            found = self._manager.item_metadata(step)["state"].tree
        others = {f"{MODEL}{name}": array for name, array in frozen.items()}
        leaves = {x: leaf for x, leaf in named_leaves(abstract_state).items() if x not in others}
        check_shapes(leaves, dict(found), f"The arrays of {path}")
        for name, array in dict(found).items():
            # A small file may hold a chunk that fills the memory when it is unpacked.
            chunk = array.storage.chunk_shape
            require(
                all(0 < c <= max(n, 1) for c, n in zip(chunk, array.shape, strict=True)),
                f"The checkpoint {path} is damaged: {name}, {list(array.shape)}, is in chunks of "
                f"{list(chunk)}.",
            )
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in leaves.items()
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(shapes), record=ocp.args.JsonRestore()
        )
        with _as_user_error(path, "read"):
            restored = self._manager.restore(step, args=items)
            fields: dict[str, Any] = dict(restored["record"])
            wanted, arrays = fields.pop("digest"), dict(restored["state"])
            if wanted != digest(arrays, survey(arrays), fields):
                raise UserError(f"The checkpoint {path} is damaged: its digest does not match.")
            try:
                record = msgspec.convert(fields, Record)
                if msgspec.to_builtins(record) != fields:
                    raise ValueError("it has fields that are unknown")
            except ValueError as error:
                raise UserError(f"The checkpoint {path} is damaged: {error}.") from error
        if record.position.step != step:
            raise UserError(f"The checkpoint {path} is damaged: it is of another step.")
        return Checkpoint(fill(abstract_state, arrays | others, f"The arrays of {path}"), record)

    def wait(self) -> None:
        """Wait until everything started is written.

        **Raises:** `UserError` if it could not be written.
        """
        with _as_user_error(self._folder, "written"):
            self._manager.wait_until_finished()

    def check(self) -> None:
        """**Raises:** `UserError` if something started could not be written."""
        with _as_user_error(self._folder, "written"):
            self._manager.check_for_errors()

    def close(self) -> None:
        """End Orbax's threads. Errors there are not raised: `wait` raises them."""
        with contextlib.suppress(Exception):
            self._manager.close()


class _Writing:
    """Arrays that are being written. If one of several processes fails, Orbax waits for the others,
    and they for it: so the error is published at once."""

    def __init__(self, future: Any, folder: Path):
        self._future, self._folder = future, folder

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end, as Orbax's futures do."""
        try:
            return self._future.result(timeout)
        except Exception as error:
            publish(f"A checkpoint in {self._folder} cannot be written: {_reason(error)}. {RESUME}")
            raise


def list_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`, the newest first. Does not import Orbax."""
    names = (path.name for path in folder.glob("*"))
    return sorted((int(n) for n in names if n.isascii() and n.isdecimal()), reverse=True)


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
    found = {}
    for name, array in arrays.items():
        found[name] = _survey(array)
        # Elsewhere, all are started before the first is waited for. Devices of a CPU may take two
        # programs in another order, and then wait for each other until XLA ends the process.
        if is_on_cpu(array):
            jax.block_until_ready(found[name])
    return {name: whole(numbers) for name, numbers in found.items()}


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


@functools.cache
def _silence_orbax() -> None:
    """Stop Orbax from logging, in the whole process. It logs every phase of every save, and errors
    that it raises as well. When several operations fail together, it raises the error of one and
    closes its event loop; Python reports the others when it collects them."""
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # Reads that were not started when another one failed.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        message = str(unraisable.exc_value)
        if "Event loop is closed" not in message and "TensorStore details" not in message:
            before(unraisable)

    sys.unraisablehook = hook


@contextlib.contextmanager
def _as_user_error(path: Path, done: str) -> Iterator[None]:
    """Raises `UserError` for what Orbax and TensorStore raise: a dozen unrelated exceptions."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"The checkpoint {path} cannot be {done}: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    # TensorStore's messages are a page long. The reason follows the last file name.
    text = str(error).strip() or repr(error)
    reason = re.split(r" \[tensorstore_spec|\. See full|\n", text)[0]
    return reason.rpartition('": ')[2].rstrip(".")
