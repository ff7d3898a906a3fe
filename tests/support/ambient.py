"""Runs the scripts one after the other in this process, as the environment has it: `ambient.py
FOLDER [CHANGE]`. Prints a line of JSON for each: what was run, and its exit code. The folder has
text.txt, and a run named one. CHANGE is done to the process before: see `CHANGES`."""

import contextlib
import errno
import http.client
import json
import os
import runpy
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = """
    --data.corpus text.txt --model.n-layers 1 --model.n-heads 2 --model.d-model 16
    --model.context-length 16 --training.batch-size 4 --training.log-every 2 --training.steps 2
    --training.eval-every 2 --training.sample-tokens 4 --optimizer.name adamw
""".split()  # noqa: SIM905 - as it is typed
COMMANDS = {
    "train": ["train.py", *TINY, "--run", "new", "--overwrite"],
    "sample": ["sample.py", "--run", "one", "--prompt", "→", "--max-new-tokens", "8"],
    "compare": ["compare.py", *TINY, "--seeds", "2", "--vary", "model.norm=layer"],
}


def no_home() -> None:
    """A container with another user: no HOME, and no entry in the password file."""
    import pwd

    def absent(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    pwd.getpwuid = absent  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.pop("HOME", None)


def no_locks() -> None:
    """A network folder: no locks, and folders cannot be flushed."""
    import fcntl

    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    fcntl.flock = flock  # pyright: ignore[reportAttributeAccessIssue]
    os.fsync = fsync


CHANGES: dict[str, Callable[[], None]] = {"no home": no_home, "no locks": no_locks}


def run(argv: list[str]) -> int:
    sys.argv = argv
    try:
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def load() -> int:
    import gptlite as gl

    assert gl.load("one").generate("a", max_new_tokens=4)
    return 0


def serve() -> int:
    """Serve the run, ask for the page and for a text, and end the server. The exit code."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[int] = []
    client = threading.Thread(target=ask, args=(port, answers))
    client.start()
    code = run(["serve.py", "--run", "one", "--port", str(port)])
    client.join()
    return code if answers == [200, 200] else 1


def ask(port: int, answers: list[int]) -> None:
    """Put the status of two answers into `answers`, and end this process' server."""
    try:
        for _ in range(600):  # until it answers
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        text = json.dumps({"model": "one", "prompt": "→", "max_tokens": 4, "logprobs": 2})
        for method, path, body in (("GET", "/", None), ("POST", "/v1/completions", text)):
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
            with contextlib.closing(server):
                server.request(method, path, body, {"Content-Type": "application/json"})
                answers.append(server.getresponse().status)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    folder, *change = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    os.chdir(folder)
    for name in change:
        CHANGES[name]()
    found = {"load": load()}  # first: before a script sets anything up
    found |= {name: run(argv) for name, argv in COMMANDS.items()} | {"serve": serve()}
    with contextlib.suppress(OSError):
        print(json.dumps(found), file=sys.__stderr__)


if __name__ == "__main__":
    main()
