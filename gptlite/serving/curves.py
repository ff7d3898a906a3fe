"""The curves of `metrics.jsonl`, part by part, while a run is trained or later."""

import itertools
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gptlite.machine.files import open_regular
from gptlite.runs.metrics import FILE, parsed

# Bytes that are read at once for curves.
MAX_READ = 2**22


Points = tuple[Int[np.ndarray, " points"], Float[np.ndarray, " points"]]


@dataclass(frozen=True)
class Curves:
    """A part of a run's metrics."""

    file: str
    """Changes when the file is another one: a run that is resumed may begin it anew."""
    end: int
    """Where the next part begins."""
    complete: bool
    """Whether that is the end of the file."""
    train: Points
    """Steps and losses."""
    validation: Points


def read_curves(run: Path, file: str, start: int, most: int) -> Curves:
    """The losses in `metrics.jsonl` from byte `start` of a file, or all, if there is another file
    now. At most `most` points of each curve are kept. The points are remembered while the file
    stays as it is.

    **Raises:** `OSError` if there is no such file.
    """
    path = run.absolute() / FILE
    status = path.stat()
    stamp = status.st_ino, status.st_mtime_ns, status.st_size
    return _read_curves(path, stamp, file, start, most)


@lru_cache(maxsize=512)
def _read_curves(
    path: Path, stamp: tuple[int, int, int], file: str, start: int, most: int
) -> Curves:
    with open_regular(path) as opened:
        status = os.fstat(opened.fileno())
        if str(status.st_ino) != file or status.st_size < start:
            start = 0
        opened.seek(start)
        content = opened.read(MAX_READ)
    whole = content[: content.rfind(b"\n") + 1]
    if not whole and len(content) == MAX_READ:  # no line of metrics
        whole = content
    records = list(filter(None, map(parsed, whole.splitlines(keepends=True))))
    # Not as pairs: a million of them would keep the garbage collector busy.
    steps = np.array([record.step for record in records], np.int64)
    train = _finite(steps, [record.train_loss for record in records])
    validation = _finite(
        steps,
        [None if record.val_loss is msgspec.UNSET else record.val_loss for record in records],
    )
    return Curves(
        str(status.st_ino),  # some have more digits than numbers in a browser
        start + len(whole),
        len(content) < MAX_READ,
        thinned(*train, most),
        thinned(*validation, most),
    )


def _finite(steps: Int[np.ndarray, " lines"], losses: list[float | None]) -> Points:
    values = np.array(losses, float)  # None becomes NaN
    is_number = ~np.isnan(values)
    return steps[is_number], values[is_number]


def thinned(
    steps: Int[np.ndarray, " points"], values: Float[np.ndarray, " points"], most: int
) -> Points:
    """At most `most` points, in their order: the highest and the lowest of each stretch. Half of
    the stretches are equally long; the others grow, for a logarithmic axis."""
    count = len(steps)
    if count <= most:
        return steps, values
    stretches = most // 4
    even, growing = np.linspace(0, count, stretches + 1), np.geomspace(1, count, stretches)
    edges = np.unique(np.concatenate([even, growing]).astype(int))
    places = {
        int(a + i)
        for a, b in itertools.pairwise(edges)
        for i in (np.argmin(values[a:b]), np.argmax(values[a:b]))
    }
    order = sorted(places)
    return steps[order], values[order]
