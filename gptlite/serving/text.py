"""A text that is generated for a client, and what the client is told of it."""

import codecs
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, UInt

from gptlite.config import SamplingConfig
from gptlite.generation.text import TextStream, token_bytes
from gptlite.text.tokenizer import Tokenizer


class TextScores(NamedTuple):
    """Log probabilities of the tokens of a text, in nats, and the most probable tokens in their
    places, the best first."""

    log_prob: Float[np.ndarray, " tokens"]
    best_log_probs: Float[np.ndarray, "tokens best"]
    best_ids: Int[np.ndarray, "tokens best"]


class Scored(NamedTuple):
    """A token with its log probability, in nats."""

    id: int
    content: bytes
    """Its UTF-8, not always whole characters."""
    log_prob: float | None
    """None for the first token of a text, which nothing predicts."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a text."""

    itself: Scored
    offset: int
    """Where its first character is in the text."""
    best: list[Scored]
    """The most probable tokens in its place, the best first."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece that a text gained."""

    text: str
    tokens: list[Token]
    """Empty unless the text is scored."""
    finish_reason: str | None
    """`stop` (a stop string, or a token that ends the text), `length`, `error`, or None."""


class ServedText:
    """A text that is generated for a client, from its prompt to its end."""

    def __init__(
        self,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        *,
        sampling: SamplingConfig,
        max_new_tokens: int,
        seed: int = 0,
        number: int = 0,
        stop: Sequence[str] = (),
        n_best: int | None = None,
        echo: str | None = None,
        hidden: int = 0,
        deliver: Callable[[Piece], None],
    ):
        """**Arguments:**

        - `seed`, `number`: the same two give the same text; `number` counts the texts of a seed.
        - `n_best`: how many of the most probable tokens are reported with each token. None: no
          token is reported.
        - `echo`: the prompt as text, if the text begins with it.
        - `hidden`: ids at the beginning of the prompt that have no text.
        - `deliver`: is given each `Piece`, in the engine's thread.
        """
        self.ids = list(prompt)
        self.n_prompt = len(prompt)
        self._seed, self._number = seed, number
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.scored = n_best is not None
        self.prompt_scored = self.scored and echo is not None
        self.deliver = deliver
        self.request: object = self
        """What is the same for all texts of a request."""
        self.client: str | None = None
        self.cancelled = False
        self.finished = False
        self._tokenizer, self._ends = tokenizer, tokenizer.end_ids
        self._stream = TextStream(tokenizer, stop, self.ids)
        self._n_best = n_best
        self._echo = echo
        self._hidden = hidden
        # Tokens that are not yet shown, and the characters of all tokens and of the text shown.
        self._tokens: list[Token] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_decoded = self._n_shown = 0
        # A space of the first token that is not in the text.
        self._added = self._stream.added if echo is None else b" " * tokenizer.adds_space

    @property
    def key(self) -> UInt[np.ndarray, "2"]:
        """The key of its tokens. Not to be asked for where clients wait: JAX computes it."""
        return row_key(self._seed, self._number)

    @property
    def n_generated(self) -> int:
        return len(self.ids) - self.n_prompt

    def prompt_read(self, scores: TextScores | None) -> None:
        """The prompt is read. `scores`: of all its tokens, if it is scored."""
        if self._echo is not None:
            if scores is not None:
                shown = slice(self._hidden, None)
                self._add(self.ids[shown], TextScores(*(x[shown] for x in scores)))
                if not self._hidden and self._tokens:
                    first = self._tokens[0]
                    itself = first.itself._replace(log_prob=None)
                    self._tokens[0] = Token(itself, first.offset, best=[])
            self._n_decoded = len(self._echo)
            # A prompt may end inside a character.
            self._decoder.reset()
            self._added = self._stream.added
            tokens, self._tokens = self._tokens, []
            self._n_shown = len(self._echo)
            if self.max_new_tokens:
                self.deliver(Piece(self._echo, tokens, None))
            else:
                self._finish(Piece(self._echo, tokens, "length"))
        elif not self.max_new_tokens:
            self._finish(Piece("", [], "length"))

    def add(self, ids: Sequence[int], scores: TextScores | None) -> None:
        """Tokens that were generated."""
        text, count = "", len(ids)
        if self._stream.has_stops:
            for place, i in enumerate(ids):
                text += self._stream.feed([i])
                if self._stream.stopped:
                    count = place + 1
                    break
        else:
            count = min((ids.index(end) + 1 for end in self._ends if end in ids), default=count)
            text = self._stream.feed(ids)
        if count < len(ids):
            del self.ids[len(self.ids) - len(ids) + count :]
        if scores is not None:
            shown = [i for i in ids[:count] if i not in self._ends]
            self._add(shown, scores)
        reason = None
        if self._stream.stopped:
            reason = "stop"
        elif self.n_generated >= self.max_new_tokens:
            reason, text = "length", text + self._stream.finish()
        self._n_shown += len(text)
        # A token may have no text. The last of a text that was not stopped belongs to it.
        n_whole = len(self._tokens)
        if reason != "length":
            n_whole = sum(token.offset < self._n_shown for token in self._tokens)
        tokens, self._tokens = self._tokens[:n_whole], self._tokens[n_whole:]
        piece = Piece(text, tokens, reason)
        if reason is not None:
            self._finish(piece)
        elif text or tokens:
            self.deliver(piece)

    def fail(self) -> None:
        """The text cannot be finished."""
        if not self.finished:
            self._finish(Piece("", [], "error"))

    def _finish(self, piece: Piece) -> None:
        self.finished = True
        self.deliver(piece)

    def _add(self, ids: Sequence[int], scores: TextScores) -> None:
        for place, i in enumerate(ids):
            best = zip(
                scores.best_ids[place, : self._n_best].tolist(),
                scores.best_log_probs[place, : self._n_best].tolist(),
                strict=True,
            )
            itself = self._scored(i, float(scores.log_prob[place]))
            rivals = [self._scored(j, log_prob) for j, log_prob in best]
            self._tokens.append(Token(itself, self._n_decoded, rivals))
            content = itself.content.removeprefix(self._added)
            self._added = b"" if itself.content else self._added
            self._n_decoded += len(self._decoder.decode(content))

    def _scored(self, i: int, log_prob: float) -> Scored:
        return Scored(i, token_bytes(self._tokenizer, i), log_prob)


def shown(content: bytes) -> str:
    """The text of a token. One that is no whole characters is written as OpenAI does, as in
    `bytes:\\xe2\\x80`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


@jax.jit
def _row_key(seed, number):
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, number))


@functools.lru_cache(maxsize=4096)
def row_key(seed: int, number: int) -> UInt[np.ndarray, "2"]:
    """The key of text `number` of a seed: that of `gptlite sample`."""
    return np.asarray(_row_key(np.uint32(seed), np.uint32(number)))
