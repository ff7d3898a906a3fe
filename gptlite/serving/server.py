"""The HTTP server: a socket, limits of time, and an orderly end."""

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gptlite.errors import UserError

# Seconds that running requests have when the server is told to stop.
GRACE_SECONDS = 10
# Seconds that the last answers have to be sent after that.
SEND_SECONDS = 5
# Seconds that a connection may be open without a whole head of a request.
HEAD_SECONDS = 10
# Bytes of an answer that the system holds: with more, a slow client would seem not to read.
SEND_BUFFER = 2**18
MAX_CONNECTIONS = 512
# With more connections than this, each new one closes the oldest idle one of the client that has
# the most: one client alone cannot keep others out.
MANY_CONNECTIONS = MAX_CONNECTIONS // 2


# Bytes of a request's head, and of what follows a body in chunks.
MAX_HEAD = 2**16


# httptools, which uvicorn would take if it is installed, bounds no heads.
HttpProtocol: Any = H11Protocol


class TimedProtocol(HttpProtocol):
    """Closes connections that are idle at two checks, `HEAD_SECONDS` apart: that send no whole head
    of a request, or read nothing of what is left of an answer. uvicorn itself waits for ever.
    Where there are `MANY_CONNECTIONS`, some idle ones are closed at once."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MANY_CONNECTIONS:
            self._make_room()
        self._opened = time.monotonic()
        self._check(last=self)

    def _make_room(self) -> None:
        idle = [protocol for protocol in self.connections - {self} if protocol.is_idle]
        counts = Counter(protocol.host for protocol in idle)
        if idle:
            oldest = max(idle, key=lambda protocol: (counts[protocol.host], -protocol._opened))
            oldest.transport.abort()

    @property
    def host(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a whole request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _check(self, last: Any) -> None:
        """`last`: what was idle at the last check: a request that was answered, None before the
        first one, or the bytes that were left, if the connection was closing."""
        cycle, now = self.cycle, self
        if self.transport.is_closing():
            now = self.transport.get_write_buffer_size()
            if isinstance(last, int) and now >= last:
                self.transport.abort()
        elif cycle is None or cycle.response_complete:
            now = cycle
            if last is now:
                self.transport.close()
        self._timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._check, now)


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
        listening = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        return listening
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        advice = ""
        reason = getattr(error, "strerror", None) or error
        if number in (errno.EADDRINUSE, errno.EACCES):
            reason, advice = os.strerror(number), " --port 0 takes a free one."
        raise UserError(
            f"The server cannot listen at {host!r}, port {port}: {reason}.{advice}"
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
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=GRACE_SECONDS + SEND_SECONDS,
    )


class Server(uvicorn.Server):
    """Calls `started` when it answers, and `give_up` when what is running at the end has had
    `GRACE_SECONDS`, or at a second signal."""

    def __init__(self, app: ASGIApp, started: Callable[[], None], give_up: Callable[[], None]):
        super().__init__(server_config(app))
        self._started, self._give_up = started, give_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._give_up()
        # At a second SIGINT, uvicorn would cut the connections.
        super().handle_exit(signal.SIGTERM, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._give_up)
        await super().shutdown(sockets)
        timer.cancel()


def run_server(
    app: ASGIApp,
    listening: socket.socket,
    started: Callable[[], None],
    give_up: Callable[[], None],
) -> None:
    """Answer requests until SIGTERM or Ctrl-C. Then no new connection is taken, and what is
    running has `GRACE_SECONDS` before `give_up` is called, which must end it. `started` is called
    when requests are answered."""
    server = Server(app, started, give_up)

    def stop(*_: Any) -> None:
        server.should_exit = True

    # Before uvicorn has handlers of its own; and after it has ended, when it raises the signal
    # again. Then the program ends by itself.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[listening])
