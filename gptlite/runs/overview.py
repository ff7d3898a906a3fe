"""What runs there are, and how far they are. Training that goes on is not disturbed."""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
from jaxtyping import Float, Int

from gptlite.config import MAX_INT32, Config, UserError
from gptlite.files import is_locked, is_plausible, open_regular, read_json
from gptlite.presets import PRESETS
from gptlite.runs.saved_config import load_config
from gptlite.runs.weights import read_evaluated

State = Literal["running", "stopped", "done", "diverged"]
# Bytes of `metrics.jsonl` that are read at once.
MAX_READ = 2**22
MAX_LINE = 2**12


@dataclass(frozen=True)
class Overview:
    """A run in a list of runs. What cannot be read is None."""

    name: str
    began: float
    """In seconds since 1970, as `changed`."""
    changed: float
    state: State
    preset: str | None
    """The one whose model it has."""
    parameters: int | None
    step: int
    """Of the last line of its metrics."""
    steps: int
    best_loss: float | None
    """The best validation loss so far, in nats per token."""


def list_runs(folder: Path) -> list[Overview]:
    """The runs in a folder, the newest first."""
    # Hidden folders are what `--overwrite` leaves if it is killed.
    found = (_overview(path.parent) for path in folder.glob("[!.]*/config.json"))
    return sorted((run for run in found if run is not None), key=lambda run: -run.began)


def _overview(path: Path) -> Overview | None:
    files = ("config.json", "metrics.jsonl", "best.safetensors", "last.safetensors", "result.json")
    stamps = tuple(_stamp(path / name) for name in files)
    found = _read(path, stamps)
    if found is None:
        return None
    real = path.resolve()  # as the run's own lock
    running = is_locked(real.with_name(f".{real.name}.lock"))
    return dataclasses.replace(found, state="running") if running else found


def _stamp(path: Path) -> tuple[float, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0
    return status.st_mtime, status.st_size


@lru_cache(maxsize=4096)
def _read(path: Path, stamps: tuple[tuple[float, int], ...]) -> Overview | None:
    """What the files say, which have these stamps."""
    try:
        config = load_config(path / "config.json")
    except UserError:
        return None
    result = _json(path / "result.json")
    step = _last_step(path / "metrics.jsonl")
    best = read_evaluated(path / "best.safetensors")
    state: State = "stopped"
    if result is not None and step >= config.training.steps:
        state = "done"
    elif (path / "nonfinite.json").exists():
        state = "diverged"
    return Overview(
        name=path.name,
        began=stamps[0][0],
        changed=max(stamp for stamp, _ in stamps),
        state=state,
        preset=_preset(config),
        parameters=_parameters(path),
        step=step,
        steps=config.training.steps,
        best_loss=None if best is None else best.val_loss,
    )


def _preset(config: Config) -> str | None:
    return next((name for name, (_, c) in PRESETS.items() if c.model == config.model), None)


def _parameters(path: Path) -> int | None:
    """The numbers in the weights."""
    try:
        total = 0
        for file in ("last", "frozen"):
            if (path / f"{file}.safetensors").exists():
                with safetensors.safe_open(path / f"{file}.safetensors", "numpy") as weights:
                    names = weights.keys()
                    shapes = [weights.get_slice(name).get_shape() for name in names]
                total += sum(int(np.prod(shape, dtype=object)) for shape in shapes)
    except (OSError, safetensors.SafetensorError):
        return None
    return total or None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _last_step(path: Path) -> int:
    """Of the last whole line; 0 if there is none."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LINE))
            lines = file.read(MAX_LINE).splitlines(keepends=True)
    except OSError:
        return 0
    return next((line["step"] for line in _records(reversed(lines))), 0)


def _records(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """What the whole lines say of a step."""
    for line in lines:
        if not line.endswith(b"\n"):
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and 0 <= step <= MAX_INT32:
            yield record


@dataclass(frozen=True)
class Curves:
    """A part of a run's metrics."""

    file: int
    """Changes when the file is another one: a run that is resumed may begin it anew."""
    end: int
    """Where the next part begins."""
    complete: bool
    """Whether that is the end of the file."""
    train: tuple[Int[np.ndarray, " points"], Float[np.ndarray, " points"]]
    """Steps and losses."""
    validation: tuple[Int[np.ndarray, " points"], Float[np.ndarray, " points"]]


def read_curves(run: Path, file: int, start: int, most: int) -> Curves:
    """The losses in `metrics.jsonl` from byte `start` of a file, or all, if there is another file
    now. Of more than `most` points, the highest and the lowest of each stretch are kept.

    **Raises:** `OSError` if there is no such file.
    """
    with open_regular(run / "metrics.jsonl") as opened:
        status = os.fstat(opened.fileno())
        if status.st_ino != file or status.st_size < start:
            start = 0
        opened.seek(start)
        content = opened.read(MAX_READ)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole and len(content) == MAX_READ:  # no line of metrics
        whole = content
    records = list(_records(whole.splitlines(keepends=True)))
    end = start + len(whole)
    return Curves(
        status.st_ino,
        end,
        len(content) < MAX_READ,
        thinned(*_points(records, "train_loss"), most),
        thinned(*_points(records, "val_loss"), most),
    )


def _points(
    records: list[dict[str, Any]], name: str
) -> tuple[Int[np.ndarray, " points"], Float[np.ndarray, " points"]]:
    found = [(r["step"], r[name]) for r in records if is_plausible(r.get(name))]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.asarray(steps, np.int64), np.asarray(values, np.float64)


def thinned(
    steps: Int[np.ndarray, " points"], values: Float[np.ndarray, " points"], most: int
) -> tuple[Int[np.ndarray, " fewer"], Float[np.ndarray, " fewer"]]:
    """At most `most` points: the highest and the lowest of each stretch, in their order."""
    count = len(steps)
    if count <= most:
        return steps, values
    edges = np.linspace(0, count, most // 2 + 1).astype(int)
    kept = {
        int(a + i)
        for a, b in itertools.pairwise(edges)
        for i in (np.argmin(values[a:b]), np.argmax(values[a:b]))
    }
    order = sorted(kept)
    return steps[order], values[order]
