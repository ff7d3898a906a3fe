"""The endpoints: from a request to texts of the engine, and from these to an answer."""

import asyncio
import contextlib
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gptlite.errors import UserError, require
from gptlite.machine.fields import MAX_INT32
from gptlite.serving.api import (
    MAX_BODY,
    MAX_NUMBERS,
    MAX_TEXTS,
    ApiError,
    BodyT,
    Chat,
    ChatForm,
    Completion,
    Form,
    Knobs,
    Prompt,
    parse,
    read_prompt,
)
from gptlite.serving.engine import Engine, QueueFullError
from gptlite.serving.memory import Held, answer_bytes
from gptlite.serving.models import Models, Served
from gptlite.serving.text import Piece, ServedText
from gptlite.text.tokenizer import as_ids

# Seconds within which a request's body must have come.
BODY_SECONDS = 10
# Tokens that a chat's answer may have, if the request does not say it.
CHAT_TOKENS = 512
# A request of more bytes, or an answer of more numbers, is worked on in another thread.
LONG = 10_000

T = TypeVar("T")

STOPPED = "The model was stopped: the server ends, or makes room for another model."
FAILED = "The server failed. Its log says why."


class Endpoints:
    """Those of OpenAI's API."""

    def __init__(self, models: Models):
        self._models, self._served = models, models.main
        self._lanes: defaultdict[object, anyio.CapacityLimiter] = defaultdict(
            lambda: anyio.CapacityLimiter(1)
        )

    async def _off_loop(self, lane: object, work: Callable[[], T]) -> T:
        """`work()` in another thread: of each lane, one at a time, which leaves time for all
        else."""
        return await anyio.to_thread.run_sync(work, limiter=self._lanes[lane])

    async def _by_size(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, which takes the longer, the larger `size` is: in another thread if it is long.
        There, it waits for what is about as long."""
        return work() if size <= LONG else await self._off_loop(_magnitude(size), work)

    async def _parsed(self, kind: type[BodyT], body: bytes) -> BodyT:
        """The request in `body`: see `parse`."""
        return await self._by_size(len(body), lambda: parse(kind, body))

    async def health(self, request: Request) -> Response:
        engine = self._served.engine
        return JSONResponse(
            {"status": "ok", "active": engine.n_active, "waiting": engine.n_waiting}
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        await self._find(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "gptlite",
            "max_model_len": self._served.context_length,
        }

    async def _find(self, name: str) -> Served:
        """The model of that name."""
        if name != self._served.name:
            message = f"There is no model {name!r}: this server has {self._served.name!r}."
            raise ApiError(404, message, "model_not_found")
        return self._served

    def _form(self, served: Served, prompts: Sequence[Prompt], n: int, *, echo: bool) -> Form:
        """The form of the answer to a completion: `n` texts of each prompt."""
        return Form(served.name, sum(len(prompt.ids) for prompt in prompts))

    async def completions(self, request: Request) -> Response:
        with bad_request():
            body = await body_of(request)
            asked = await self._parsed(Completion, body)
            served = await self._find(asked.model)
            require(
                0 < len(asked.prompts) * asked.n <= MAX_TEXTS,
                f"A request may ask for 1 to {MAX_TEXTS} texts, got {len(asked.prompts)} prompts "
                f"with n {asked.n}.",
            )
            tokenizer = served.tokenizer
            most = served.most_characters
            prompts = await self._by_size(
                len(body),
                lambda: [read_prompt(tokenizer, prompt, most) for prompt in asked.prompts],
            )
            form = self._form(served, prompts, asked.n, echo=asked.echo)
        echoes = [prompt.shown(tokenizer) if asked.echo else None for prompt in prompts]
        return await self._generate(
            request, served, asked, form, prompts, echoes, asked.max_tokens, asked.logprobs
        )

    async def chat(self, request: Request) -> Response:
        template = self._served.chat
        if isinstance(template, str):
            message = f"{template} POST /v1/completions continues a text without one."
            raise ApiError(404, message, "no_chat_template")
        with bad_request():
            body = await body_of(request)
            asked = await self._parsed(Chat, body)
            served = await self._find(asked.model)
            ids = await self._off_loop(
                _magnitude(len(body)),
                lambda: template.encode(asked.turns, served.most_characters),
            )
        n_best = (asked.top_logprobs or 0) if asked.logprobs else None
        most = asked.max_completion_tokens or asked.max_tokens or CHAT_TOKENS
        form = ChatForm(served.name, len(ids))
        return await self._generate(
            request, served, asked, form, [Prompt(as_ids(ids))], [None], most, n_best
        )

    async def _generate(
        self,
        request: Request,
        served: Served,
        asked: Knobs,
        form: Form,
        prompts: Sequence[Prompt],
        echoes: Sequence[str | None],
        max_new_tokens: int,
        n_best: int | None,
    ) -> Response:
        engine = served.engine
        seeds = [_random_seed() if asked.seed is None else asked.seed for _ in prompts]
        mailbox = Mailbox(streamed=asked.stream)
        with bad_request():
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
            held_by(request).at_least(answer_bytes(n_tokens, n_best))
            texts = [
                ServedText(
                    prompt.ids.tolist(),
                    served.tokenizer,
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
        submit(request, engine, texts)
        scored = n_best is not None
        if asked.stream:
            chunks = _chunks(form, mailbox, texts, scored, asked.include_usage, engine)
            return EventStream(chunks, lambda: engine.cancel(texts))
        pieces = await finished(request, engine, mailbox, texts)
        return await self._by_size(
            numbers, lambda: JSONResponse(form.answer(texts, pieces, scored=scored))
        )


def _magnitude(size: int) -> int:
    """The number of digits."""
    return len(str(size))


def held_by(request: Request) -> Held:
    """The memory that the request holds."""
    return request.state.held


def submit(request: Request, engine: Engine, texts: Sequence[ServedText]) -> None:
    """Put the texts of a request into the queue.

    **Raises:** `ApiError` if there is no room for them.
    """
    try:
        with bad_request():
            engine.submit(texts, request.client and request.client.host)
    except QueueFullError as error:
        raise ApiError(
            429, str(error), "rate_limit_exceeded", Retry_After=str(error.retry_after)
        ) from error


async def finished(
    request: Request, engine: Engine, mailbox: "Mailbox", texts: Sequence[ServedText]
) -> list[Piece]:
    """The whole of each text, as one piece. They are given up if the client goes away.

    **Raises:** `ApiError` if one of them failed.
    """
    try:
        pieces = await _unless_gone(request.receive, mailbox.all_pieces())
    except BaseException:
        engine.cancel(texts)
        raise
    if any(piece.finish_reason == "error" for piece in pieces):
        raise _failure(engine)
    return pieces


class Mailbox:
    """The pieces that the texts of a request gained, handed from the engine's thread to the event
    loop. If they are not streamed, a text's are handed over when it is finished."""

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
        slots: list[list[Piece]] = [[] for _ in range(self._slots)]
        async for index, piece in self.pieces():
            slots[index].append(piece)
        return [
            Piece(
                "".join(piece.text for piece in pieces),
                [token for piece in pieces for token in piece.tokens],
                pieces[-1].finish_reason,
            )
            for pieces in slots
        ]


async def _chunks(
    form: Form,
    mailbox: Mailbox,
    texts: Sequence[ServedText],
    scored: bool,
    include_usage: bool,
    engine: Engine,
) -> AsyncIterator[str]:
    usage: dict[str, Any] = {"usage": None} if include_usage else {}
    async for index, piece in mailbox.pieces():
        if piece.finish_reason == "error":
            yield json.dumps(_failure(engine).body())
            return
        choice = form.choice(index, piece, scored=scored, streamed=True)
        yield json.dumps(form.part([choice], **usage))  # ASCII: some clients split lines at U+2028
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
            with contextlib.suppress(ClientDisconnect):
                await _unless_gone(receive, self._send(send))
        finally:
            self._cancel()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            body = f"data: {event}\n\n".encode()
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


async def body_of(request: Request) -> bytes:
    """The body of a request.

    **Raises:** `ApiError` if it is not said to be JSON, too large, too slow, or there is no memory
    for it.
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
                held_by(request).at_least(len(body))
    except TimeoutError as error:
        message = f"The request did not come within {BODY_SECONDS} s."
        raise ApiError(408, message, Connection="close") from error
    return body


@contextlib.contextmanager
def bad_request():
    try:
        yield
    except UserError as error:
        raise ApiError(400, str(error)) from error


def _failure(engine: Engine) -> ApiError:
    """Why a text was not finished."""
    return ApiError(503, STOPPED) if engine.closed else ApiError(500, FAILED)


def _random_seed() -> int:
    return int.from_bytes(os.urandom(4), "little") & MAX_INT32
