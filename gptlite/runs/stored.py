"""Checkpoints on the disk: which there are, what they say, and their arrays, not yet read.

    checkpoints/STEP/state     a folder in the format of Zarr for each array of the training state
    checkpoints/STEP/record    everything else as JSON, with a digest of arrays and record

Orbax writes them (see saving.py), and TensorStore reads them here: its import takes a hundredth of
a second, and Orbax's a third of one. Nothing of training is imported, either, so that a model is
loaded quickly. The files may be a stranger's: so nothing in them is packed, and what is read has
the size that is seen beforehand.
"""

import contextlib
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import msgspec

from gptlite.errors import UserError, require
from gptlite.machine.files import MAX_JSON
from gptlite.machine.pytrees import size_of
from gptlite.machine.records import Number, read_record
from gptlite.models.gpt import GPT
from gptlite.runs.find import checkpoint_of, list_steps
from gptlite.runs.frozen import FROZEN, read_frozen
from gptlite.runs.weights import check_shapes, fill, named_leaves, require_room

# Prefix of the model's arrays in a training state.
MODEL = "model."
# No training state is so many times as large as its model: AdamW's is three times.
STATES = 4
# Bytes that a file of a checkpoint may have besides the arrays'.
MAX_OTHER = 2**20
# The file that describes an array.
DESCRIPTION = ".zarray"

# A number of things, of any model.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Summary(msgspec.Struct, frozen=True):
    """The part of a checkpoint's record that is about its model."""

    last: dict[str, Count | Number | None]
    """The last line of metrics, which may be of an earlier step; empty before the first one."""
    parameters: Count
    """Numbers in the model, with those that are frozen."""
    position: Any
    """Where training was: a record, with the `step`."""


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


def newest_summary(run: Path) -> Summary | None:
    """What a run's newest checkpoint says, unless it is damaged."""
    step = next(iter(list_steps(run)), None)
    return None if step is None else _summary(checkpoint_of(run, step))


def best_step(run: Path) -> Evaluated | None:
    """The checkpoint of a run with the lowest validation loss; of several, the newest."""
    best = None
    for step in list_steps(run):
        summary = _summary(checkpoint_of(run, step))
        if summary is None or summary.last.get("step") != step:
            continue
        val_loss = summary.last.get("val_loss")
        if val_loss is not None and (best is None or val_loss < best.val_loss):
            best = Evaluated(step, val_loss)
    return best


def _summary(path: Path) -> Summary | None:
    try:
        check_files(path / "record", MAX_JSON)
        summary = msgspec.convert(read_fields(path), Summary)
    except (OSError, ValueError):
        return None
    is_its_own = isinstance(x := summary.position, dict) and str(x.get("step")) == path.name
    return summary if is_its_own else None


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
        stores = open_arrays(path, trained, STATES * size_of(abstract) + MAX_OTHER, MODEL)
        reads = {name: store.read() for name, store in stores.items()}
        arrays = {name.removeprefix(MODEL): read.result() for name, read in reads.items()}
    if frozen:
        arrays |= read_frozen(path.parent.parent / FROZEN, frozen)
    return fill(abstract, arrays, f"The arrays of {path}")


def open_arrays(
    path: Path, wanted: Mapping[str, Any], most: int, prefix: str = ""
) -> dict[str, Any]:
    """The arrays of a checkpoint whose names begin with `prefix`, by name, not yet read. They must
    be those of `wanted`, arrays or shapes of arrays. `most`: bytes that a file may have.

    **Raises:** `UserError` if they are not, a file is larger, a chunk is larger than its array, or
    an array is packed; what TensorStore raises (see `as_user_error`).
    """
    check_files(path, most)
    stores = _open(path, prefix)
    shapes = {
        name: jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype)
        for name, store in stores.items()
    }
    check_shapes(dict(wanted), shapes, f"The arrays of {path}")
    for name, store in stores.items():
        packed = store.spec().to_json()["metadata"]["compressor"]
        require(packed is None, f"The checkpoint {path} is damaged: {name} is packed, by {packed}.")
        chunk: Any = store.chunk_layout.read_chunk.shape or ()  # None for a single number
        require(
            all(0 < c <= max(n, 1) for c, n in zip(chunk, store.shape, strict=True)),
            f"The checkpoint {path} is damaged: {name}, {list(store.shape)}, is in chunks of "
            f"{list(chunk)}.",
        )
        # Each part is an operation of TensorStore, whether it is there or not.
        n_parts = math.prod(-(-n // c) for c, n in zip(chunk, store.shape, strict=True))
        present = sum(1 for _ in (path / "state" / key_of(name)).glob("[0-9]*"))
        require(
            n_parts <= present,
            f"The checkpoint {path} cannot be read: {name} is in {n_parts:,} parts, of which "
            f"{present:,} are there.",
        )
    return stores


def is_readable(path: Path) -> bool:
    """Whether a checkpoint's record, and what describes its arrays, can be read."""
    try:
        with as_user_error(path, "read"):
            _open(path)
        return _summary(path) is not None
    except UserError:
        return False


def check_files(folder: Path, most: int) -> None:
    """**Raises:** `UserError` if there is anything but folders and regular files of at most `most`
    bytes in `folder`, or it is none itself; `OSError` if it cannot be read."""
    # TensorStore reads whole files, of whatever size, and ends the process if they do not fit.
    for file in (folder, *folder.rglob("*")):
        status = file.lstat()
        right = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
        require(right, f"{file} is a link or no regular file.")
        require(
            status.st_size <= most,
            f"{file} is no file of a checkpoint of this run: it has {status.st_size:,} bytes, and "
            f"at most {most:,} are expected.",
        )


def _open(path: Path, prefix: str = "") -> dict[str, Any]:
    import tensorstore

    where = (path / "state").resolve().as_posix()
    require(
        "\\" not in where, f"{where} cannot be read: TensorStore takes a backslash for a slash."
    )
    # The parts of arrays have numbers as names.
    folders = {x.parent for x in (path / "state").rglob("[0-9]*") if x.is_file()}
    for folder in folders:
        file = folder / DESCRIPTION
        require(file.is_file(), f"The checkpoint {path} is damaged: there is no file {file}.")
        size = file.stat().st_size
        require(
            size <= MAX_OTHER, f"{file} has {size:,} bytes: at most {MAX_OTHER:,} are expected."
        )
    keys = {name_of(key := x.relative_to(path / "state").as_posix()): key for x in folders}
    names = [name for name in keys if name.startswith(prefix)]
    require(bool(names), f"The checkpoint {path} is damaged: it holds no arrays.")
    # A chunk that is missing would be read as zeros. (Orbax leaves none out.)
    array = {"driver": "zarr", "fill_missing_data_reads": False}
    opening = {}
    for name in names:
        place = {"driver": "file", "path": f"{where}/{keys[name]}/"}
        opening[name] = tensorstore.open(array | {"kvstore": place}, read=True)
    return {name: opened.result() for name, opened in opening.items()}


def key_of(name: str) -> str:
    """The folder of an array: on some file systems, `W` and `w` would be one."""
    return re.sub(r"[A-Z^]", lambda found: f"^{found[0].lower()}", name)


def name_of(key: str) -> str:
    """The inverse of `key_of`."""
    return re.sub(r"\^(.)", lambda found: found[1].upper(), key)


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
