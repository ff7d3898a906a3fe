"""Texts that share one compiled step and begin and end at different times: continuous batching (Yu
et al., 2022, "Orca", section 4).

The batch has a cache with a length for each row. Its rows and its capacity grow and shrink by
powers of two, so that a few programs serve any number of texts of any length.
"""

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gptlite.config import SamplingConfig
from gptlite.errors import require
from gptlite.generation.generate import (
    TOKENS_PER_CALL,
    DecodeInputs,
    GenerationState,
    PrefillInputs,
    PreparedModel,
    begins_with_rows,
    decode,
    padded_length,
    prefill,
    prepare,
)
from gptlite.generation.sampling import Filters, Sampling
from gptlite.machine.memory import CACHE_COPIES
from gptlite.machine.pytrees import size_of
from gptlite.models.gpt import GPT
from gptlite.serving.scores import Scores, token_scores
from gptlite.serving.text import ServedText, TextScores

# The least capacity of a cache: less would save little, and be compiled again soon.
MIN_CAPACITY = 256
# Tokens of texts that are read in one call, between two calls for the texts that are generated.
TOKENS_PER_READ = 256
# A long prompt is read in parts of fewer, `MIN_PART` at least, where a part takes longer than this.
MIN_PART, PART_SECONDS = 32, 0.3
# The shortest prompts are read in `MIN_ROOM` places. Prompts that fit into `MAX_GROUP_ROOM` are
# read in groups of at most `GROUP_ROWS` rows; longer ones alone, which is as fast.
MIN_ROOM, MAX_GROUP_ROOM = 16, 32
GROUP_ROWS = TOKENS_PER_READ // MIN_ROOM
# The time that a call takes besides its tokens', in tokens.
CALL_OVERHEAD = 2
# The time that a call should take, in seconds, because others wait for it; and more for each text,
# because what is done outside of it, for each text, should not take as long.
CALL_SECONDS, SECONDS_PER_TEXT = 0.01, 0.0006


W = TypeVar("W", bound=Sequence[int])


class New(NamedTuple):
    """Tokens that a text gained in a step."""

    text: ServedText
    ids: list[int]
    scores: TextScores | None


class Aside(NamedTuple):
    """What the batch had of a text that waits."""

    state: GenerationState
    """Of one row."""
    length: int
    """Tokens in the cache."""


class Reading:
    """Texts whose prompt, which is the same, is being read part by part; or whose context was full,
    of which the second half is read again."""

    def __init__(
        self, texts: list[ServedText], ids: list[int], logits: Float[np.ndarray, "1 vocab"] | None
    ):
        """**Arguments:**

        - `ids`: what is read.
        - `logits`: those that texts whose context was full go on from; of a prompt, None.
        """
        self.texts = texts
        self.ids = ids
        self.logits = logits
        self.done = 0
        self.state: GenerationState | None = None
        self.scores: list[TextScores] = []

    @property
    def is_prompt(self) -> bool:
        """Whether no token has been generated yet."""
        return self.logits is None

    def all_scores(self) -> TextScores | None:
        """Scores of the whole prompt, if a text is scored."""
        if not self.scores:
            return None
        return TextScores(*(np.concatenate(parts) for parts in zip(*self.scores, strict=True)))


