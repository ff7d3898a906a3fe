"""OpenAI's API for completions: what a request may ask for, and the form of its answers.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

import functools
import itertools
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from starlette.responses import JSONResponse, Response

from gptlite.config import SamplingConfig
from gptlite.errors import UserError, require
from gptlite.generation.text import prompt_ids
from gptlite.machine.fields import MAX_INT32, Between, check_fields
from gptlite.machine.records import parse_record
from gptlite.serving.scores import N_BEST
from gptlite.serving.text import Piece, Scored, ServedText, Token, shown
from gptlite.text.tokenizer import Ids, Tokenizer, as_ids

# Bytes of a request.
MAX_BODY = 2**22
# Texts that one request may ask for.
MAX_TEXTS = 128
MAX_NEW_TOKENS = 2**17
# Numbers that an answer may have: a token counts one, and one for each rival that is reported.
MAX_NUMBERS = 2**19
MAX_STOPS, MAX_STOP = 16, 1000
# Messages of a chat: a template may take a time that is the square of their number.
MAX_MESSAGES = 2048
# Characters of an error message.
MAX_MESSAGE = 500


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        """`headers`: of the answer, `_` for `-`."""
        super().__init__(message)
        self.status, self.code = status, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        message = str(self).encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} ..."
        return {"error": {"message": message, "type": kind, "param": None, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


@dataclass(frozen=True)
class Knobs:
    """The fields that both kinds of requests may have."""

    model: str
    temperature: Annotated[float, Between(0.0)] = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int, Between(1, MAX_TEXTS)] = 1
    stream: bool = False
    stream_options: dict | None = None
    stop: str | list | None = None
    seed: Annotated[int | None, Between(0, MAX_INT32)] = None

    def __post_init__(self):
        check_fields("", self)
        options = self.stream_options or {}
        known = {"include_usage", "include_obfuscation"}
        require(
            set(options) <= known and all(type(x) in (bool, NoneType) for x in options.values()),
            f"stream_options has include_usage, true or false, got {options}.",
        )
        require(
            len(self.stops) <= MAX_STOPS and all(map(_is_stop, self.stops)),
            f"stop must be a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP:,} "
            f"characters, got {self.stop!r}.",
        )
        self.sampling  # noqa: B018 - checks it

    @functools.cached_property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def stops(self) -> list[str]:
        stop = self.stop
        return [] if stop is None else [stop] if isinstance(stop, str) else stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))


def _is_stop(stop: Any) -> bool:
    return isinstance(stop, str) and 0 < len(stop) <= MAX_STOP


@dataclass(frozen=True)
class Completion(Knobs):
    """The body of a request to /v1/completions."""

    prompt: str | list = ""
    max_tokens: Annotated[int, Between(0, MAX_NEW_TOKENS)] = 16
    logprobs: Annotated[int | None, Between(0, N_BEST)] = None
    echo: bool = False
    best_of: Annotated[int | None, Between(1, MAX_TEXTS)] = None

    def __post_init__(self):
        super().__post_init__()
        require(
            self.best_of in (None, 1, self.n),
            f"best_of is not supported: leave it out or give n, got {self.best_of}.",
        )

    @property
    def prompts(self) -> list[Any]:
        """Each a text or ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
            return [prompt]
        return prompt


