"""How a process works for a `BoundedProcess`."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer_lines(answer: Callable[[Any], Any], seconds: int, memory: int) -> None:
    """Answer each line of JSON with `answer(question)`, until there are no more. The process ends
    if an answer takes more than so many `seconds` of the processor, or all of them together more
    than `memory` bytes, where the system can bound them."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when this ends
    _bound_memory(memory)
    for line in sys.stdin.buffer:
        allow(seconds)
        said = json.dumps(answer(json.loads(line)), ensure_ascii=False)
        answers.write(said.encode("utf-8", errors="surrogatepass") + b"\n")
        answers.flush()


def _bound_memory(memory: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow(seconds: int) -> None:
    """Let this process take so many seconds of the processor from now on."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, most))
