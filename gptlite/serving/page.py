"""The page: its files, and the endpoints that only it uses."""

import base64
import codecs
import dataclasses
import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from gptlite.config import SamplingConfig
from gptlite.errors import UserError, require
from gptlite.generation.text import prompt_ids, token_bytes
from gptlite.machine.fields import MAX_INT32, Between, check_fields
from gptlite.machine.files import folders_with
from gptlite.runs.find import RUNS_FOLDER
from gptlite.runs.saved_config import load_config
from gptlite.serving.api import (
    MAX_TEXTS,
    ApiError,
    Form,
    Prompt,
    check_ids,
    check_text,
    finite,
)
from gptlite.serving.curves import read_curves
from gptlite.serving.endpoints import (
    Endpoints,
    Mailbox,
    bad_request,
    body_of,
    finished,
    held_by,
    submit,
)
from gptlite.serving.look import Inside, longest, look_inside
from gptlite.serving.memory import answer_bytes
from gptlite.serving.models import Served
from gptlite.serving.overview import list_runs
from gptlite.serving.text import Piece, Scored, ServedText, Token, shown
from gptlite.text.tokenizer import Tokenizer, n_bytes

FILES = Path(__file__).with_name("web")
# Where they are served. They hold no secret, and a browser cannot send a key for them.
STATIC = "/static"
# Where comparisons are written, and the ledger in each folder.
COMPARISONS_FOLDER, LEDGER = Path("comparisons"), "ledger.jsonl"
# Bytes of a ledger, and variants in it, that are shown.
MAX_SHOWN, MAX_VARIANTS = 2**24, 1000
# Points of a curve: about one for each column of the picture.
MAX_POINTS = 1000
# Tokens that are reported in place of each token.
N_RIVALS = 10


@dataclass(frozen=True)
class Text:
    """The body of a request to /page/score."""

    model: str
    text: str

    def __post_init__(self):
        check_fields("", self)
        check_text("text", self.text)
        require(self.text != "", "text must have at least one character.")


@dataclass(frozen=True)
class Place:
    """The body of a request to /page/look."""

    model: str
    ids: list
    """Those of the text."""
    place: int
    """The place of the token after which the model predicts."""

    def __post_init__(self):
        check_fields("", self)


async def _page(request: Request) -> Response:
    return FileResponse(FILES / "index.html")


