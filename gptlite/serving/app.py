"""The application: routes, and what guards them."""

import hmac
import re
from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptlite.serving.api import ApiError
from gptlite.serving.endpoints import FAILED, Endpoints
from gptlite.serving.memory import BoundedMemory
from gptlite.serving.models import Models
from gptlite.serving.page import STATIC, PageEndpoints

# Headers that tell browsers to take only the page's own files, to make no HTML of any text, and to
# show it in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(
    models: Models,
    *,
    hosts: frozenset[str] | None,
    api_key: str | None = None,
    allow_origins: Sequence[str] = (),
) -> ASGIApp:
    """**Arguments:**

    - `hosts`: names that the `Host` header may have, so that a page of a stranger whose name was
      bound to this machine's address cannot read answers (DNS rebinding). None: any.
    - `api_key`: what `Authorization: Bearer` must carry. None: nothing is asked for.
    - `allow_origins`: pages from elsewhere whose scripts may read the answers.
    """
    endpoints = Endpoints(models)
    routes = [
        *PageEndpoints(models).routes(),
        Route("/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(allow_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's client sends more of its own
    )
    return Guard(
        Starlette(
            routes=routes,
            middleware=[
                *([cors] if allow_origins else []),
                Middleware(BoundedMemory),
                Middleware(RequireKey, api_key=api_key),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _unexpected,
            },
        ),
        hosts,
    )


class Guard:
    """Answers only to its own names, with `HEADERS`."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        app = self._app
        host = _host(Request(scope).headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            app = ApiError(403, f"The Host header must name {names}, got {host!r}.").response()
        await app(scope, receive, send_with_headers)


class RequireKey:
    """Refuses requests without the key, but for the page's files."""

    def __init__(self, app: ASGIApp, api_key: str | None):
        self._app, self._key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        path = scope.get("path", "")
        is_open = path == "/" or path.startswith(f"{STATIC}/")
        if scope["type"] == "http" and self._key is not None and not is_open:
            scheme, _, key = Request(scope).headers.get("authorization", "").partition(" ")
            # In a time that does not tell how much of it is right.
            is_right = hmac.compare_digest(key.encode(), self._key.encode())
            if scheme.lower() != "bearer" or not is_right:
                message = "The API key is missing or wrong: send Authorization: Bearer KEY."
                error = ApiError(401, message, "invalid_api_key", WWW_Authenticate="Bearer")
                app = error.response()
        await app(scope, receive, send)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(request: Request, error: Exception) -> Response:
    """The error itself goes to the log."""
    return ApiError(500, FAILED).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path} is nothing that this server has."
    headers: Mapping[str, str] = error.headers or {}
    answer = ApiError(error.status_code, message).response()
    answer.headers.update(headers)
    return answer


def _host(header: str) -> str:
    """The name in a `Host` header, without the port; the whole, if it is no name and port."""
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?", header)
    return (match[1] if match else header).lower()
