"""Processes that read datasets, begun quickly: forked from one that has read a dataset. A new one
would import the library, for two seconds."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from gptlite.hugging_face import dataset_worker

# Some modules are imported when the first dataset is read.
with tempfile.NamedTemporaryFile(suffix=".txt") as file:
    dataset_worker.Dataset(file.name)

CONTEXT = multiprocessing.get_context("forkserver")


class Forked:
    """What `BoundedProcess` needs of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], **pipes: int):
        *_, script, seconds, memory = command
        assert Path(script).stem == "dataset_worker"
        # It runs until the tests end.
        CONTEXT.set_forkserver_preload([__name__])
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            forkserver.ensure_running()
        question, asked = CONTEXT.Pipe(duplex=False)
        told, answer = CONTEXT.Pipe(duplex=False)
        given = (question, answer, os.getcwd(), dict(os.environ), int(seconds), int(memory))
        self._process = CONTEXT.Process(target=_answer, args=given, daemon=True)
        self._process.start()
        question.close()
        answer.close()
        self.stdin = os.fdopen(os.dup(asked.fileno()), "wb")
        self.stdout = os.fdopen(os.dup(told.fileno()), "rb")
        asked.close()
        told.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _answer(
    question: Connection,
    answer: Connection,
    folder: str,
    environment: dict[str, str],
    seconds: int,
    memory: int,
) -> None:
    """What a new process would do."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(question.fileno(), 0)
    os.dup2(answer.fileno(), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    question.close()
    answer.close()
    sys.stdin = os.fdopen(0)  # multiprocessing has closed the one that there was
    dataset_worker.main(seconds, memory)


# In the place of the module `subprocess`.
FORKED = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