class PageEndpoints(Endpoints):
    """Those that the page uses."""

    def routes(self) -> list[BaseRoute]:
        """Where they are, and the page itself."""
        return [
            Route("/", _page),
            Mount(STATIC, StaticFiles(directory=FILES)),
            Route("/page/settings", self.settings),
            Route("/page/completions", self.completions, methods=["POST"]),
            Route("/page/score", self.score, methods=["POST"]),
            Route("/page/look", self.look, methods=["POST"]),
            Route("/page/runs", self.runs),
            Route("/page/runs/{name}", self.curves),
            Route("/page/runs/{name}/config", self.config),
            Route("/page/comparisons", self.comparisons),
            Route("/page/comparisons/{name}", self.comparison),
        ]

    async def _find(self, name: str) -> Served:
        """The model that is served, or that of a run: `runs/NAME`."""
        prefix = f"{RUNS_FOLDER}/"
        if not name.startswith(prefix):
            return await super()._find(name)
        path = _folder(RUNS_FOLDER, name.removeprefix(prefix), "config.json")
        return await self._models.load(path)

    async def runs(self, request: Request) -> Response:
        """All runs in the folder of runs."""

        def work() -> Response:
            return JSONResponse([dataclasses.asdict(run) for run in list_runs(RUNS_FOLDER)])

        return await self._off_loop("runs", work)

    async def curves(self, request: Request) -> Response:
        """The losses of a run, from a place in its file on."""
        path = _folder(RUNS_FOLDER, request.path_params["name"], "config.json")
        file, start = request.query_params.get("file", "")[:100], _whole(request, "start")

        def work() -> Response:
            try:
                curves = read_curves(path, file, start, MAX_POINTS)
            except OSError:
                raise ApiError(404, f"The run {path.name} has no metrics yet.") from None
            pairs = {
                name: [steps.tolist(), [float(f"{value:.5g}") for value in values]]
                for name, (steps, values) in (
                    ("train", curves.train),
                    ("validation", curves.validation),
                )
            }
            place = {"file": curves.file, "end": curves.end, "complete": curves.complete}
            return JSONResponse(place | pairs)

        return await self._off_loop("runs", work)

    async def config(self, request: Request) -> Response:
        """The settings of a run, as options of `gptlite train`."""
        path = _folder(RUNS_FOLDER, request.path_params["name"], "config.json")
        with bad_request():
            config = load_config(path / "config.json")
        return JSONResponse(
            {
                f"{section}.{name}": value
                for section, fields in dataclasses.asdict(config).items()
                for name, value in fields.items()
            }
        )

    async def comparisons(self, request: Request) -> Response:
        """The names of comparisons, the one that was added to last first."""
        folders = folders_with(COMPARISONS_FOLDER, LEDGER)
        folders.sort(key=lambda path: -(path / LEDGER).lstat().st_mtime)
        return JSONResponse([path.name for path in folders])

    async def comparison(self, request: Request) -> Response:
        """What the ledger of a comparison says."""
        path = _folder(COMPARISONS_FOLDER, request.path_params["name"], LEDGER)

        def work() -> Response:
            # Imported here: it takes a second, and few ask for it.
            from gptlite.research.ledger import Ledger
            from gptlite.research.report import overview

            with bad_request():
                ledger = Ledger(path / LEDGER, MAX_SHOWN)
                n = len(ledger.variants)
                require(n <= MAX_VARIANTS, f"It has {n} variants: {MAX_VARIANTS} can be shown.")
                return JSONResponse(overview(ledger))

        return await self._off_loop("runs", work)

    def _form(self, served: Served, prompts: Sequence[Prompt], n: int, *, echo: bool) -> Form:
        require(len(prompts) == n == 1, f"Give one prompt and n 1, got {len(prompts)} and n {n}.")
        before = [] if echo else prompts[0].ids.tolist()
        return PageForm(served.tokenizer, before)

    async def settings(self, request: Request) -> Response:
        served = self._served
        return JSONResponse(
            {
                "model": served.name,
                "context_length": served.context_length,
                "look_length": longest(served.model.config),
                "vocab_size": served.tokenizer.vocab_size,
                "start_ids": list(served.tokenizer.start_ids),
                "empty_ids": _empty_ids(served.tokenizer),
                "bounds": sampling_bounds(),
            }
        )

    async def score(self, request: Request) -> Response:
        """Every token of a text of any length."""
        with bad_request():
            body = await body_of(request)
            asked = await self._parsed(Text, body)
            served = await self._find(asked.model)
            scoring = await self._by_size(len(body), lambda: Scoring(served, asked.text))
        held_by(request).at_least(answer_bytes(scoring.n_tokens, N_RIVALS))
        mailbox = Mailbox(streamed=False)
        texts = scoring.texts(mailbox)
        submit(request, served.engine, texts)
        pieces = await finished(request, served.engine, mailbox, texts)
        tokens = [token for piece in pieces for token in piece.tokens]
        return await self._by_size(
            N_RIVALS * len(tokens), lambda: JSONResponse(scoring.answer(tokens))
        )

    async def look(self, request: Request) -> Response:
        """Inside of the model while it predicts a token."""
        with bad_request():
            asked = await self._parsed(Place, await body_of(request))
            served = await self._find(asked.model)
            size, most = served.tokenizer.vocab_size, longest(served.model.config)
            check_ids(asked.ids, size)
            require(
                1 <= len(asked.ids) <= most,
                f"ids must be 1 to {most:,}, got {len(asked.ids):,}.",
            )
            require(
                0 <= asked.place < len(asked.ids),
                f"place must be from 0 to {len(asked.ids) - 1}, got {asked.place}.",
            )

        def work() -> Response:
            inside = look_inside(served.model, asked.ids, asked.place)
            return JSONResponse(_inside(inside, served.tokenizer))

        return await self._off_loop("look", work)


