"""The HTTP server: a socket, limits of time, and an orderly end."""

import asyncio
import ipaddress
import signal
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gptlite.config import UserError

# Seconds that running requests have when the server is told to stop.
GRACE_SECONDS = 10
# Seconds that a connection may be open without a whole head of a request.
HEAD_SECONDS = 10
MAX_CONNECTIONS = 512


# uvicorn's protocol: of httptools where that is installed, else of h11.
HttpProtocol: Any = AutoHTTPProtocol


class TimedProtocol(HttpProtocol):
    """Closes connections that send no whole head of a request for `HEAD_SECONDS` to twice that.
    uvicorn itself waits for them for ever."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._check(last=self)

    def _check(self, last: Any) -> None:
        """`last`: the request that was the last one at the last check."""
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete
        if self.transport.is_closing():
            return
        if idle and cycle is last:
            self.transport.close()
            return
        asyncio.get_running_loop().call_later(HEAD_SECONDS, self._check, cycle if idle else self)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens. With port 0, the system chooses a free one.

    **Raises:** `UserError` if that is not possible.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"The server cannot listen at {host}, port {port}: {reason}. --port 0 takes a free one."
        ) from error


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn is to serve `app`."""
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )


def run_server(app: ASGIApp, listening: socket.socket) -> None:
    """Answer requests until SIGTERM or Ctrl-C. Then no new connection is taken, and what is
    running has `GRACE_SECONDS`."""
    # uvicorn raises the signal again when it has ended. Then the program ends by itself.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(server_config(app)).run(sockets=[listening])
