"""Checkpoints, which Orbax writes while training goes on.

    checkpoints/STEP/state     every array of the training state
    checkpoints/STEP/record    what is not an array, as JSON, with a digest of everything
    checkpoints/STEP/metrics   the validation loss, where there was an evaluation

Orbax gives a checkpoint its name only when it is complete, deletes what is not to be kept, and
removes what a killed process left.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gptlite.config import UserError
from gptlite.files import read_json
from gptlite.runs.weights import check_shapes, fill, named_arrays, named_leaves
from gptlite.training.fit import Position
from gptlite.training.step import TrainState


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds besides arrays."""

    position: Position
    seconds: float
    """Since the run folder was opened, in all processes that trained the run."""
    best: dict[str, Any] | None
    """`step` and `val_loss` of the best evaluation."""
    last: dict[str, Any]
    """The last line of metrics."""
    corpus_sha256: str
    devices: str
    """How many, of which kind, and the mesh where parameters are spread."""


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ):
        """**Arguments:**

        - `keep`: how many of the last ones to keep. The best as seen from each of them are kept,
          too. Without `keep`, checkpoints are read and nothing in the folder is changed.
        - `before_commit`: called on Orbax's thread when a checkpoint is written, before it gets its
          name.
        """
        # Here, because it takes a second to import, which a first step need not wait for.
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        _quieten()
        self._ocp, self._folder = ocp, folder

        def val_loss(metrics):
            return metrics["val_loss"]

        policy = None
        if keep is not None:
            best = policies.BestN(
                get_metric_fn=val_loss,
                reverse=True,  # the last ones are kept, and less is better
                n=keep,
                keep_checkpoints_without_metrics=False,
            )
            policy = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        options = ocp.CheckpointManagerOptions(
            best_fn=val_loss,  # without it, metrics are not written
            best_mode="min",
            lightweight_initialize=keep is None,  # metrics, which may be damaged, are not read
            create=keep is not None,
            cleanup_tmp_directories=keep is not None,
            preservation_policy=policy,
            async_options=ocp.AsyncOptions(post_finalization_callback=before_commit),
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
        with _as_user_error(folder, "opened"):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_handlers=handlers
            )

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(self, state: TrainState, record: Record, val_loss: float | None) -> None:
        """Start to write `state` and `record` as the checkpoint of `record.position.step`.

        `state` may change as soon as this returns.

        **Raises:** `UserError` if a number of `state` is not finite, or this checkpoint or the one
        before could not be written.
        """
        ocp, step = self._ocp, record.position.step
        path = self._folder / str(step)
        arrays = named_arrays(state)
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise UserError(f"The checkpoint {path} is not written: {name} is not finite.")
        fields = dataclasses.asdict(record)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(named_leaves(state)),
            record=ocp.args.JsonSave({**fields, "digest": _digest(arrays, fields)}),
        )
        metrics = None if val_loss is None else {"val_loss": val_loss}
        self.wait()
        with _as_user_error(path, "written"):
            if not self._manager.save(step, args=items, metrics=metrics):
                raise ValueError(f"there is one of step {self._manager.latest_step()}")

    def restore(self, step: int, skeleton: TrainState) -> tuple[TrainState, Record]:
        """The state and the record of `step`. Arrays are spread as those of `skeleton` are.

        **Raises:** `UserError` if the checkpoint cannot be read or is damaged, or its arrays have
        not the names, shapes and dtypes of `skeleton`. That is found out before any array is read.
        """
        ocp, path = self._ocp, self._folder / str(step)
        wanted = named_leaves(skeleton)
        with _as_user_error(path, "read"):
            held = self._manager.item_metadata(step)["state"].tree
        check_shapes(skeleton, dict(held), f"The arrays of {path}")
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(
                {
                    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                    for name, x in wanted.items()
                }
            ),
            record=ocp.args.JsonRestore(),
        )
        val_loss = self.val_loss(step)
        with _as_user_error(path, "read"):
            found = self._manager.restore(step, args=items)
            fields: dict[str, Any] = dict(found["record"])
            digest = fields.pop("digest")
            arrays = dict(found["state"])
            if digest != _digest({name: np.asarray(x) for name, x in arrays.items()}, fields):
                raise UserError(f"The checkpoint {path} is damaged: its digest does not match.")
            record = Record(position=Position(**fields.pop("position")), **fields)
        evaluated = record.last.get("val_loss") if record.last.get("step") == step else None
        if record.position.step != step or evaluated != val_loss:
            raise UserError(f"The checkpoint {path} is damaged: its parts are of different steps.")
        return fill(skeleton, arrays, f"The arrays of {path}"), record

    def val_loss(self, step: int) -> float | None:
        """That in the metrics of `step`; None if there are none.

        **Raises:** `UserError` if they are damaged. (Orbax reads those of all checkpoints before it
        writes one.)"""
        path = self._folder / str(step)
        with _as_user_error(path, "read"):
            file = path / "metrics" / "metrics"
            return float(read_json(file)["val_loss"]) if file.exists() else None

    def wait(self) -> None:
        """Until what has been started is written.

        **Raises:** `UserError` if it could not be.
        """
        with _as_user_error(self._folder, "written"):
            self._manager.wait_until_finished()

    def check(self) -> None:
        """**Raises:** `UserError` if what has been started could not be written."""
        with _as_user_error(self._folder, "written"):
            self._manager.check_for_errors()

    def close(self) -> None:
        """Ends Orbax's threads. For what went wrong there, ask `wait` first."""
        with contextlib.suppress(Exception):
            self._manager.close()


def list_steps(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint in `folder`, the newest first, without Orbax."""
    names = (path.name for path in folder.glob("*"))
    return sorted((int(n) for n in names if n.isascii() and n.isdecimal()), reverse=True)


def _digest(arrays: dict[str, np.ndarray], fields: dict[str, Any]) -> str:
    """A checksum of all that a checkpoint holds."""
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        checksum.update(f"{name} {array.dtype} {array.shape}".encode())
        checksum.update(array.reshape(-1).view(np.uint8).data)
    return checksum.hexdigest()


@functools.cache
def _quieten() -> None:
    """Have Orbax say nothing on its own, in this whole process. It logs every phase of every save,
    and all errors, which it raises too. Of several operations that fail together it raises one's
    error and closes its event loop; what the others raise is found when they are collected."""
    from absl import logging as absl_logging

    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def leave_out_orbaxs(unraisable: Any) -> None:
        said = str(unraisable.exc_value)
        if not any(words in said for words in ("Event loop is closed", "TensorStore details")):
            before(unraisable)

    sys.unraisablehook = leave_out_orbaxs


@contextlib.contextmanager
def _as_user_error(path: Path, done: str) -> Iterator[None]:
    """Orbax and TensorStore raise a dozen unrelated kinds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif code:
            reason = os.strerror(int(code[1]))
        else:
            # TensorStore's are a page long; what happened stands behind the last name of a file.
            reason = re.split(r" \[tensorstore_spec|\. See full|\n", str(error).strip())[0]
            reason = reason.rpartition('": ')[2].rstrip(".")
        raise UserError(f"The checkpoint {path} cannot be {done}: {reason}.") from error
