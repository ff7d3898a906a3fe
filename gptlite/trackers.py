"""Dashboards that show a run while it trains.

A tracker is given the config once, by `start(path, name, config)`, and is then called with
`(step, metrics)`: the numbers of a line of `metrics.jsonl`, and at evaluations a sample of the
model's text. All are of other packages, so whatever one of them raises never ends a run.
"""

import dataclasses
import html
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from gptlite.config import Config
from gptlite.errors import require
from gptlite.machine.processes import is_main_process
from gptlite.machine.progress import log
from gptlite.machine.records import read_record, write_record

# The project that a run is shown in, unless the environment names one.
PROJECT = "gptlite"


class Tracker(Protocol):
    """A dashboard that shows a run."""

    def __call__(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Show the metrics of a step."""
        ...

    def close(self, *, failed: bool) -> None:
        """Called at the end of training, or when it is stopped or ends with an error (`failed`)."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` in the run's folder."""

    def __init__(self, path: Path, name: str, config: Mapping[str, Any]):
        # Imported here, as below: these packages are not installed by default.
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        del name  # that of the folder
        self._text = text_pb
        # Their classes are made when they are imported, which pyright does not see.
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = EventFileWriter(str(path / "tensorboard"))
        self._is_new = True
        self._add(0, summary=text_pb("config", f"```\n{json.dumps(config, indent=2)}\n```"))

    def __call__(self, step: int, metrics: Mapping[str, float | str]) -> None:
        if self._is_new:
            # When a run is resumed, steps after its checkpoint are not shown twice.
            session = self._event.SessionLog
            self._add(step, session_log=session(status=session.START))
            self._is_new = False
        for tag, value in metrics.items():
            if isinstance(value, str):
                self._add(step, summary=self._text(tag, f"```\n{value}\n```"))
            else:
                scalar = self._summary.Summary.Value(tag=tag, simple_value=value)
                self._add(step, summary=self._summary.Summary(value=[scalar]))
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        del failed
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **what))


class WandB:
    """Weights & Biases. Offline with `WANDB_MODE=offline`, in another project with
    `WANDB_PROJECT`."""

    def __init__(self, path: Path, name: str, config: Mapping[str, Any]):
        import wandb

        self._html = wandb.Html
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=name,
            name=path.name,
            resume="allow",
            config=dict(config),
            settings=wandb.Settings(console="off"),  # it would take the progress bar apart
        )
        # W&B's own steps only rise, and a run that is resumed may repeat some.
        self._run.define_metric("*", step_metric="step")

    def __call__(self, step: int, metrics: Mapping[str, float | str]) -> None:
        shown = {
            tag: self._html(f"<pre>{html.escape(value)}</pre>") if isinstance(value, str) else value
            for tag, value in metrics.items()
        }
        self._run.log({**shown, "step": step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """Trackio, in a database of this machine, or where its own variables say."""

    def __init__(self, path: Path, name: str, config: Mapping[str, Any]):
        import trackio

        del path
        self._finish = trackio.finish
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def __call__(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        del failed
        self._finish()


# By their names in `config.TRACKERS`, which are those of their packages.
START: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_installed(names: Sequence[str]) -> None:
    """**Raises:** `UserError` if the package of a tracker is not installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        require(
            spec is not None and spec.origin is not None,  # more than a folder of that name
            f'--log.to {name} needs a package: pip install "gptlite-jax[{name}]".',
        )


class Trackers:
    """All trackers of a run, in its first process. A context manager, whose exit closes them.

    One that raises an error is named in a warning, and not called again.
    """

    def __init__(self, names: Sequence[str], path: Path, config: Config):
        """`path`: of the run's folder, which is there."""
        self._active: dict[str, Tracker] = {}
        if not names or not is_main_process():
            return
        fields = dataclasses.asdict(config)
        for name in names:
            self._try(name, lambda name=name: START[name](path, _run_name(path), fields), self._add)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None
        for name, tracker in list(self._active.items()):
            self._try(name, lambda tracker=tracker: tracker.close(failed=failed))
        self._active = {}

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a step. Values that are missing (None) are left out."""
        known = {tag: value for tag, value in metrics.items() if value is not None}
        known.pop("step", None)
        for name, tracker in list(self._active.items()):
            self._try(name, lambda tracker=tracker: tracker(step, known))

    def _add(self, name: str, tracker: Tracker) -> None:
        self._active[name] = tracker

    def _try(
        self, name: str, call: Callable[[], Any], then: Callable[[str, Any], None] | None = None
    ) -> None:
        try:
            result = call()
            if then is not None:
                then(name, result)
        except Exception as error:  # of packages that are not ours
            self._active.pop(name, None)
            reason = (str(error).strip() or repr(error)).splitlines()[0][:300]
            log(f"{name} does not show this run from here, and training goes on: {reason}")


def _run_name(path: Path) -> str:
    """A name by which a run is known outside of its folder: that of the folder, and what
    distinguishes it from an earlier one there. Kept in `tracked.json`, for when it is resumed."""
    file = path / "tracked.json"
    try:
        record = read_record(file, _Tracked)
    except (OSError, ValueError):
        record = _Tracked(suffix=secrets.token_hex(4))
        write_record(file, record)
    return f"{path.name}-{record.suffix}"


class _Tracked(msgspec.Struct):
    suffix: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{8}\\Z")]
