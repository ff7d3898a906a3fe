"""Documents of a Hugging Face dataset, one after the other: from the hub, or from files in its
formats, here or at an address. Another process reads them, in bounded time and memory: a few bytes
of a stranger's file may stand for any number."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptlite.errors import UserError, require
from gptlite.machine.bounded import BoundedProcess
from gptlite.machine.progress import log
from gptlite.text.corpus import Corpus

# What an answer may take: of the processor, of the clock (a network may be slow), and of memory.
SECONDS, WAIT, MEMORY = 30, 600, 3 * 2**29


def open_dataset(name: str) -> Corpus:
    """The dataset that `hf:NAME[:CONFIG][:SPLIT][:COLUMN]` names. NAME is one on the hub, or a
    folder, a file or an address with JSON lines, Parquet, CSV or text.

    **Raises:** `UserError` if there is no such dataset, or it has no such part, or it cannot be
    read in bounded time and memory.
    """
    broken = (
        f"The dataset {name} cannot be read: a part of it took more than {SECONDS} s of the "
        f"processor, {WAIT} s or {MEMORY // 2**20:,} MiB, or ended the process that reads it. Its "
        "files are damaged, or have lines, rows or patterns of an unusual size."
    )
    worker = Path(__file__).with_name("dataset_worker.py")
    numbers = itertools.count()

    def begin() -> BoundedProcess:
        return BoundedProcess(worker, (SECONDS, MEMORY), WAIT, broken)

    process = begin()

    def ask(**question: Any) -> dict[str, Any]:
        answer = process.ask(question)
        if answer.get("error") is not None:
            raise UserError(answer["error"])
        return answer

    opened = ask(open=name)
    for note in opened["notes"]:
        log(note)
    place: Any = None

    def read(state: Any) -> Iterator[str]:
        nonlocal place, process
        number, end = next(numbers), False
        if process.may_begin_again:
            process = begin()
            again = ask(open=name)
            changed = again["version"] != opened["version"]
            require(not changed, f"The dataset {name} was changed since it was opened.")
        ask(read=number, place=state or {"state": None, "skip": 0})
        try:
            while not end:
                part = ask(next=number)
                before, end = part["place"], part["end"]
                for used, text in enumerate(part["texts"], 1):
                    place = before and {**before, "skip": before["skip"] + used}
                    yield text
        finally:
            with contextlib.suppress(UserError):
                ask(close=number)

    return Corpus(name, opened["version"], read, lambda: place, is_text=opened["is_text"])