class Batch:
    """The texts that are being generated. Not for use by several threads.

    **Raises:** `UserError` if rows are not the first axis of what every layer keeps: a custom
    layer may keep other things.
    """

    def __init__(self, model: GPT):
        self.context_length = model.config.context_length
        self._back = len(model.previous)
        self._model = model
        self._programs = _Programs(model)
        require(
            begins_with_rows(model, 2),
            "A layer of this model keeps something without an axis for the texts, so that texts "
            "cannot begin and end at different times.",
        )
        self._state: GenerationState | None = None
        self._capacity = 0
        self._rows: list[ServedText | None] = []
        self._lengths: dict[ServedText, int] = {}
        """Tokens in the cache."""
        self._aside: dict[ServedText, Aside] = {}
        self._settings: tuple[Any, bool] | None = None
        """Inputs that are the same until a text joins or leaves."""
        self._bytes: dict[tuple[int, int], int] = {}
        self._seconds_per_token = CALL_SECONDS
        self._part = TOKENS_PER_READ
        """Tokens of a long prompt that are read at once."""
        self._parts: set[tuple[int, int]] = set()
        """Tokens and capacity of the programs that have read such a part."""

    @property
    def texts(self) -> list[ServedText]:
        """Those that are being generated."""
        return [text for text in self._rows if text is not None]

    def memory(self, rows: int, tokens: int) -> int:
        """Bytes that so many texts of so many tokens need, with the copies that a change makes."""
        rows, capacity = _power_of_two(rows), capacity_for(tokens, self.context_length)
        if (rows, capacity) not in self._bytes:
            self._bytes[rows, capacity] = CACHE_COPIES * size_of(self._shape(rows, capacity))
        return self._bytes[rows, capacity]

    def read(self, texts: Sequence[ServedText]) -> list[TextScores | None]:
        """Read the prompts of texts, each of at most `TOKENS_PER_READ` tokens, and let those that
        want more join. The scores of the prompts of those that are scored."""
        by_prompt: dict[tuple[int, ...], list[ServedText]] = {}  # the same one is read once
        for text in texts:
            by_prompt.setdefault(tuple(text.ids), []).append(text)
        prompt_scores: dict[ServedText, TextScores | None] = {}
        for group in _groups(list(by_prompt), self.context_length):
            readers = [by_prompt[prompt] for prompt in group]
            scored = any(text.prompt_scored for members in readers for text in members)
            state, scores = self._read_group(group, scored)
            for place, members in enumerate(readers):
                for text in members:
                    ids = len(text.ids)
                    prompt_scores[text] = (
                        _scores_of(scores, place, ids) if text.prompt_scored else None
                    )
            self._join(state, [[x for x in members if x.max_new_tokens] for members in readers])
        return [prompt_scores[text] for text in texts]

    @property
    def halves_are_short(self) -> bool:
        """Whether half of a context is read in one part."""
        return self.context_length // 2 <= min(self._part, TOKENS_PER_READ)

    def read_again(self, readings: Sequence[Reading]) -> Sequence[Reading]:
        """Read the second halves of texts whose context was full, which are short: the first of
        them, as many as one call takes. These go on."""
        if not readings:
            return []
        windows = next(_groups([reading.ids for reading in readings], self.context_length))
        group = readings[: len(windows)]
        half, start = len(windows[0]), time.perf_counter()
        state, _ = self._read_group(windows, scored=False)
        self._note_part(len(windows) * half, half, time.perf_counter() - start)
        logits = np.zeros(state.logits.shape, state.logits.dtype)
        for row, reading in enumerate(group):
            logits[row] = reading.logits
        state = GenerationState(jnp.asarray(logits), state.layers, state.ids)
        self._join(state, [reading.texts for reading in group], length=half)
        return group

    def read_on(self, reading: Reading) -> bool:
        """Read the next part of long texts. Whether that was the last, and those have joined that
        want more."""
        part = reading.ids[reading.done : reading.done + min(self._part, TOKENS_PER_READ)]
        start = time.perf_counter()
        scored = reading.is_prompt and any(text.prompt_scored for text in reading.texts)
        reading.state, scores = self._read_rows(
            [part], reading.state, reading.done, scored, len(reading.ids)
        )
        jax.block_until_ready(reading.state)
        if scores is not None:
            reading.scores.append(_scores_of(scores, 0, len(part)))
        reading.done += len(part)
        self._note_part(len(part), len(reading.ids), time.perf_counter() - start)
        if reading.done < len(reading.ids):
            return False
        state = reading.state
        if reading.logits is not None:
            state = GenerationState(jnp.asarray(reading.logits), state.layers, state.ids)
        wanting = [text for text in reading.texts if text.max_new_tokens]
        self._join(state, [wanting], length=reading.done)
        return True

    def _note_part(self, tokens: int, prompt: int, seconds: float) -> None:
        """Let the next parts take the time that they should."""
        program = tokens, capacity_for(prompt, self.context_length)
        if program not in self._parts:  # it was compiled
            self._parts.add(program)
        elif 2 * tokens >= self._part and seconds > PART_SECONDS:
            self._part = max(MIN_PART, self._part // 2)

    def step(self) -> list[New]:
        """The next tokens of all texts: as many as a short call makes, and none needs."""
        self._fit([])
        texts = self._rows
        assert self._state is not None
        lengths = np.array([self._lengths.get(text, 0) if text else 0 for text in texts], np.int32)
        done = [len(text.ids) - text.n_prompt if text else 0 for text in texts]
        wanted = np.array(
            [text.max_new_tokens - n if text else 0 for text, n in zip(texts, done, strict=True)]
        )
        # The capacity may be above the context, as a multiple of what is read at once.
        room = min(self._capacity, self.context_length) - lengths
        # A text that ends before its row is full may be written beyond it: nothing reads that. Nor
        # is what follows the last token, which is drawn from the logits of those before.
        bounds = room[wanted > room + 1].tolist()
        # The first token is shown soon, unless texts begin all the time.
        begun = sum(text is not None and n == 0 for text, n in zip(texts, done, strict=True))
        seconds = CALL_SECONDS + SECONDS_PER_TEXT * len(self._lengths)
        seconds = seconds / 4 if 2 * begun >= len(self._lengths) else seconds
        in_time = max(1, int(seconds / self._seconds_per_token))
        count = _best_count(wanted, min(TOKENS_PER_CALL, in_time, *bounds))
        if self._settings is None:
            self._settings = self._settings_of(texts)
        settings, scored = self._settings
        start = time.perf_counter()
        self._state, tokens, scores = self._programs.step(
            self._state,
            settings,
            lengths,
            np.array(done, np.int32),
            np.asarray(count),
            scored=scored,
        )
        tokens, scores = jax.device_get((tokens, scores))
        self._note_speed((time.perf_counter() - start) / count)
        new = []
        for place, text in enumerate(texts):
            if text is not None:
                self._lengths[text] += count
                gained = min(count, int(wanted[place]))
                ids = tokens[place, :gained].tolist()
                text.ids += ids
                text_scores = _scores_of(scores, place, gained) if text.scored else None
                new.append(New(text, ids, text_scores))
        return new

    @property
    def bytes_aside(self) -> int:
        """Bytes of what is kept of texts that wait."""
        return sum(size_of(aside.state) for aside in self._aside.values())

    @property
    def aside(self) -> list[ServedText]:
        """Texts that wait, with what their rows had."""
        return list(self._aside)

    def bytes_of(self, text: ServedText) -> int:
        """Bytes of what would be kept of a text that is being generated, and would wait."""
        return self.memory(1, self._lengths[text] + TOKENS_PER_CALL) // CACHE_COPIES

    def is_aside(self, text: ServedText) -> bool:
        """Whether the text was being generated, and waits."""
        return text in self._aside

    def put_aside(self, text: ServedText) -> None:
        """Let a text that is being generated wait, with what its row has."""
        length = self._lengths[text]
        capacity = capacity_for(length + TOKENS_PER_CALL, self.context_length)
        row = np.array([self._rows.index(text)], np.int32)
        state = self._programs.resize(self._state, row, capacity=capacity)
        self._aside[text] = Aside(state, length)
        self.leave(text)

    def take_back(self, text: ServedText) -> None:
        """Go on with a text that waited."""
        aside = self._aside.pop(text)
        self._join(aside.state, [[text]], length=aside.length)

    def forget(self, texts: Iterable[ServedText]) -> None:
        """Drop what is kept of texts that wait."""
        for text in texts:
            self._aside.pop(text, None)

    def leave(self, text: ServedText) -> None:
        """Remove a text that is being generated, if it is."""
        if text in self._lengths:
            self._rows[self._rows.index(text)] = None
            del self._lengths[text]
            self._settings = None
        if not self._lengths:
            self._state, self._rows = None, []

    def clear(self) -> None:
        """Remove all texts."""
        for text in self.texts:
            self.leave(text)

    @staticmethod
    def _settings_of(texts: Sequence[ServedText | None]) -> tuple[Any, bool]:
        """Keys and settings of the rows, and whether any is scored."""
        keys = np.stack([text.key if text else np.zeros(2, np.uint32) for text in texts])
        default = SamplingConfig()
        sampling = Sampling.of([text.sampling if text else default for text in texts])
        filters = sampling.filters
        numbers = None if filters is None else (filters.top_k, filters.top_p, filters.min_p)
        scored = any(text.scored for text in texts if text)
        return (keys, sampling.temperature, numbers), scored

    def _shape(self, rows: int, capacity: int) -> Any:
        return eqx.filter_eval_shape(
            lambda model: model.init_cache((rows,), capacity=capacity).layers, self._model
        )

    def _note_speed(self, seconds: float) -> None:
        # The first call of a program compiles it, so that a slow one counts little.
        self._seconds_per_token += (
            min(seconds, 2 * self._seconds_per_token) - self._seconds_per_token
        ) / 4

    def _capacity_needed(self, joining: Sequence[int]) -> int:
        lengths = [*self._lengths.values(), *joining]
        return capacity_for(max(lengths) + TOKENS_PER_CALL, self.context_length)

    def _fit(self, joining: Sequence[int]) -> None:
        """Make room for texts of so many tokens, which join, or give back room that is not
        needed."""
        texts = self.texts
        rows, capacity = _power_of_two(len(texts) + len(joining)), self._capacity_needed(joining)
        now = len(self._rows)
        if now / 4 < rows < now:  # not at once, because another text may come
            rows = now
        if self._capacity / 4 < capacity < self._capacity:
            capacity = self._capacity
        # By a factor of two at a time, which are few programs.
        while (now, self._capacity) != (rows, capacity):
            places = [place for place, text in enumerate(self._rows) if text is not None]
            now = min(2 * now, rows) if now < rows else max(now // 2, rows)
            self._take_rows(self._state, places, texts, now, capacity)

    def _take_rows(
        self,
        state: GenerationState | None,
        places: Sequence[int],
        texts: Sequence[ServedText],
        rows: int,
        capacity: int,
    ) -> None:
        """Go on with some rows of a state, each of the text beside it, and empty ones after them:
        `rows` in all."""
        indices = np.zeros(rows, np.int32)
        indices[: len(places)] = places
        self._state = self._programs.resize(state, indices, capacity=capacity)
        self._rows = [*texts, *[None] * (rows - len(texts))]
        self._capacity, self._settings = capacity, None

    def _join(
        self,
        state: GenerationState,
        texts: Sequence[Sequence[ServedText]],
        *,
        length: int | None = None,
    ) -> None:
        """Let texts join: for each row of `state`, those that go on from it. `length`: tokens in
        the cache of all of them. Default: those that each text has."""
        sources = [(row, text) for row, members in enumerate(texts) for text in members]
        joining = [text for _, text in sources]
        if not joining:
            return
        lengths = [len(text.ids) if length is None else length for text in joining]
        rows, capacity = _power_of_two(len(joining)), self._capacity_needed(lengths)
        if self._state is not None:
            self._fit(lengths)
            free = [place for place, text in enumerate(self._rows) if text is None]
            for text, place in zip(joining, free, strict=False):
                self._rows[place] = text
            self._insert(state, [row for row, _ in sources], free[: len(joining)])
        elif (1, rows, capacity) == (len(joining), len(state.ids), self._capacity_of(state)):
            self._state, self._capacity = state, capacity
            self._rows = [*joining]
            self._settings = None
        else:
            self._take_rows(state, [row for row, _ in sources], joining, rows, capacity)
        self._lengths |= zip(joining, lengths, strict=True)

    def _insert(
        self, state: GenerationState, sources: Sequence[int], places: Sequence[int]
    ) -> None:
        """Write rows of `state`, of which one may be written several times, into places."""
        pending = list(zip(sources, places, strict=True))
        while pending:
            # Places beyond the last row are not written.
            to = np.full(len(state.ids), len(self._rows), np.int32)
            now = dict(reversed(pending))
            to[list(now)] = list(now.values())
            pending = [pair for pair in pending if now[pair[0]] != pair[1]]
            self._state = self._programs.insert(self._state, state, to)
        self._settings = None

    def drop_first_halves(self) -> list[Reading]:
        """Of the texts whose context is full, and that want more than the token that is drawn next,
        drop the first half, as `stream` does: they leave until the second one is read again."""
        half = self.context_length // 2
        full: dict[tuple[int, ...], list[ServedText]] = {}  # the same text is read once
        for text, length in self._lengths.items():
            if length == self.context_length and text.max_new_tokens - text.n_generated > 1:
                full.setdefault(tuple(text.ids), []).append(text)
        if not half:
            self._lengths |= dict.fromkeys(itertools.chain(*full.values()), 0)
        if not half or not full:
            return []
        assert self._state is not None
        logits, readings = np.asarray(self._state.logits), []
        for ids, texts in full.items():
            place = self._rows.index(texts[0])
            readings.append(Reading(texts, [*ids[-half:]], logits[place : place + 1]))
            for text in texts:
                self.leave(text)
        return readings

    def _read_group(
        self, windows: Sequence[Sequence[int]], scored: bool
    ) -> tuple[GenerationState, Scores | None]:
        """The state after each of `windows`, which begin at position 0, and the scores of their
        tokens."""
        state, scores = self._read_rows(windows, None, 0, scored, max(map(len, windows)))
        return state, jax.device_get(scores)

    def _read_rows(
        self,
        parts: Sequence[Sequence[int]],
        state: GenerationState | None,
        start: int,
        scored: bool,
        tokens: int,
    ) -> tuple[GenerationState, Scores | None]:
        """Read ids that follow `start` others in each row, with caches for `tokens` in all."""
        longest = max(map(len, parts))
        room = _room(longest, self.context_length - start)
        rows = 1 if len(parts) == 1 else group_size(longest, self.context_length)
        ids, length = np.zeros((rows, room), np.int32), np.ones(rows, np.int32)
        for row, part in enumerate(parts):
            ids[row, : len(part)], length[row] = part, len(part)
        capacity = capacity_for(tokens + TOKENS_PER_CALL, self.context_length)
        read = np.full(rows, start, np.int32)
        # Waited for, because the caller looks at the clock.
        return jax.block_until_ready(
            self._programs.read(state, ids, read, length, capacity=capacity, scored=scored)
        )

    def _capacity_of(self, state: GenerationState) -> int:
        return state.ids.shape[1] - self._back


class _Programs:
    """The compiled programs of a model. `jax.jit` is given the arrays alone: `eqx.filter_jit`
    would take apart the model at each call, which takes as long as several tokens of a small
    one."""

    def __init__(self, model: GPT):
        arrays, rest = eqx.partition(prepare(model, 2, share=False), eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)

        def prepared(leaves: list[Array]) -> PreparedModel:
            return eqx.combine(jax.tree.unflatten(structure, leaves), rest)

        def read(leaves, state, ids, start, length, *, capacity, scored):
            inputs = PrefillInputs(prepared(leaves), ids, start, length)
            observe = token_scores if scored else None
            state, scores = prefill(inputs, state, capacity, observe=observe)
            if len(ids) == 1:
                return state, scores
            # All groups have as many rows, so that the programs that take them on are few.
            padding = GROUP_ROWS - len(ids)
            return jax.tree.map(lambda x: _pad_rows(x, padding), state), scores

        def step(leaves, state, settings, lengths, done, count, *, scored):
            keys, temperature, filters = settings
            inputs = DecodeInputs(
                prepared(leaves),
                jax.random.wrap_key_data(keys, impl="threefry2x32"),
                Sampling(temperature, None if filters is None else Filters(*filters)),
                lengths,
                done,
                count,
            )
            return decode(inputs, state, observe=token_scores if scored else None)

        def resize(leaves, state, rows, *, capacity):
            """The `rows` of the state, with caches of that capacity. Places that are cut off are
            not in use."""
            model = prepared(leaves).model
            cache = model.init_cache((len(rows),), capacity=capacity)
            logits = jnp.zeros((len(rows), model.vocab_size), state.logits.dtype)

            def moved(new: Array, old: Array) -> Array:
                sizes = zip(new.shape[1:], old.shape[1:], strict=True)
                inside = (slice(None), *(slice(0, min(pair)) for pair in sizes))
                return new.at[inside].set(old[inside][rows])

            return jax.tree.map(moved, GenerationState(logits, cache.layers, cache.ids), state)

        def insert(state, new, places):
            """The state with the rows of another one in `places`."""

            def put(old: Array, new: Array) -> Array:
                sizes = zip(new.shape[1:], old.shape[1:], strict=True)
                inside = tuple(slice(0, min(pair)) for pair in sizes)
                return old.at[(places, *inside)].set(new[(slice(None), *inside)], mode="drop")

            return jax.tree.map(put, state, new)

        bind = functools.partial
        self.read = bind(
            jax.jit(read, donate_argnums=1, static_argnames=("capacity", "scored")), leaves
        )
        self.step = bind(jax.jit(step, donate_argnums=1, static_argnames="scored"), leaves)
        self.resize = bind(jax.jit(resize, static_argnames="capacity"), leaves)
        self.insert = jax.jit(insert, donate_argnums=0)


@functools.lru_cache(maxsize=2**14)
def capacity_for(tokens: int, context_length: int) -> int:
    """Places in a cache for so many tokens."""
    return padded_length(max(MIN_CAPACITY, min(tokens, context_length)), context_length)


def _pad_rows(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, rows), *((0, 0) for _ in x.shape[1:])))


