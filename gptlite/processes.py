"""Several processes that train one run together, on JAX's own distributed runtime.

Each of them executes the same program. Process 0 writes files and the terminal.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from gptlite.config import DistributedConfig, UserError

# Bytes of an error message that processes tell each other.
MESSAGE = 2000


def connect(distributed: DistributedConfig) -> None:
    """Join the other processes of a run, if there are any. To be called before JAX first computes.

    **Raises:** `UserError` if process 0 does not answer in time.
    """
    if distributed.coordinator is not None and distributed.process:
        _wait_for(distributed.coordinator, distributed.connect_seconds)
    try:
        jax.distributed.initialize(
            distributed.coordinator,
            distributed.processes,
            distributed.process,
            initialization_timeout=distributed.connect_seconds,
            heartbeat_timeout_seconds=distributed.missing_seconds,
        )
    except (ValueError, RuntimeError):
        # There is no cluster, or JAX computes already, as in a notebook.
        if distributed.coordinator is not None:
            raise


def _wait_for(address: str, seconds: float) -> None:
    """Wait until something listens at HOST:PORT. (JAX would abort the process after that time.)

    **Raises:** `UserError`.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"Process 0 of the run does not answer at {address} after {seconds:.0f} s "
                    f"({error.strerror or error}): see that it is started, with the same "
                    "--distributed.coordinator, and that this address can be reached from here."
                ) from error
            time.sleep(0.2)


def silence_others() -> None:
    """Only the first process writes to the terminal; the others, only errors."""
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the end


def is_first() -> bool:
    """Whether this process is the one that writes files and the terminal."""
    return jax.process_index() == 0


def largest(*numbers: int) -> tuple[int, ...]:
    """The largest that any process has of each of the numbers. Every process must call this."""
    if jax.process_count() == 1:
        return numbers
    found = multihost_utils.process_allgather(np.asarray(numbers, np.int32))
    return tuple(found.max(axis=0).tolist())


@contextlib.contextmanager
def shared_errors() -> Iterator[None]:
    """An `UserError` inside, in any process, is raised in all of them at the end. Inside, processes
    may not wait for each other."""
    if jax.process_count() == 1:
        yield
        return
    failed = None
    try:
        yield
    except UserError as error:
        failed = error
    for process, message in enumerate(_gathered(str(failed or ""))):
        if message:
            _end(f"{message} (process {process})")


def of_first(text: str) -> str:
    """The `text` of the first process."""
    return text if jax.process_count() == 1 else _gathered(text)[0]


def check_same(what: str, value: str) -> None:
    """**Raises:** `UserError` if `value` is not the same in all processes, which all call this."""
    if jax.process_count() == 1:
        return
    values = _gathered(value)
    for process, other in enumerate(values):
        if other != values[0]:
            _end(
                f"The processes have different {what}: process 0 {values[0]}, process {process} "
                f"{other}."
            )


def _end(message: str) -> NoReturn:
    """The end of all processes, with one message."""
    if is_first():
        raise UserError(message)
    sys.exit(2)


def _gathered(text: str) -> list[str]:
    """The `text` of each process, cut to `MESSAGE` bytes."""
    content = np.frombuffer(text.encode()[:MESSAGE], np.uint8)
    found = multihost_utils.process_allgather(np.pad(content, (0, MESSAGE - len(content))))
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in found]
