"""The application: from an HTTP request to texts of the engine, and from these to an answer."""

import asyncio
import contextlib
import hmac
import json
import os
import queue
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gptlite.config import MAX_INT32, SamplingConfig, UserError, require
from gptlite.progress import log
from gptlite.runs.load import Run
from gptlite.serving.api import (
    MAX_BODY,
    MAX_NUMBERS,
    MAX_TEXTS,
    ApiError,
    Chat,
    ChatForm,
    Completion,
    Form,
    Knobs,
    Prompt,
    parse,
    read_prompt,
)
from gptlite.serving.chat import ChatTemplate, read_chat_template
from gptlite.serving.engine import Engine, QueueFullError
from gptlite.serving.text import Piece, ServedText
from gptlite.text.tokenizer import Tokenizer, as_ids

# Seconds within which a request's body must have come, and a part of a stream be read.
BODY_SECONDS = 10
SEND_SECONDS = 60
# Tokens that a chat's answer may have, if the request does not say it.
CHAT_TOKENS = 512
# A request of more bytes, or an answer of more numbers, is worked on in another thread.
LONG = 10_000

T = TypeVar("T")

FAILED = "The server failed. Its log says why."

# What browsers are told with each answer: to take nothing from it, and to show it in no frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Served:
    """What the application serves."""

    name: str
    """Of the model."""
    created: int
    """When the model was made, in seconds since 1970."""
    tokenizer: Tokenizer
    context_length: int
    longest_token: int
    """Bytes of the longest token."""
    chat: ChatTemplate | None
    """None: there is no endpoint for chats."""
    engine: Engine


def serve_run(run: Run, name: str, *, max_rows: int, max_waiting: int) -> Served:
    """Start an engine for the model of `run`, of which a first text is generated, so that the first
    client need not wait for the compiler.

    **Raises:** `UserError` if the model cannot be served.
    """
    try:
        chat = read_chat_template(run.path, run.tokenizer)
    except UserError as error:
        log(f"there will be no endpoint for chats: {error}")
        chat = None
    engine = Engine(run.model, max_rows=max_rows, max_waiting=max_waiting)
    engine.check(1, 2)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    text = ServedText(
        [0],
        run.tokenizer,
        sampling=SamplingConfig(),
        max_new_tokens=2,
        deliver=lambda piece: ended.put(piece.finish_reason) if piece.finish_reason else None,
    )
    engine.submit([text])
    require(ended.get() != "error", "The model cannot generate a first text: see the error above.")
    return Served(
        name=name,
        created=int(run.path.stat().st_mtime),
        tokenizer=run.tokenizer,
        context_length=run.config.model.context_length,
        longest_token=max(
            len(run.tokenizer.token_bytes(i)) for i in range(run.tokenizer.vocab_size)
        ),
        chat=chat,
        engine=engine,
    )


