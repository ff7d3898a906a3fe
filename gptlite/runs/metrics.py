"""The lines of `metrics.jsonl`, read while a run is trained or later. They may be a stranger's."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float, Int

from gptlite.config import MAX_INT32
from gptlite.files import MAX_NUMBER, open_regular

FILE = "metrics.jsonl"
# Bytes of a line.
MAX_LINE = 2**12
# Lines in a row that are none of metrics, or after the step that is wanted.
MAX_USELESS = 10_000
# Bytes that are read at once for curves.
MAX_READ = 2**22

Loss = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Points = tuple[Int[np.ndarray, " points"], Float[np.ndarray, " points"]]


class Metrics(msgspec.Struct, gc=False):
    """What a line says of a step. Losses are in nats per token."""

    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]
    train_loss: Loss | None
    """None where every update was skipped."""
    val_loss: Loss | msgspec.UnsetType = msgspec.UNSET
    """Set where the model was evaluated."""


_DECODER = msgspec.json.Decoder(Metrics)


def parsed(line: bytes) -> Metrics | None:
    """None if it is no whole line of metrics."""
    try:
        # As a string, because msgspec does not check that the fields it skips are UTF-8.
        return _DECODER.decode(line.decode()) if line.endswith(b"\n") else None
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return None


def lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """The lines of metrics up to a step, in their order. After very many useless lines the rest is
    not read: a file of zeros has no end.

    **Raises:** `OSError` if there is no such file.
    """
    last = useless = 0
    with open_regular(path) as file:
        while useless < MAX_USELESS and (line := file.readline(MAX_LINE)):
            record = parsed(line)
            useless += 1
            if record is not None and last < record.step <= step:
                last, useless = record.step, 0
                yield line


def last_step(run: Path) -> int:
    """Of the last whole line; 0 if there is none."""
    try:
        with open_regular(run / FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
            lines = file.read(MAX_LINE).splitlines(keepends=True)
    except OSError:
        return 0
    records = filter(None, map(parsed, reversed(lines)))
    return next((record.step for record in records), 0)


@dataclass(frozen=True)
class Curves:
    """A part of a run's metrics."""

    file: int
    """Changes when the file is another one: a run that is resumed may begin it anew."""
    end: int
    """Where the next part begins."""
    complete: bool
    """Whether that is the end of the file."""
    train: Points
    """Steps and losses."""
    validation: Points


def read_curves(run: Path, file: int, start: int, most: int) -> Curves:
    """The losses in `metrics.jsonl` from byte `start` of a file, or all, if there is another file
    now. Of each curve, at most `most` points are kept. What was read is remembered while the file
    stays as it is.

    **Raises:** `OSError` if there is no such file.
    """
    path = run.absolute() / FILE
    status = path.stat()
    stamp = status.st_ino, status.st_mtime_ns, status.st_size
    return _read_curves(path, stamp, file, start, most)


@lru_cache(maxsize=512)
def _read_curves(
    path: Path, stamp: tuple[int, int, int], file: int, start: int, most: int
) -> Curves:
    with open_regular(path) as opened:
        status = os.fstat(opened.fileno())
        if status.st_ino != file or status.st_size < start:
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
        status.st_ino,
        start + len(whole),
        len(content) < MAX_READ,
        thinned(*train, most),
        thinned(*validation, most),
    )


def _finite(steps: Int[np.ndarray, " lines"], losses: list[float | None]) -> Points:
    values = np.array(losses, float)  # None becomes NaN
    kept = ~np.isnan(values)
    return steps[kept], values[kept]


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
    kept = {
        int(a + i)
        for a, b in itertools.pairwise(edges)
        for i in (np.argmin(values[a:b]), np.argmax(values[a:b]))
    }
    order = sorted(kept)
    return steps[order], values[order]