def _room(tokens: int, most: int) -> int:
    """Places for `tokens` ids that are read, of which there are few kinds: each is a program."""
    kinds = (MIN_ROOM, MAX_GROUP_ROOM, 48, 64, 80, 96, 128, 192, TOKENS_PER_READ)
    return min(most, next(kind for kind in kinds if kind >= tokens))


def group_size(tokens: int, context_length: int) -> int:
    """How many prompts of so many tokens are read together."""
    if tokens > MAX_GROUP_ROOM:
        return 1
    return min(GROUP_ROWS, TOKENS_PER_READ // _room(tokens, context_length))


def _groups(windows: Sequence[W], context_length: int) -> Iterator[Sequence[W]]:
    """Windows that are read together: short ones as many as give `TOKENS_PER_READ`, or, if they
    would fill less than half of that, one at a time. Other numbers of rows would be more programs.
    """
    size = group_size(max(map(len, windows)), context_length)
    if size > 1:
        while 2 * len(windows) > size:
            yield windows[:size]
            windows = windows[size:]
    for window in windows:
        yield [window]


def _best_count(wanted: Int[np.ndarray, " rows"], most: int) -> int:
    """The number of tokens, at most `most`, for which a call does most for its time, if the rows
    want so many: a row that has all it wants idles until the end of the call."""
    counts = np.unique(np.clip(wanted[wanted > 0], 1, most))
    gained = np.minimum(wanted[:, None], counts).sum(axis=0)
    return int(counts[np.argmax(gained / (counts + CALL_OVERHEAD))])


def _scores_of(scores: Scores | None, place: int, count: int) -> TextScores:
    """Scores of the first tokens in a row."""
    assert scores is not None
    every = (scores.log_prob, scores.best_log_probs, scores.best_ids)
    return TextScores(*(np.asarray(x)[place, :count] for x in every))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
