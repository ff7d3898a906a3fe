"""An engine of a tiny model, and servers in threads."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from conftest import TINY, VOCAB, tiny_model

from gptlite.serving.app import Served, make_app
from gptlite.serving.engine import Engine
from gptlite.serving.server import open_socket, server_config
from gptlite.text.tokenizer import CharTokenizer

NAME = "tiny"
TOKENIZER = CharTokenizer("abcdefghijklm")
assert TOKENIZER.vocab_size == VOCAB
LOCAL = frozenset({"127.0.0.1"})


@dataclasses.dataclass(frozen=True)
class Address:
    """Of a server."""

    port: int
    engine: Engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_until_idle(self) -> None:
        """Until no text is read, generated or waiting."""
        end = time.monotonic() + 60
        while self.engine.n_active or self.engine.n_waiting:
            assert time.monotonic() < end, "texts are left"
            time.sleep(0.005)


@contextlib.contextmanager
def running(served: Served, **options: Any) -> Iterator[Address]:
    """A server in a thread, until the end of the block."""
    listening = open_socket("127.0.0.1", 0)
    app = make_app(served, **({"hosts": LOCAL} | options))
    server = uvicorn.Server(server_config(app))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Address(listening.getsockname()[1], served.engine)
    finally:
        server.should_exit = True
        thread.join()


def serve_tiny(engine: Engine, **changes: Any) -> Served:
    parts = {"name": NAME, "created": 0, "tokenizer": TOKENIZER, "chat": None, "engine": engine}
    return Served(**(parts | {"context_length": TINY.context_length} | changes))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Of `tiny_model()`."""
    made = Engine(tiny_model(), max_rows=8, max_waiting=100)
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[Address]:
    """A server of `tiny_model()`."""
    with running(serve_tiny(engine)) as found:
        yield found


@pytest.fixture(name="start_server")
def fixture_start_server() -> Iterator[Callable[..., Address]]:
    """Starts more servers, each with an engine of its own, or with the one given."""
    with contextlib.ExitStack() as stack:

        def start(engine: Engine | None = None, /, *, chat: Any = None, **options: Any) -> Address:
            rows = {name: options.pop(name, 8) for name in ("max_rows", "max_waiting")}
            if engine is None:
                engine = Engine(options.pop("model", None) or tiny_model(), **rows)
                stack.callback(engine.close)
            changes = {k: options.pop(k) for k in ("tokenizer",) if k in options}
            return stack.enter_context(running(serve_tiny(engine, chat=chat, **changes), **options))

        yield start
