"""The memory that requests and their answers take until the answers are sent."""

import asyncio
import contextlib
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptlite.serving.api import ApiError

# Bytes that all requests hold at most. One client has three quarters of it at most: the last
# quarter is for the only request of a client.
MAX_HELD = 2**30
MAX_OF_ONE = MAX_HELD // 4 * 3
# An answer is sent in parts of so many bytes, each of which a client must read within so many
# seconds.
PART = 2**16
SEND_SECONDS = 60
# Seconds after which a client may try again.
RETRY_SECONDS = 10


def answer_bytes(n_tokens: int, n_best: int | None) -> int:
    """What an answer of so many tokens takes: objects that wait to be written, and JSON.

    **Arguments:** `n_best`: the rivals of each token. None: the tokens are not scored.
    """
    return n_tokens * (400 if n_best is None else 800 + 200 * n_best)


class Held:
    """The bytes that a request holds."""

    def __init__(self, all_held: Counter[str], client: str):
        """`all_held`: those of each client."""
        self._all, self._client, self._bytes = all_held, client, 0

    def at_least(self, n_bytes: int) -> None:
        """Hold `n_bytes`, if they are more than it holds.

        **Raises:** `ApiError` if there is no room for them.
        """
        if n_bytes > MAX_OF_ONE:
            raise ApiError(
                400,
                f"The answer could take {n_bytes:,} bytes of memory, and may take {MAX_OF_ONE:,}: "
                "ask for less at once.",
            )
        more = max(0, n_bytes - self._bytes)
        others = self._all[self._client] - self._bytes  # requests of this client
        most = MAX_OF_ONE if others else MAX_HELD
        if more and self._all.total() + more > most:
            raise ApiError(
                429,
                "The server holds much that its clients have not read yet: try again in "
                f"{RETRY_SECONDS} s.",
                "rate_limit_exceeded",
                Retry_After=str(RETRY_SECONDS),
                Connection="close",  # what follows of its body is not read
            )
        self._all[self._client] += more
        self._bytes += more

    def release(self) -> None:
        """Hold nothing."""
        self._all[self._client] -= self._bytes
        self._bytes = 0
        self._all += Counter()  # without clients that hold nothing


class UnreadError(Exception):
    """A client does not read its answer."""


class BoundedMemory:
    """Gives each request a `Held`, as `request.state.held`, and sends its answer in parts. A client
    that does not read is given up."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        held = Held(self._held, client[0] if client else "")
        scope.setdefault("state", {})["held"] = held
        start: Message = {}
        refused = False

        async def send_in_parts(message: Message) -> None:
            """The start waits for the first bytes: an answer that is too large is refused."""
            nonlocal start, refused
            if message["type"] == "http.response.start":
                start = message
                return
            body: bytes = message.get("body", b"")
            if start and len(body) > PART:
                try:
                    held.at_least(len(body))
                except ApiError as error:
                    refused = True
                    await error.response()(scope, receive, send)
            if refused:
                return
            if start:
                await send(start)
                start = {}
            for place in range(0, len(body) or 1, PART):
                is_last = place + PART >= len(body)
                part = {
                    "type": message["type"],
                    "body": body[place : place + PART],
                    "more_body": not is_last or message.get("more_body", False),
                }
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        await send(part)
                except TimeoutError as error:
                    raise UnreadError from error

        try:
            with contextlib.suppress(UnreadError):
                await self._app(scope, receive, send_in_parts)
        finally:
            held.release()
