"""Texts that share one compiled step and begin and end at different times: continuous batching (Yu
et al., 2022, "Orca", section 4).

The batch has a cache with a length for each row. Its rows and its capacity grow and shrink by
powers of two, so that a few programs serve any number of texts of any length.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gptlite.config import SamplingConfig, require
from gptlite.generation.generate import (
    CACHE_COPIES,
    TOKENS_PER_CALL,
    Chunk,
    GenerationState,
    Part,
    PreparedModel,
    Scores,
    decode,
    prepare,
    read_part,
    room_for,
)
from gptlite.generation.sampling import Sampling
from gptlite.models.gpt import GPT
from gptlite.pytrees import size_of
from gptlite.serving.text import ServedText, TextScores

# The least capacity of a cache: less would save little, and be compiled again soon.
MIN_CAPACITY = 256
# Tokens of texts that are read in one call, between two calls for the texts that are generated.
TOKENS_PER_READ = 256
# The time that a call should take, in seconds: others wait for it.
CALL_SECONDS = 0.03


class New(NamedTuple):
    """What a text gained in a step."""

    text: ServedText
    ids: list[int]
    scores: TextScores | None


class Reading:
    """A text whose prompt is being read, part by part."""

    def __init__(self, text: ServedText):
        self.text = text
        self.done = 0
        self.state: GenerationState | None = None
        self.scores: list[TextScores] = []

    def all_scores(self) -> TextScores | None:
        """Of the whole prompt, if the text is scored."""
        if not self.scores:
            return None
        return TextScores(*(np.concatenate(parts) for parts in zip(*self.scores, strict=True)))


class Batch:
    """The texts that are being generated. Not for use by several threads.

    **Raises:** `UserError` if rows are not the first axis of what every layer keeps: a custom
    layer may keep other things.
    """

    def __init__(self, model: GPT, max_rows: int):
        """`max_rows`: texts generated together, at most."""
        self.max_rows = max_rows
        self.context = model.config.context_length
        self._back = len(model.previous)
        self._prepared = prepare(model, 2, share=False)
        shape = self._shape(2, MIN_CAPACITY)
        require(
            all(x.shape[:1] == (2,) for x in jax.tree.leaves(shape)),
            "A layer of this model keeps something without an axis for the texts, so that texts "
            "cannot begin and end at different times.",
        )
        self._state: GenerationState | None = None
        self._capacity = 0
        self._rows: list[ServedText | None] = []
        # Tokens in the cache, and the settings that are the same until a text joins or leaves.
        self._lengths: dict[ServedText, int] = {}
        self._settings: tuple[Any, Sampling, bool] | None = None
        self._bytes: dict[tuple[int, int], int] = {}
        self._seconds_per_token = CALL_SECONDS

    @property
    def texts(self) -> list[ServedText]:
        """Those that are being generated."""
        return [text for text in self._rows if text is not None]

    def memory(self, rows: int, tokens: int) -> int:
        """Bytes that so many texts of so many tokens need, with the copies that a change makes."""
        rows, capacity = _power_of_two(rows), self._capacity_for(tokens)
        if (rows, capacity) not in self._bytes:
            self._bytes[rows, capacity] = CACHE_COPIES * size_of(self._shape(rows, capacity))
        return self._bytes[rows, capacity]

    def read(self, texts: Sequence[ServedText]) -> list[TextScores | None]:
        """Read the prompts of texts, each of at most `TOKENS_PER_READ` tokens, and let those that
        want more join. The scores of the prompts of those that are scored."""
        prompts = {tuple(text.ids): text for text in texts}  # the same one is read once
        places = {ids: place for place, ids in enumerate(prompts)}
        scored = any(text.scored for text in texts)
        joining = [text for text in texts if text.max_new_tokens]
        fresh = not self.texts and len(prompts) == len(joining)
        capacity = self._capacity_needed(joining) if fresh else None
        state, scores = self._read_windows(list(prompts), scored, capacity)
        if fresh:
            self._state, self._settings = state, None
            self._rows = [*joining, *[None] * (len(state.ids) - len(joining))]
            self._capacity = state.ids.shape[1] - self._back
            self._lengths = {text: len(text.ids) for text in joining}
        elif joining:
            self._join(joining, state, [places[tuple(text.ids)] for text in joining])
        return [
            _scores_of(scores, places[tuple(text.ids)], len(text.ids)) if text.scored else None
            for text in texts
        ]

    def read_on(self, reading: Reading) -> bool:
        """Read the next part of a long prompt. Whether that was the last, and the text has joined
        if it wants more."""
        text, start = reading.text, reading.done
        room = room_for(len(text.ids), self.context)
        ids = np.zeros((1, min(TOKENS_PER_READ, room - start)), np.int32)
        part = text.ids[start : start + TOKENS_PER_READ]
        ids[0, : len(part)] = part
        read, here = (np.full(1, n, np.int32) for n in (start, len(part)))
        reading.state, scores = read_part(
            Part(self._prepared, ids, read, here), reading.state, room, scored=text.scored
        )
        if scores is not None:
            reading.scores.append(_scores_of(scores, 0, len(part)))
        reading.done += len(part)
        if reading.done < len(text.ids):
            return False
        if text.max_new_tokens:
            self._join([text], reading.state, [0])
        return True

    def step(self) -> list[New]:
        """The next tokens of all texts: as many as a short call makes, and none needs."""
        self._fit([])
        self._drop_first_halves()
        texts = self._rows
        assert self._state is not None
        lengths = np.array([self._lengths.get(text, 0) if text else 0 for text in texts], np.int32)
        done = [len(text.ids) - text.n_prompt if text else 0 for text in texts]
        longest = max(text.max_new_tokens - n for text, n in zip(texts, done, strict=True) if text)
        count = int(
            min(
                TOKENS_PER_CALL,
                max(1, CALL_SECONDS / self._seconds_per_token),
                self._capacity - lengths.max(),
                longest,
            )
        )
        if self._settings is None:
            keys = [text.key if text else np.zeros(2, np.uint32) for text in texts]
            configs = [text.sampling if text else SamplingConfig() for text in texts]
            wrapped = jax.random.wrap_key_data(jnp.asarray(np.stack(keys)), impl="threefry2x32")
            scored = any(text.scored for text in texts if text)
            self._settings = wrapped, Sampling.of(configs), scored
        keys, sampling, scored = self._settings
        chunk = Chunk(
            self._prepared, keys, sampling, lengths, np.array(done, np.int32), np.asarray(count)
        )
        start = time.perf_counter()
        self._state, tokens, scores = decode(chunk, self._state, scored=scored)
        tokens, scores = jax.device_get((tokens, scores))
        self._note_speed((time.perf_counter() - start) / count)
        new = []
        for place, text in enumerate(texts):
            if text is not None:
                self._lengths[text] += count
                wanted = min(count, text.max_new_tokens - done[place])
                ids = tokens[place, :wanted].tolist()
                text.ids += ids
                found = _scores_of(scores, place, wanted) if text.scored else None
                new.append(New(text, ids, found))
        return new

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

    def _shape(self, rows: int, capacity: int) -> Any:
        model = self._prepared.model
        return eqx.filter_eval_shape(
            lambda model: model.init_cache((rows,), capacity=capacity).layers, model
        )

    def _note_speed(self, seconds: float) -> None:
        # The first call of a program compiles it, so that a slow one counts little.
        self._seconds_per_token += (
            min(seconds, 2 * self._seconds_per_token) - self._seconds_per_token
        ) / 4

    def _capacity_for(self, tokens: int) -> int:
        return room_for(max(MIN_CAPACITY, min(tokens, self.context)), self.context)

    def _capacity_needed(self, joining: Sequence[ServedText]) -> int:
        lengths = [*self._lengths.values(), *(len(text.ids) for text in joining)]
        return self._capacity_for(max(lengths) + TOKENS_PER_CALL)

    def _fit(self, joining: Sequence[ServedText]) -> None:
        """Make room for `joining`, or give back room that is not needed."""
        texts = self.texts
        rows, capacity = _power_of_two(len(texts) + len(joining)), self._capacity_needed(joining)
        now = len(self._rows)
        if now / 4 < rows < now:  # not at once, because another text may come
            rows = now
        if self._capacity / 4 < capacity < self._capacity:
            capacity = self._capacity
        if self._state is not None and (rows, capacity) == (now, self._capacity):
            return
        places = [place for place, text in enumerate(self._rows) if text is not None]
        kept = np.zeros(rows, np.int32)
        kept[: len(places)] = places
        if self._state is None:
            self._state = _empty(self._prepared, rows, capacity)
        else:
            self._state = _resized((self._prepared, kept), self._state, capacity)
        self._rows = [*texts, *[None] * (rows - len(texts))]
        self._capacity, self._settings = capacity, None

    def _join(
        self, texts: Sequence[ServedText], state: GenerationState, source: Sequence[int]
    ) -> None:
        """Let texts join, each with the row of `state` in `source`."""
        self._fit(texts)
        free = [place for place, text in enumerate(self._rows) if text is None]
        for place, text in zip(free, texts, strict=False):
            self._rows[place], self._lengths[text] = text, len(text.ids)
        self._insert(state, source, free[: len(texts)], fresh=True)

    def _insert(
        self, state: GenerationState, source: Sequence[int], places: Sequence[int], *, fresh: bool
    ) -> None:
        assert self._state is not None
        size = _power_of_two(len(places))
        # Places beyond the last row are not written.
        from_, to = np.zeros(size, np.int32), np.full(size, len(self._rows), np.int32)
        from_[: len(source)], to[: len(places)] = source, places
        self._state = _inserted((state, from_, to), self._state, fresh=fresh)
        self._settings = None

    def _drop_first_halves(self) -> None:
        """Drop the first half of the texts whose context is full, as `stream` does."""
        half = self.context // 2
        full = [
            (place, text)
            for place, text in enumerate(self._rows)
            if text is not None and self._lengths[text] == self.context
        ]
        for _, text in full:
            self._lengths[text] = half
        while full and half:
            group = max(1, TOKENS_PER_READ // room_for(half, self.context))
            some, full = full[:group], full[group:]
            state, _ = self._read_windows([text.ids[-half:] for _, text in some], False)
            self._insert(state, range(len(some)), [place for place, _ in some], fresh=False)

    def _read_windows(
        self, windows: Sequence[Sequence[int]], scored: bool, capacity: int | None = None
    ) -> tuple[GenerationState, Scores | None]:
        """The state after each of `windows`, which begin at position 0, with rows up to the next
        power of two; and the scores of their tokens."""
        lengths = [len(ids) for ids in windows]
        room = room_for(max(lengths), self.context)
        rows = _power_of_two(len(windows))
        ids, length = np.zeros((rows, room), np.int32), np.ones(rows, np.int32)
        for place, window in enumerate(windows):
            ids[place, : len(window)], length[place] = window, len(window)
        state, scores = None, None
        for start in range(0, room, TOKENS_PER_READ):
            read, here = np.minimum(length, start), np.clip(length - start, 0, TOKENS_PER_READ)
            part = Part(self._prepared, ids[:, start : start + TOKENS_PER_READ], read, here)
            state, scores = read_part(part, state, capacity or room, scored=scored)
        assert state is not None
        return state, jax.device_get(scores)


@eqx.filter_jit
def _empty(prepared: PreparedModel, rows: int, capacity: int) -> GenerationState:
    model = prepared.model
    cache = model.init_cache((rows,), capacity=capacity)
    logits = jnp.zeros((rows, model.vocab_size), model.embedding.weight.dtype)
    return GenerationState(logits, cache.layers, cache.ids)


@eqx.filter_jit(donate="all-except-first")
def _resized(
    kept: tuple[PreparedModel, Int[Array | np.ndarray, " rows"]],
    state: GenerationState,
    capacity: int,
) -> GenerationState:
    """The rows `kept` of `state`, with caches of that capacity. What is cut off is not in use."""
    prepared, rows = kept

    def moved(new: Array, old: Array) -> Array:
        inside = tuple(
            slice(0, min(n, m)) for n, m in zip(new.shape[1:], old.shape[1:], strict=True)
        )
        return new.at[(slice(None), *inside)].set(old[(slice(None), *inside)][rows])

    return jax.tree.map(moved, _empty(prepared, len(rows), capacity), state)


@eqx.filter_jit(donate="all-except-first")
def _inserted(
    kept: tuple[
        GenerationState, Int[Array | np.ndarray, " places"], Int[Array | np.ndarray, " places"]
    ],
    state: GenerationState,
    *,
    fresh: bool,
) -> GenerationState:
    """`state` with rows of another one in some places. If they are not `fresh`, these places keep
    their logits."""
    new, source, places = kept

    def put(old: Array, new: Array) -> Array:
        inside = tuple(slice(0, n) for n in new.shape[1:])
        return old.at[(places, *inside)].set(new[source], mode="drop")

    logits = put(state.logits, new.logits) if fresh else state.logits
    layers = jax.tree.map(put, state.layers, new.layers)
    return GenerationState(logits, layers, put(state.ids, new.ids))


def _scores_of(scores: Scores | None, place: int, count: int) -> TextScores:
    """Of the first tokens in a row."""
    assert scores is not None
    every = (scores.log_prob, scores.best_log_probs, scores.best_ids)
    return TextScores(*(np.asarray(x)[place, :count] for x in every))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
