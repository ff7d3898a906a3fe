"""The thread that reads prompts and generates texts, for all clients together."""

import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence

from gptlite.errors import require
from gptlite.machine.memory import free_memory
from gptlite.machine.progress import log, sentence_of
from gptlite.models.gpt import GPT
from gptlite.serving import batch
from gptlite.serving.batch import Batch, Reading
from gptlite.serving.text import ServedText, TextScores

CLOSE_SECONDS = 30
# The time for prompts between two calls for the texts that are generated: these pause, but a text
# that begins waits less.
READ_SECONDS = 0.05
# The time that a text keeps its row while other requests wait for one.
TURN_SECONDS = 0.5
# The share of the free memory that caches may take.
SHARE_OF_MEMORY = 0.8


class QueueFullError(Exception):
    """There are too many texts already."""

    def __init__(self, retry_after: int):
        """`retry_after`: seconds after which there should be room."""
        super().__init__(f"The server is busy: try again in {retry_after} s.")
        self.retry_after = retry_after


class Engine:
    """Generates the texts of many requests in one batch.

    Requests take turns: each is given a row for one of its texts, then goes to the end of the
    queue. Where others wait, a text gives up its row after a while: it is put aside with its cache,
    and goes on later. A long prompt is read part by part between the tokens of others.
    """

    def __init__(self, model: GPT, *, max_rows: int, max_waiting: int):
        """**Arguments:**

        - `max_rows`: texts that are generated together.
        - `max_waiting`: texts that wait for a row, at most.

        **Raises:** `UserError` as `Batch` does.
        """
        self._batch = Batch(model)
        self._memory = SHARE_OF_MEMORY * free_memory(devices=1)
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self._changed = threading.Condition()
        # A queue for each request. The lock guards these.
        self._waiting: deque[deque[ServedText]] = deque()
        self._closed = False
        self._reading: Reading | None = None
        """Of a long prompt."""
        self._again: deque[Reading] = deque()
        """Of texts whose context was full."""
        self._prompt_was_last = False
        """Whether the last part that was read was one of a long prompt."""
        self._owed = 0.0
        """Seconds that the texts that are generated wait for, because a part was read."""
        self._seconds_per_text = 1.0
        self._begun: dict[ServedText, float] = {}
        """When each of them was given its row."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        """Texts that wait for a row."""
        with self._changed:
            return sum(map(len, self._waiting))

    @property
    def n_active(self) -> int:
        """Texts that are read or generated."""
        return len(self._begun)

    def check(self, n_prompt: int, max_new_tokens: int) -> None:
        """**Raises:** `UserError` if no text of so many tokens can be generated."""
        context_length = self._batch.context_length
        require(
            1 <= n_prompt <= context_length,
            f"The prompt must have 1 to {context_length:,} tokens (the model's context), got "
            f"{n_prompt:,}.",
        )
        require(
            self._batch.memory(1, n_prompt + max_new_tokens) <= self._memory,
            f"There is no memory for {n_prompt + max_new_tokens:,} tokens of one text: ask for "
            "fewer with max_tokens.",
        )

    @property
    def closed(self) -> bool:
        """Whether it has been stopped."""
        return self._closed

    def submit(self, texts: Sequence[ServedText], client: str | None = None) -> None:
        """Put the texts of one request into the queue. One client cannot fill it: the last quarter
        is for clients for whom nothing waits. (`client`: an address. None: it is not known.)

        **Raises:** `UserError` if there can never be room for all of them, `QueueFullError` if
        there is none now.
        """
        most = self.max_rows + self.max_waiting
        require(
            len(texts) <= most,
            f"A request to this server may ask for at most {most} texts, got {len(texts)}.",
        )
        with self._changed:
            waiting = sum(map(len, self._waiting))
            room = self.max_waiting + max(0, self.max_rows - len(self._begun))
            if client is not None and any(x[0].client == client for x in self._waiting):
                room -= self.max_waiting // 4
            if self._closed or waiting + len(texts) > room:
                turns = 1 + waiting / self.max_rows
                raise QueueFullError(max(1, round(turns * self._seconds_per_text)))
            request = object()
            for text in texts:
                text.request, text.client = request, client
            self._waiting.append(deque(texts))
            self._changed.notify()

    def cancel(self, texts: Sequence[ServedText]) -> None:
        """Give up these texts: their client has gone."""
        with self._changed:
            for text in texts:
                text.cancelled = True
            requests = (deque(t for t in request if not t.cancelled) for request in self._waiting)
            self._waiting = deque(request for request in requests if request)
            self._changed.notify()

    def stop(self) -> None:
        """Let the thread end soon. Texts that are not finished fail."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """`stop`, and wait until the thread has ended. A compilation may take long: that is not
        waited for."""
        self.stop()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._waiting or self._begun or self._batch.aside
                )
                if self._closed:
                    break
            try:
                self._turn()
            except Exception as error:
                # The state may be lost: it was given to a program that failed.
                print(traceback.format_exc(), end="", file=sys.stderr)
                log(f"error: {sentence_of(error) or error}", sys.stderr)
                self._fail()
        self._fail()
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for texts in waiting:
            for text in texts:
                text.fail()

    def _fail(self) -> None:
        self._batch.clear()
        self._reading = None
        self._again.clear()
        begun, self._begun = self._begun, {}
        self._batch.forget(begun)
        for text in begun:
            text.fail()

    def _turn(self) -> None:
        """Read prompts, and contexts that were full, for `READ_SECONDS`, or at least one; then make
        the next tokens. A part of what is long is read only when the texts that are generated have
        had as much time since the part before."""
        for text in list(self._begun):
            if text.cancelled:
                self._leave(text)
        self._batch.forget([text for text in self._batch.aside if text.cancelled])
        self._share()
        start = time.monotonic()
        while self._read() and time.monotonic() < start + READ_SECONDS:
            pass
        self._again.extend(self._batch.drop_first_halves())
        if self._batch.texts:
            start = time.monotonic()
            steps = self._batch.step()
            self._owed -= time.monotonic() - start
            for text, ids, scores in steps:
                text.add(ids, scores)
                if text.finished:
                    self._leave(text)

    def _share(self) -> None:
        """Where rows or memory are taken, put texts aside for a request that has fewer rows."""
        with self._changed:
            if not self._waiting:
                return
            rows = Counter(text.request for text in self._begun)
            poorest = min(self._waiting, key=lambda texts: rows[texts[0].request])
            next_one = poorest[0]
        now, kept = time.monotonic(), list(self._begun)
        late = [x for x in self._batch.texts if now - self._begun[x] >= TURN_SECONDS]
        aside: list[ServedText] = []
        while not self._fit([*kept, next_one], sum(map(self._batch.bytes_of, aside))):
            richer = [x for x in late if x in kept and rows[x.request] > rows[next_one.request]]
            if not richer:
                return
            aside.append(max(richer, key=lambda x: (rows[x.request], -self._begun[x])))
            kept.remove(aside[-1])
            rows[aside[-1].request] -= 1
        with self._changed:
            if aside and poorest in self._waiting:  # its client may have gone
                self._waiting.remove(poorest)
                self._waiting.appendleft(poorest)
        for text in aside:  # one by one: there may be no memory for the next
            self._batch.put_aside(text)
            del self._begun[text]
            with self._changed:
                if not text.cancelled:
                    self._waiting.append(deque([text]))

    def _fit(self, texts: Sequence[ServedText], more: int = 0) -> bool:
        """Whether these may be generated together, beside those that wait with what their rows had
        and `more` bytes of others that would. One alone may, if nothing is put aside for it."""
        needed = self._batch.memory(len(texts), max(map(_final, texts))) + self._batch.bytes_aside
        is_alone = len(texts) == 1 and not more
        return len(texts) <= self.max_rows and (is_alone or needed + more <= self._memory)

    def _leave(self, text: ServedText) -> None:
        self._batch.leave(text)
        for reading in (self._reading, *self._again):
            if reading is not None and text in reading.texts:
                reading.texts.remove(text)
        self._again = deque(reading for reading in self._again if reading.texts)
        if self._reading is not None and not self._reading.texts:
            self._reading = None
        seconds = time.monotonic() - self._begun.pop(text)
        self._seconds_per_text += (seconds - self._seconds_per_text) / 8

    def _read(self) -> bool:
        """Read some short prompts and contexts that were full, and a part of a long one, and take
        texts back that were put aside. Whether there was anything to read."""
        texts, long, back = self._admit()
        for text in back:
            self._batch.take_back(text)
        if texts:
            for text, scores in zip(texts, self._batch.read(texts), strict=True):
                self._read_to_end(text, scores)
        again = self._batch.read_again([*self._again]) if self._batch.halves_are_short else []
        for _ in again:
            self._again.popleft()
        if long:
            self._reading = Reading(long, long[0].ids.copy(), None)
        reading = self._next_reading()
        is_due = reading is not None and (self._owed <= 0 or not self._batch.texts)
        if reading is not None and is_due:
            start = time.monotonic()
            is_read = self._batch.read_on(reading)
            self._owed = time.monotonic() - start
            self._prompt_was_last = reading.is_prompt
            if is_read and not reading.is_prompt:
                self._again.remove(reading)
            elif is_read:
                self._reading = None
                scores = reading.all_scores()
                for text in reading.texts:
                    self._read_to_end(text, scores if text.prompt_scored else None)
        return bool(texts or back or again) or is_due

    def _next_reading(self) -> Reading | None:
        """A long prompt and long contexts that were full take turns. Of these, what nobody waits
        for any more is not read."""
        long = [] if self._batch.halves_are_short else self._again
        prompts, again = (
            [x for x in readings if x is not None and not all(t.cancelled for t in x.texts)]
            for readings in ([self._reading], long)
        )
        first, second = (again, prompts) if self._prompt_was_last else (prompts, again)
        return next(iter([*first, *second]), None)

    def _read_to_end(self, text: ServedText, scores: TextScores | None) -> None:
        text.prompt_read(scores)
        if text.finished:
            self._leave(text)

    def _admit(self) -> tuple[list[ServedText], list[ServedText], list[ServedText]]:
        """Texts whose prompts are read next: short ones together, and a long one if none is being
        read, each for all texts that begin with it; and texts that were put aside. Requests take
        turns."""
        texts: list[ServedText] = []
        long: list[ServedText] = []
        back: list[ServedText] = []
        prompts: set[tuple[int, ...]] = set()
        longest = place = 0
        with self._changed:
            while place < len(self._waiting):
                text = self._waiting[place][0]
                is_aside = self._batch.is_aside(text)
                is_long = len(text.ids) > batch.TOKENS_PER_READ and not is_aside
                waits = self._reading is not None or (long and text.ids != long[0].ids)
                if is_long and waits:
                    place += 1
                    continue
                if not self._fit([*self._begun, text]):
                    break
                # Of the texts that share the reading of a long prompt, all but the first leave room
                # for others.
                if is_long and long and not self._fit([*self._begun, text, text]):
                    place += 1
                    continue
                if is_aside:
                    back.append(self._take(place))
                    continue
                if is_long:
                    long.append(self._take(place))
                    continue
                longest = max(longest, len(text.ids))
                prompts.add(tuple(text.ids))
                if len(prompts) > max(1, batch.group_size(longest, self._batch.context_length)):
                    break
                texts.append(self._take(place))
        return texts, long, back

    def _take(self, place: int) -> ServedText:
        """The first text of a request, which then goes to the end of the queue."""
        request = self._waiting[place]
        del self._waiting[place]
        text = request.popleft()
        if request:
            self._waiting.append(request)
        self._begun[text] = time.monotonic()
        return text


def _final(text: ServedText) -> int:
    return text.n_prompt + text.max_new_tokens
