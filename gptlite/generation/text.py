"""Prompt in, text out: a text to ids, and ids, as they come, to text that can be shown."""

import codecs
import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from gptlite.config import SamplingConfig
from gptlite.errors import require
from gptlite.generation.generate import PreparedModel, stream
from gptlite.machine.fields import Count, Seed, check_value
from gptlite.models.gpt import GPT
from gptlite.text.tokenizer import Ids, Tokenizer, as_ids


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> Ids:
    """The ids of a prompt, after those that the model expects before it. An empty prompt begins a
    document, after the id that ends the one before.

    **Raises:** `UserError` if the prompt is empty and the tokenizer has no such ids, or a character
    is not in the vocabulary.
    """
    start = tokenizer.start_ids or (() if prompt else tokenizer.end_ids[:1])
    require(bool(prompt or start), "The prompt is empty: give at least one character.")
    return as_ids([*start, *(tokenizer.encode(prompt).tolist() if prompt else ())])


def stream_texts(
    model: GPT | PreparedModel,
    tokenizer: Tokenizer,
    prompt: str,
    texts: int = 1,
    *,
    max_new_tokens: int = 500,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Texts that continue a prompt, a few tokens at a time: the next piece of each of them.

    The same seed gives the same texts; the first is the same however many are asked for. If a
    prompt is longer than the model's context, the model reads its end. `stop`: see `TextStream`.

    **Raises:** `UserError` if `texts` or `seed` is out of range, `stop` is no list of strings, and
    as `prompt_ids` and `generate.stream` do.
    """
    check_value("texts", texts, Count)
    check_value("seed", seed, Seed)
    context_length = (model if isinstance(model, GPT) else model.model).config.context_length
    ids = prompt_ids(tokenizer, prompt)[-context_length:]
    key = jax.random.key(seed, impl="threefry2x32")
    prompts = np.tile(ids, (texts, 1))
    streams = [TextStream(tokenizer, stop, ids.tolist()) for _ in range(texts)]
    for chunk in stream(model, prompts, max_new_tokens, sampling, key=key):
        yield [text.feed(row) for text, row in zip(streams, jax.device_get(chunk), strict=True)]
        if all(text.stopped for text in streams):
            break
    yield [text.finish() for text in streams]


@functools.lru_cache(maxsize=2**18)
def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """`tokenizer.token_bytes(token)`, which is looked up for every token that is generated."""
    return tokenizer.token_bytes(token)


class TextStream:
    """Decodes ids as they come, and ends before the first of the `stop` strings that is complete;
    of several that are complete with the same character, before the longest. It ends before an
    id of the tokenizer's `end_ids`, too.

    Bytes and characters that may be the beginning of a character or of a stop string are held back.
    A space that the tokenizer adds is left out if all ids before, `after`, have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), after: Sequence[int] = (-1,)
    ):
        self._tokenizer, self._end_ids = tokenizer, tokenizer.end_ids
        adds = tokenizer.adds_space and {*after} <= {*tokenizer.start_ids, *tokenizer.end_ids}
        self.added = b" " if adds else b""
        are_texts = isinstance(stop, list | tuple) and all(isinstance(x, str) for x in stop)
        require(are_texts, f"stop must be a list of strings, got {stop!r}.")
        self._stop = [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    @property
    def has_stops(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    def feed(self, ids: Iterable[int]) -> str:
        """The text that can be shown after `ids`."""
        content, ended = b"", False
        for i in map(int, ids):
            ended = i in self._end_ids
            if ended:
                break
            token = token_bytes(self._tokenizer, i)
            content += token.removeprefix(self.added)
            self.added = b"" if token else self.added
        text = self._show(self._decoder.decode(content, final=ended))
        if ended and not self.stopped:
            text, self._held, self.stopped = text + self._held, "", True
        return text

    def finish(self) -> str:
        """The text that was held back. Nothing follows."""
        return self._show(self._decoder.decode(b"", final=True)) + self._held

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        # By their ends, so that the result does not depend on how the text is cut into pieces.
        stops = [
            (place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0
        ]
        if stops:
            self.stopped = True
            self._held = ""
            _, place = min(stops)
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