def make_app(
    served: Served,
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
    endpoints = _Endpoints(served)
    routes = [
        Route("/health", endpoints.health),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
    ]
    if served.chat is not None:
        routes.append(Route("/v1/chat/completions", endpoints.chat, methods=["POST"]))
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
                more = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        app = self._app
        host = _host(Request(scope).headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            app = _answer(ApiError(403, f"The Host header must name {names}, got {host!r}."))
        await app(scope, receive, send_with_headers)


class RequireKey:
    """Refuses requests without the key."""

    def __init__(self, app: ASGIApp, api_key: str | None):
        self._app, self._key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and self._key is not None:
            scheme, _, given = Request(scope).headers.get("authorization", "").partition(" ")
            # In a time that does not tell how much of it is right.
            is_right = hmac.compare_digest(given.encode(), self._key.encode())
            if scheme.lower() != "bearer" or not is_right:
                message = "The API key is missing or wrong: send Authorization: Bearer KEY."
                error = ApiError(401, message, "invalid_api_key", WWW_Authenticate="Bearer")
                app = _answer(error)
        await app(scope, receive, send)


class _Endpoints:
    def __init__(self, served: Served):
        self._served = served
        # One at a time, so that long ones leave time for all else.
        self._one = anyio.CapacityLimiter(1)

    async def _off_loop(self, is_long: bool, work: Callable[[], T]) -> T:
        """`work()`, in another thread if it takes long."""
        if not is_long:
            return work()
        return await anyio.to_thread.run_sync(work, limiter=self._one)

    async def health(self, request: Request) -> Response:
        engine = self._served.engine
        return JSONResponse(
            {"status": "ok", "active": engine.n_active, "waiting": engine.n_waiting}
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "gptlite",
            "max_model_len": self._served.context_length,
        }

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"There is no model {name!r}: this server has {self._served.name!r}."
            raise ApiError(404, message, "model_not_found")

    async def completions(self, request: Request) -> Response:
        with _bad_request():
            body = await _body(request)
            asked = parse(Completion, body)
            self._check_model(asked.model)
            require(
                0 < len(asked.prompts) * asked.n <= MAX_TEXTS,
                f"A request may ask for 1 to {MAX_TEXTS} texts, got {len(asked.prompts)} prompts "
                f"with n {asked.n}.",
            )
            tokenizer = self._served.tokenizer
            most = self._served.context_length * self._served.longest_token
            prompts = await self._off_loop(
                len(body) > LONG,
                lambda: [read_prompt(tokenizer, prompt, most) for prompt in asked.prompts],
            )
        form = Form(self._served.name, sum(len(prompt.ids) for prompt in prompts))
        echoes = [prompt.shown(tokenizer) if asked.echo else None for prompt in prompts]
        return await self._generate(
            request, asked, form, prompts, echoes, asked.max_tokens, asked.logprobs
        )

    async def chat(self, request: Request) -> Response:
        template = self._served.chat
        assert template is not None
        with _bad_request():
            asked = parse(Chat, await _body(request))
            self._check_model(asked.model)
            ids = await self._off_loop(True, lambda: template.encode(asked.turns))
        n_best = (asked.top_logprobs or 0) if asked.logprobs else None
        most = asked.max_completion_tokens or asked.max_tokens or CHAT_TOKENS
        form = ChatForm(self._served.name, len(ids))
        return await self._generate(
            request, asked, form, [Prompt(as_ids(ids))], [None], most, n_best
        )

    async def _generate(
        self,
        request: Request,
        asked: Knobs,
        form: Form,
        prompts: Sequence[Prompt],
        echoes: Sequence[str | None],
        max_new_tokens: int,
        n_best: int | None,
    ) -> Response:
        engine = self._served.engine
        seeds = [_random_seed() if asked.seed is None else asked.seed for _ in prompts]
        mailbox = _Mailbox(streamed=asked.stream)
        with _bad_request():
            for prompt in prompts:
                engine.check(len(prompt.ids), max_new_tokens)
            echoed = sum(len(p.ids) for p, echo in zip(prompts, echoes, strict=True) if echo)
            n_tokens = asked.n * (len(prompts) * max_new_tokens + echoed)
            numbers = n_tokens * (1 if n_best is None else 1 + n_best)
            require(
                numbers <= MAX_NUMBERS,
                f"The answer would have up to {n_tokens:,} tokens, which with their log "
                f"probabilities are {numbers:,} numbers, and may have {MAX_NUMBERS:,}: ask for "
                "fewer at once.",
            )
            texts = [
                ServedText(
                    prompt.ids.tolist(),
                    self._served.tokenizer,
                    sampling=asked.sampling,
                    max_new_tokens=max_new_tokens,
                    seed=seed,
                    number=number,
                    stop=asked.stops,
                    n_best=n_best,
                    echo=echo,
                    hidden=prompt.hidden,
                    deliver=mailbox.slot(),
                )
                for prompt, echo, seed in zip(prompts, echoes, seeds, strict=True)
                for number in range(asked.n)
            ]
        try:
            with _bad_request():
                engine.submit(texts)
        except QueueFullError as error:
            raise ApiError(
                429, str(error), "rate_limit_exceeded", Retry_After=str(error.retry_after)
            ) from error
        scored = n_best is not None
        if asked.stream:
            chunks = _chunks(form, mailbox, texts, scored, asked.include_usage, engine)
            return EventStream(chunks, lambda: engine.cancel(texts))
        try:
            pieces = await _unless_gone(request.receive, mailbox.all_pieces())
        except BaseException:
            engine.cancel(texts)
            raise
        if any(piece.finish_reason == "error" for piece in pieces):
            raise _failure(engine)
        return await self._off_loop(
            numbers > LONG, lambda: JSONResponse(form.answer(texts, pieces, scored=scored))
        )


class _Mailbox:
    """What the texts of a request gained, handed from the engine's thread to the event loop. If it
    is not streamed, a text's pieces are handed over when it is finished."""

    def __init__(self, *, streamed: bool):
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, list[Piece]]] = asyncio.Queue()
        self._streamed = streamed
        self._slots = 0

    def slot(self) -> Callable[[Piece], None]:
        """Where the next text puts its pieces."""
        index, held = self._slots, []
        self._slots += 1

        def deliver(piece: Piece) -> None:
            held.append(piece)
            if self._streamed or piece.finish_reason is not None:
                pieces = held.copy()
                held.clear()
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, pieces))

        return deliver

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The pieces of all texts, until each is finished."""
        unfinished = self._slots
        while unfinished:
            index, pieces = await self._queue.get()
            for piece in pieces:
                unfinished -= piece.finish_reason is not None
                yield index, piece

    async def all_pieces(self) -> list[Piece]:
        """The whole of each text, as one piece."""
        found: list[list[Piece]] = [[] for _ in range(self._slots)]
        async for index, piece in self.pieces():
            found[index].append(piece)
        return [
            Piece(
                "".join(piece.text for piece in pieces),
                [token for piece in pieces for token in piece.tokens],
                pieces[-1].finish_reason,
            )
            for pieces in found
        ]


async def _chunks(
    form: Form,
    mailbox: _Mailbox,
    texts: Sequence[ServedText],
    scored: bool,
    include_usage: bool,
    engine: Engine,
) -> AsyncIterator[str]:
    async for index, piece in mailbox.pieces():
        if piece.finish_reason == "error":
            yield json.dumps(_failure(engine).body())
            return
        choice = form.choice(index, piece, scored=scored, streamed=True)
        yield json.dumps(form.part([choice]))  # ASCII: some clients split lines at U+2028
    if include_usage:
        yield json.dumps(form.part([], usage=form.usage(texts)))
    yield "[DONE]"


class EventStream(Response):
    """Server-sent events, each of one line, until they end or the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], cancel: Callable[[], None]):
        super().__init__()
        del self.headers["content-length"]
        self._events, self._cancel = events, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect, TimeoutError):  # nobody reads on
                await _unless_gone(receive, self._send(send))
        finally:
            self._cancel()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            body = f"data: {event}\n\n".encode()
            async with asyncio.timeout(SEND_SECONDS):  # a client may not read
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`.

    **Raises:** `ClientDisconnect` if the client goes away before.
    """

    async def wait_until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _body(request: Request) -> bytes:
    """The body of a request.

    **Raises:** `ApiError` if it is not said to be JSON, too large, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Pages from elsewhere may send other types without asking the server first.
        raise ApiError(415, f"The Content-Type must be application/json, got {kind!r}.")
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    message = f"A request may have at most {MAX_BODY:,} bytes."
                    raise ApiError(413, message, Connection="close")
    except TimeoutError as error:
        message = f"The request did not come within {BODY_SECONDS} s."
        raise ApiError(408, message, Connection="close") from error
    return body


@contextlib.contextmanager
def _bad_request():
    try:
        yield
    except UserError as error:
        raise ApiError(400, str(error)) from error


def _failure(engine: Engine) -> ApiError:
    """Why a text was not finished."""
    return ApiError(503, "The server was stopped.") if engine.closed else ApiError(500, FAILED)


def _random_seed() -> int:
    return int.from_bytes(os.urandom(4), "little") & MAX_INT32


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(request: Request, error: Exception) -> Response:
    """The error itself goes to the log."""
    return _answer(ApiError(500, FAILED))


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path} is nothing that this server has."
    headers: Mapping[str, str] = error.headers or {}
    answer = _answer(ApiError(error.status_code, message))
    answer.headers.update(headers)
    return answer


def _host(header: str) -> str:
    """The name in a `Host` header, without the port; the whole, if it is no name and port."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?", header)
    return (found[1] if found else header).lower()
