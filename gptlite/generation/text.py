"""From ids, as they come, to text that can be shown."""

import codecs
import functools
from collections.abc import Iterable, Sequence

from gptlite.text.tokenizer import Tokenizer


@functools.lru_cache(maxsize=2**18)
def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """`tokenizer.token_bytes(token)`, which is looked up for every token that is generated."""
    return tokenizer.token_bytes(token)


class TextStream:
    """Decodes ids as they come, and ends before the first of the `stop` strings that is complete;
    of several that are complete with the same character, before the longest. It ends before an
    id of the tokenizer's `end_ids`, too.

    Bytes and characters that may be the beginning of a character or of a stop string are held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._end_ids = tokenizer, tokenizer.end_ids
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
            content += token_bytes(self._tokenizer, i)
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
        found = [
            (place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            self._held = ""
            _, place = min(found)
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
