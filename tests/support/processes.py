"""`train.py` as several processes of one run, on this machine."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A run that any of the meshes of 4 processes can share.
OPTIONS = (
    "--optimizer.name adamw --optimizer.learning-rate 0.01 --model.n-layers 1 --model.n-heads 2 "
    "--model.d-model 16 --model.context-length 16 --model.dropout 0.1 --training.batch-size 8 "
    "--training.compute-dtype float32 --training.log-every 1 --training.eval-every 2 "
    "--training.sample-tokens 2"
)
SETTINGS = OPTIONS.split()


class Processes:
    """`train.py` with each of `commands`, as the processes 0, 1, ... of a run in `folder`."""

    def __init__(self, folder: Path, *commands: list[str], program: list[str] | None = None):
        program = [str(ROOT / "train.py")] if program is None else program
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._logs = [folder / f"process{i}.log" for i in range(len(commands))]
        self.all: list[subprocess.Popen[bytes]] = []
        for i, (command, path) in enumerate(zip(commands, self._logs, strict=True)):
            words = ["--distributed.coordinator", address]
            words += ["--distributed.processes", str(len(commands)), "--distributed.process"]
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, *program, *command, *words, str(i)],
                    cwd=folder,
                    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.all.append(process)

    def said(self, process: int) -> str:
        """The output so far, without lines of C++ libraries."""
        text = self._logs[process].read_text(encoding="utf-8", errors="replace")
        return re.sub(r"(?m)^(\[Gloo\]|[WEF]\d{4} ).*\n", "", text)

    def wait_for(self, words: str, process: int = 0, seconds: float = 120) -> None:
        """**Raises:** `TimeoutError` if the process does not say `words` in time."""
        end = time.monotonic() + seconds
        while words not in self.said(process):
            if time.monotonic() > end or self.all[process].poll() is not None:
                for other in self.all:
                    other.kill()
                raise TimeoutError(f"No {words!r} in:\n{self.said(process)}")
            time.sleep(0.05)

    def codes(self, seconds: float = 200) -> list[int]:
        """The exit codes, when all have ended. None is left running."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, end - time.monotonic())) for process in self.all]
        finally:
            for process in self.all:
                process.kill()