class Scoring:
    """The tokens of a text that may be longer than the context, in windows of the context that
    overlap by half, so that each token but the first ones is predicted from at least half of it."""

    def __init__(self, served: Served, text: str):
        """**Raises:** `UserError` if the text is too long."""
        context_length = served.context_length
        step = max(1, context_length // 2)
        most = (MAX_TEXTS * step) * served.longest_token
        require(
            len(text) <= most,
            f"A text to be scored has at most {most:,} characters, got {len(text):,}.",
        )
        start, encoded = served.tokenizer.start_ids, served.tokenizer.encode(text)
        ids = [*start, *encoded.tolist()]
        count = 1 + max(0, -(-(len(ids) - context_length) // step))
        require(
            count <= MAX_TEXTS,
            f"A text to be scored has at most {context_length + (MAX_TEXTS - 1) * step:,} tokens, "
            f"got {len(ids):,}.",
        )
        self._tokenizer = served.tokenizer
        self._windows = [ids[i * step : i * step + context_length] for i in range(count)]
        self._overlap, self._n_start = context_length - step, len(start)
        first = encoded[: 0 if start else 1]  # which nothing predicts
        self.n_tokens = len(ids)
        self._n_bytes = n_bytes(served.tokenizer, encoded) - n_bytes(served.tokenizer, first)

    def texts(self, mailbox: Mailbox) -> list[ServedText]:
        """The texts that the engine reads."""
        return [
            ServedText(
                window,
                self._tokenizer,
                sampling=SamplingConfig(),
                max_new_tokens=0,
                n_best=N_RIVALS,
                echo="",
                hidden=self._overlap if i else self._n_start,
                deliver=mailbox.slot(),
            )
            for i, window in enumerate(self._windows)
        ]

    def answer(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """The tokens, and what they cost together."""
        shown_tokens = TokenTexts()
        scored = [token.itself for token in tokens if token.itself.log_prob is not None]
        nats = -sum(token.log_prob or 0.0 for token in scored)
        return {
            "tokens": [shown_tokens.record(token) for token in tokens],
            "nats_per_token": finite(nats / len(scored)) if scored else None,
            "bits_per_byte": finite(nats / math.log(2) / self._n_bytes) if self._n_bytes else None,
        }


class TokenTexts:
    """The piece that each token adds to a text: one that ends inside a character adds what is
    whole."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, content: bytes, *, final: bool = False) -> str:
        """The text that is whole with a token of this content."""
        return self._decoder.decode(content, final)

    def record(self, token: Token, *, final: bool = False) -> dict[str, Any]:
        """A token for the page."""
        rivals = [self._rival(rival) for rival in token.best]
        return {
            "id": token.itself.id,
            "text": self.add(token.itself.content, final=final),
            "log_prob": finite(token.itself.log_prob),
            "rivals": rivals,
        }

    def _rival(self, rival: Scored) -> list[Any]:
        """A rival of the next token. What it would add comes last, if that is not its name."""
        record, before = _rival(rival), self._decoder.getstate()
        added = self.add(rival.content)
        self._decoder.setstate(before)
        return record if added == record[1] else [*record, added]


class PageForm(Form):
    """A stream of tokens with their ids and their rivals."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]):
        """`before`: the tokens of the prompt, if they are not part of the text."""
        super().__init__("", 0)
        self._texts = TokenTexts()
        for i in before:
            self._texts.add(token_bytes(tokenizer, i))

    def choice(self, index: int, piece: Piece, *, scored: bool, streamed: bool) -> dict[str, Any]:
        last = len(piece.tokens) - 1 if piece.finish_reason else None
        return {
            "tokens": [
                self._texts.record(token, final=i == last) for i, token in enumerate(piece.tokens)
            ],
            "finish_reason": piece.finish_reason,
        }

    def part(self, choices: Sequence[Any], **fields: Any) -> dict[str, Any]:
        return choices[0]


def _folder(parent: Path, name: str, file: str) -> Path:
    """The folder of that name in `parent`, which has such a file.

    **Raises:** `ApiError` if there is none.
    """
    known = {path.name: path for path in folders_with(parent, file)}
    if name not in known:
        raise ApiError(404, f"There is no {name!r} with a {file} in {parent}/.", "model_not_found")
    return known[name]


def _whole(request: Request, name: str) -> int:
    """A number that the address gives; 0 by default."""
    value = request.query_params.get(name, "0")
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise ApiError(400, f"{name} must be a whole number, got {value[:100]!r}.")
    return int(value)


def _empty_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that an empty prompt stands for; none if it is refused."""
    try:
        return prompt_ids(tokenizer, "").tolist()
    except UserError:
        return []


def sampling_bounds() -> dict[str, list[float | None]]:
    """The bounds of each setting that is a number; None: no upper bound."""
    bounds_of: dict[str, list[float | None]] = {}
    hints = typing.get_type_hints(SamplingConfig, include_extras=True)
    for field in fields(SamplingConfig):
        for bounds in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(bounds, Between):
                high = bounds.high if bounds.high < MAX_INT32 else None
                bounds_of[field.name] = [bounds.low, high]
    return bounds_of


def _rival(token: Scored) -> list[Any]:
    return [token.id, shown(token.content), finite(token.log_prob)]


def _inside(inside: Inside, tokenizer: Tokenizer) -> dict[str, Any]:
    def token(i: int, log_prob: float) -> list[Any]:
        return _rival(Scored(i, token_bytes(tokenizer, i), log_prob))

    return {
        "layers": [
            {
                "name": layer.name,
                "row": [list(map(finite, head)) for head in np.round(layer.row, 4).tolist()],
                # A byte for each cell of each head.
                "maps": [base64.b64encode(_bytes(head)).decode() for head in layer.maps],
                "side": layer.maps.shape[-1],
            }
            for layer in inside.layers
        ],
        "guesses": [
            {
                "best": [
                    token(int(i), float(log_prob))
                    for i, log_prob in zip(guess.ids, guess.log_probs, strict=True)
                ],
                "next": finite(guess.next_log_prob),
            }
            for guess in inside.guesses
        ],
    }


def _bytes(weights: np.ndarray) -> bytes:
    """0 to 1 as 0 to 255. NaN, of a model that diverged, as 0."""
    return np.round(255 * np.clip(np.nan_to_num(weights), 0, 1)).astype(np.uint8).tobytes()
