"""The lines of `metrics.jsonl`, read while a run is trained or later. They may be a stranger's."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gptlite.machine.files import open_regular
from gptlite.machine.records import Natural, Number

FILE = "metrics.jsonl"
# Bytes of a line.
MAX_LINE = 2**12
# Lines in a row that are none of metrics, or after the step that is wanted.
MAX_USELESS = 10_000


class Metrics(msgspec.Struct, gc=False):
    """A line about a step. Losses are in nats per token."""

    step: Natural
    train_loss: Number | None
    """None where every update was skipped."""
    val_loss: Number | msgspec.UnsetType = msgspec.UNSET
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
    """The step of the last whole line; 0 if there is none."""
    try:
        with open_regular(run / FILE) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
            lines = file.read(MAX_LINE).splitlines(keepends=True)
    except OSError:
        return 0
    records = filter(None, map(parsed, reversed(lines)))
    return next((record.step for record in records), 0)
