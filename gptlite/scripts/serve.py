"""Serve a trained model, with a page for browsers and OpenAI's API: `python serve.py`."""

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from gptlite.cli import ServeArguments, parse_serve, run_script
from gptlite.errors import UserError, require
from gptlite.machine.progress import log


def main() -> None:
    run_script(serve, parse_serve)


def serve(arguments: ServeArguments, environment: Mapping[str, str] = os.environ) -> None:
    # Imported here, because --help should not wait for JAX.
    try:
        from gptlite.serving.app import make_app
        from gptlite.serving.models import Models, serve_run
        from gptlite.serving.server import is_loopback, open_socket, run_server
    except ImportError as error:
        raise UserError(f'{error}. The server needs: pip install "gptlite-jax[serve]"') from error
    from gptlite.machine.runtime import set_up_jax
    from gptlite.runs.load import load

    api_key = arguments.api_key or environment.get("GPTLITE_API_KEY") or None
    is_sendable = api_key is None or (api_key.isascii() and api_key.isprintable())
    require(
        is_sendable and (api_key is None or api_key == api_key.strip()),
        "The API key must be printable ASCII characters, without spaces around them, as it is sent "
        "in a header.",
    )
    local = is_loopback(arguments.host)
    require(
        local or api_key is not None or arguments.without_key,
        f"Others reach this server at {arguments.host}: give --api-key, or --without-key if "
        "everyone may use it.",
    )
    listening = open_socket(arguments.host, arguments.port)  # before the model, which takes time
    set_up_jax()
    run = load(arguments.run, arguments.weights, custom=arguments.custom)
    # The folder of a model from the hub has no name for people.
    asked = arguments.run or ""
    path = Path(asked.removeprefix("hf:")) if asked.startswith("hf:") else run.path
    name = path.resolve().name
    served = serve_run(run, name, max_rows=arguments.rows, max_waiting=arguments.queue)
    models = Models(served, arguments.custom)
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    app = make_app(
        models,
        # Elsewhere, a key protects the answers, or everyone may have them.
        hosts=frozenset({"127.0.0.1", "localhost", "[::1]", address}) if local else None,
        api_key=api_key,
        allow_origins=arguments.allow_origin,
    )
    page = f"http://{address}:{port}"

    def started() -> None:
        log(f"serving {name}: a page at {page}, and OpenAI's API at {page}/v1 (Ctrl-C ends)")

    try:
        run_server(app, listening, started, models.stop)
    finally:
        models.close()
    log("stopped")
    # A thread that loads a model or compiles for the page may take minutes: it is not waited for.
    for thread in threading.enumerate():
        if thread.name.startswith("AnyIO"):
            thread.join(1.0)
            if thread.is_alive():
                sys.stdout.flush()
                os._exit(0)
