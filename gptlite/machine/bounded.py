"""A process that does for us what a stranger's file may make endless."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlite.errors import UserError
from gptlite.machine.folders import ROOT

# The packages are found where they are here, but none in the working folder, which may be a
# stranger's.
_BEGIN = """
import json, runpy, sys
_, paths, *sys.argv = sys.argv
sys.path[:] = json.loads(paths)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class BoundedProcess:
    """Runs a script that answers each line of JSON with another one. It bounds what it takes
    itself: see `limits.py`. One that ends, or is late, is not asked again."""

    def __init__(self, script: Path, words: Sequence[object], seconds: float, broken: str):
        """`seconds`: of an answer, at most. `broken`: the message where there is none."""
        self._seconds, self._broken = seconds, broken
        self._lock, self._is_broken, self._is_interrupted = threading.Lock(), False, False
        away = {"", os.getcwd()} - {str(ROOT)}
        # Python takes no notice of entries that are no strings.
        paths = [*(x for x in sys.path if isinstance(x, str) and x not in away), str(ROOT)]
        utf8 = ["-X", "utf8"] if sys.flags.utf8_mode else []  # `-I` ignores PYTHONUTF8
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                *utf8,
                "-c",
                _BEGIN,
                json.dumps(paths),
                str(script),
                *map(str, words),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, self._process)

    @property
    def may_begin_again(self) -> bool:
        """Whether it ended because it was not asked for long, or an answer was not waited for."""
        alarm = getattr(signal, "SIGALRM", None)  # Windows has none
        return self._is_interrupted or (alarm is not None and self._process.poll() == -alarm)

    def ask(self, question: Any) -> Any:
        """The answer.

        **Raises:** `UserError` if there is none, or was none before.
        """
        with self._lock:
            if not self._is_broken:
                timer = threading.Timer(self._seconds, self._process.kill)
                timer.start()
                try:
                    assert self._process.stdin is not None
                    assert self._process.stdout is not None
                    self._process.stdin.write(json.dumps(question).encode() + b"\n")
                    self._process.stdin.flush()
                    line = self._process.stdout.readline()
                    return json.loads(line.decode("utf-8", errors="surrogatepass"))
                except (OSError, ValueError):
                    _end(self._process)
                    self._is_broken = True
                except BaseException:  # as of Ctrl-C: the answer would be taken for another one
                    _end(self._process)
                    self._is_broken = self._is_interrupted = True
                    raise
                finally:
                    timer.cancel()
            raise UserError(self._broken)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written
                pipe.close()
    process.wait()
