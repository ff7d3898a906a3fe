"""Servers of a tiny model, in threads."""

import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from conftest import TINY, VOCAB, tiny_model

from gptlite.models.gpt import GPT
from gptlite.serving.app import make_app
from gptlite.serving.chat import ChatTemplate
from gptlite.serving.engine import Engine
from gptlite.serving.models import Models, Served
from gptlite.serving.server import open_socket, server_config
from gptlite.text.tokenizer import CharTokenizer, Tokenizer

NAME = "tiny"
TOKENIZER = CharTokenizer("abcdefghijklm")
assert TOKENIZER.vocab_size == VOCAB


def served_model() -> GPT:
    """What is served if nothing else is given."""
    return tiny_model(n_layers=2)


@dataclasses.dataclass(frozen=True)
class Address:
    """Of a server."""

    port: int
    engine: Engine
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def wait_until_idle(self) -> None:
        """Until no text is read, generated or waiting."""
        end = time.monotonic() + 60
        while self.engine.n_active or self.engine.n_waiting:
            assert time.monotonic() < end, "texts are left"
            time.sleep(0.005)


def post(
    address: Address,
    body: bytes | str | None,
    path: str = "/v1/completions",
    method: str = "POST",
    **headers: str,
) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, JSON and headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)
    given = {"Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if content else None, answer.headers


@contextlib.contextmanager
def serving(
    model: GPT | None = None,
    *,
    max_rows: int = 8,
    max_waiting: int = 100,
    tokenizer: Tokenizer = TOKENIZER,
    context_length: int = TINY.context_length,
    chat: ChatTemplate | str = "The model has no chat template.",
    **options: Any,
) -> Iterator[Address]:
    """A server in a thread, until the end of the block. `options`: of `make_app`."""
    model = model or served_model()
    engine = Engine(model, max_rows=max_rows, max_waiting=max_waiting)
    served = Served(NAME, 0, tokenizer, context_length, 4, chat, model, engine)
    models = Models(served)
    given: dict[str, Any] = {"hosts": frozenset({"127.0.0.1"})}
    app = make_app(models, **(given | options))
    server = uvicorn.Server(server_config(app))
    listening = open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield Address(listening.getsockname()[1], engine, server)
    finally:
        server.should_exit = True
        thread.join()
        models.close()