@dataclass(frozen=True)
class Chat(Knobs):
    """The body of a request to /v1/chat/completions."""

    messages: list = field(default_factory=list)
    max_tokens: Annotated[int | None, Between(1, MAX_NEW_TOKENS)] = None
    max_completion_tokens: Annotated[int | None, Between(1, MAX_NEW_TOKENS)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Between(0, N_BEST)] = None

    def __post_init__(self):
        super().__post_init__()
        require(
            bool(self.messages) and all(map(_is_message, self.messages)),
            "messages must be a list of objects with a role, a content and perhaps a name, all "
            f"texts, got {str(self.messages)[:300]}.",
        )
        require(
            len(self.messages) <= MAX_MESSAGES,
            f"A chat may have {MAX_MESSAGES:,} messages, got {len(self.messages):,}.",
        )
        for name, value in itertools.chain(*(x.items() for x in self.messages)):
            require(
                name in ("role", "content", "name") or not value,
                f"{name} in messages is not supported, got {str(value)[:300]}.",
            )
        require(
            self.logprobs or not self.top_logprobs,
            f"top_logprobs needs logprobs: true, got {self.top_logprobs} without.",
        )

    @property
    def turns(self) -> list[dict[str, str]]:
        """The role and the text of each message, and the name of who wrote it, if it says that."""
        return [
            {"role": x["role"], "content": _text_of(x.get("content"))}
            | ({"name": x["name"]} if x.get("name") else {})
            for x in self.messages
        ]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    if not isinstance(message.get("name", ""), str | NoneType):
        return False
    # That of an assistant may be null.
    may_lack = message["role"] == "assistant"
    return (may_lack or message.get("content") is not None) and (
        _text_of(message.get("content")) is not None
    )


def _text_of(content: Any) -> Any:
    """The text of a message, which may be given in parts, or be null; None if it is no text."""
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


_WITHOUT: dict[str, Sequence[Any] | None] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "user": None,
}
# Fields of OpenAI's that gptlite does not have, with the values that change nothing. None: any.
WITHOUT: dict[type, dict[str, Sequence[Any] | None]] = {
    Completion: {**_WITHOUT, "suffix": ("",)},
    Chat: {
        **_WITHOUT,
        **{"tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": None},
        **{"functions": ([],), "function_call": ("none", "auto")},
        **{"response_format": ({"type": "text"},), "modalities": (["text"],), "audio": ()},
        **{"reasoning_effort": ("none", "medium"), "verbosity": ("medium",)},
        **{"web_search_options": (), "moderation": (), "store": (False,)},
        # Who asks, and how fast the answer comes.
        **dict.fromkeys(("metadata", "safety_identifier", "service_tier", "prediction")),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")),
    },
}


class Body(Protocol):
    """A dataclass whose fields are those of a request."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], body: bytes) -> BodyT:
    """The request in `body`.

    **Raises:** `UserError` if it is none.
    """
    try:
        record = parse_record(body, dict[str, Any])
    except ValueError as error:
        raise UserError(f"The body is not a JSON object in UTF-8: {error}.") from error
    known = {field.name: field for field in fields(kind)}
    arguments = {name: value for name, value in record.items() if value is not None}
    without = WITHOUT.get(kind, {})
    for name, harmless in without.items():
        value = arguments.pop(name, None)
        if name == "logit_bias" and isinstance(value, dict) and not any(value.values()):
            continue  # of nothing
        fits = value is None or harmless is None or value in harmless
        require(fits, f"{name} is not supported: leave it out, got {value!r}.")
    unknown = sorted(set(record) - set(known) - set(without))
    require(not unknown, f"There is no argument {unknown[:1]}: known are {', '.join(known)}.")
    missing = [n for n, field in known.items() if field.default is MISSING and n not in arguments]
    require(not missing, f"{', '.join(missing)} must be given.")
    return kind(**arguments)


def check_text(name: str, text: str) -> None:
    """**Raises:** `UserError` if there is half of a surrogate pair in `text`."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has half of a surrogate pair, which is no character, at place {error.start}."
        ) from error


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it."""

    ids: Ids
    hidden: int = 0
    """Ids at its beginning that are not part of the text."""
    text: str | None = None
    """None if it was given as ids."""

    def shown(self, tokenizer: Tokenizer) -> str:
        return tokenizer.decode(self.ids) if self.text is None else self.text


def read_prompt(tokenizer: Tokenizer, prompt: Any, most: int) -> Prompt:
    """A prompt of a `Completion`. Before a text come the tokenizer's `start_ids`; an empty text
    without these is read after the token that ends a text, as if a new one began.

    `most`: the characters of a text that may fit into the context. One with more is not encoded.

    **Raises:** `UserError` if it has more, is neither a text nor ids, or is not in the vocabulary.
    """
    if isinstance(prompt, str):
        check_length("prompt", prompt, most)
        check_text("prompt", prompt)
        ids = prompt_ids(tokenizer, prompt)
        hidden = len(tokenizer.start_ids) if prompt else len(ids)
        return Prompt(ids, hidden, prompt)
    is_ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
    require(
        is_ids,
        f"prompt must be a text, ids, or a list of one of these, got {str(prompt)[:100]!r} in it.",
    )
    check_ids(prompt, tokenizer.vocab_size)
    return Prompt(as_ids(prompt))


def check_length(what: str, text: str, most: int) -> None:
    """**Raises:** `UserError` if `text` has more than `most` characters."""
    require(
        len(text) <= most,
        f"A {what} that fits into the context has at most {most:,} characters, got {len(text):,}.",
    )


def check_ids(ids: Sequence[Any], vocab_size: int) -> None:
    """**Raises:** `UserError` if one of `ids` is none of the vocabulary."""
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    require(not wrong, f"Ids must be from 0 to {vocab_size - 1:,}, got {str(wrong[:1])[:100]}.")


class Form:
    """The answers to one request: in one piece, or as a stream of chunks."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def __init__(self, model: str, n_prompt: int):
        """`n_prompt`: tokens of all prompts."""
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._n_prompt = n_prompt

    def usage(self, texts: Sequence[ServedText]) -> dict[str, int]:
        """The tokens that were read and generated."""
        generated = sum(text.n_generated for text in texts)
        return {
            "prompt_tokens": self._n_prompt,
            "completion_tokens": generated,
            "total_tokens": self._n_prompt + generated,
        }

    def choice(self, index: int, piece: Piece, *, scored: bool, streamed: bool) -> dict[str, Any]:
        """A text, or what it gained."""
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.tokens) if scored else None,
            "finish_reason": piece.finish_reason,
        }

    @staticmethod
    def _logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [shown(token.itself.content) for token in tokens],
            "token_logprobs": [finite(token.itself.log_prob) for token in tokens],
            "top_logprobs": [_best(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def answer(
        self, texts: Sequence[ServedText], pieces: Sequence[Piece], *, scored: bool
    ) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self.choice(index, piece, scored=scored, streamed=False)
            for index, piece in enumerate(pieces)
        ]
        return self.head | {
            "object": self.whole,
            "choices": choices,
            "usage": self.usage(texts),
        }

    def part(self, choices: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """A chunk of a stream."""
        return self.head | {"object": self.chunk, "choices": list(choices)} | fields


class ChatForm(Form):
    """The answers to a chat."""

    prefix = "chatcmpl"
    whole, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, n_prompt: int):
        super().__init__(model, n_prompt)
        self._begun: set[int] = set()

    def choice(self, index: int, piece: Piece, *, scored: bool, streamed: bool) -> dict[str, Any]:
        message = {"content": piece.text}
        if index not in self._begun:  # clients join what the parts of a stream say
            message = {"role": "assistant"} | message
            self._begun.add(index)
        content = [
            _chat_token(token.itself) | {"top_logprobs": list(map(_chat_token, token.best))}
            for token in piece.tokens
        ]
        return {
            "index": index,
            "delta" if streamed else "message": message,
            "logprobs": {"content": content} if scored else None,
            "finish_reason": piece.finish_reason,
        }


def _chat_token(token: Scored) -> dict[str, Any]:
    return {
        "token": shown(token.content),
        "logprob": finite(token.log_prob),
        "bytes": list(token.content),
    }


def _best(token: Token) -> dict[str, float | None] | None:
    """The most probable tokens, and the token itself; the better one of two with one text."""
    if token.itself.log_prob is None:
        return None
    log_probs: dict[str, float | None] = {}
    for scored in (*token.best, token.itself):
        log_probs.setdefault(shown(scored.content), finite(scored.log_prob))
    return log_probs


def finite(log_prob: float | None) -> float | None:
    """NaN, which a model that diverged may give, is no number of JSON."""
    return log_prob if log_prob is not None and math.isfinite(log_prob) else None
