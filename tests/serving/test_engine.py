"""Texts generated together are those that `generate` makes alone."""

import functools
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VOCAB, tiny_model
from support.servers import TOKENIZER

from gptlite.config import SamplingConfig
from gptlite.errors import UserError
from gptlite.generation.generate import generate
from gptlite.serving import batch
from gptlite.serving.engine import Engine, QueueFullError
from gptlite.serving.text import ServedText

C = TINY.context_length


class Client:
    """Collects what is delivered."""

    def __init__(self, prompt, max_new_tokens=20, config=None, **words):
        self.pieces = []
        self.done = threading.Event()
        self.ended = 0.0
        self.text = ServedText(
            prompt,
            TOKENIZER,
            sampling=config or SamplingConfig(),
            max_new_tokens=max_new_tokens,
            deliver=self.deliver,
            **words,
        )

    def deliver(self, piece):
        self.pieces.append(piece)
        if piece.finish_reason is not None:
            self.ended = time.monotonic()
            self.done.set()

    @property
    def result(self):
        assert self.done.wait(120)
        return "".join(piece.text for piece in self.pieces)

    @property
    def reason(self):
        assert self.done.wait(120)
        return self.pieces[-1].finish_reason

    @property
    def tokens(self):
        assert self.done.wait(120)
        return [token for piece in self.pieces for token in piece.tokens]


@pytest.fixture(scope="module", autouse=True)
def programs_are_shared():
    """Engines of the same model have the same programs."""
    make, made = batch._Programs, {}

    def programs(model):
        if id(model) not in made:
            made[id(model)] = model, make(model)  # with the model, so that it lives as long
        return made[id(model)][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_Programs", programs)
        yield


@pytest.fixture(name="start")
def fixture_start():
    """Engines that are closed at the end."""
    engines = []

    def start(model=None, *, max_rows=8, max_waiting=1000):
        engine = Engine(model or tiny_model(), max_rows=max_rows, max_waiting=max_waiting)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
        assert not engine.n_active


def alone(model, prompt, new, config=None, seed=0, number=0):
    """The text that `generate` makes, as sample.py calls it."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)[None]
    ids = generate(model, jnp.asarray([prompt]), new, config, keys=key)
    return TOKENIZER.decode(np.asarray(ids[0]))


def many_clients(count):
    """Of different lengths, prompts and settings, far beyond the context."""
    random = np.random.default_rng(0)
    configs = [
        None,
        SamplingConfig(greedy=True),
        SamplingConfig(0.7, top_k=3),
        SamplingConfig(top_p=0.8),
        SamplingConfig(1.5, min_p=0.2),
    ]
    return [
        (
            random.integers(0, VOCAB, random.integers(1, C + 1)).tolist(),
            int(random.integers(1, 5 * C)),
            configs[i % len(configs)],
            i % 7,
        )
        for i in range(count)
    ]


def test_a_text_does_not_depend_on_its_neighbours(variant, start):
    engine = start(variant)
    asked = many_clients(24)
    clients = [Client(p, n, config, seed=seed) for p, n, config, seed in asked]
    for client in clients:
        engine.submit([client.text])
    for client, (prompt, new, config, seed) in zip(clients, asked, strict=True):
        assert client.result == alone(variant, prompt, new, config, seed)
        assert client.reason == "length"


def test_a_context_shorter_than_the_shortest_group(start):
    model = tiny_model(context_length=6)
    engine = start(model, max_rows=64)
    clients = [Client([i % VOCAB, 1], 20, seed=i) for i in range(40)]
    engine.submit([client.text for client in clients])
    for i, client in enumerate(clients):
        assert client.result == alone(model, [i % VOCAB, 1], 20, seed=i)


def test_texts_join_and_leave_at_any_token(start):
    model = tiny_model()
    engine = start(model)
    asked = many_clients(40)
    clients = [Client(p, n, config, seed=seed) for p, n, config, seed in asked]
    for place, client in enumerate(clients):
        engine.submit([client.text])
        if place % 3 == 0:
            time.sleep(0.005)
    wanted = [alone(model, p, n, config, seed) for p, n, config, seed in asked]
    assert [client.result for client in clients] == wanted
    # Alone again, when the others are gone.
    last = Client([1, 2], 5, seed=3)
    engine.submit([last.text])
    assert last.result == alone(model, [1, 2], 5, seed=3)


def test_a_seed_gives_the_texts_of_its_numbers(start):
    model = tiny_model()
    engine = start(model, max_rows=4)
    clients = [Client([1, 2, 3], 15, seed=5, number=i) for i in range(6)]
    engine.submit([client.text for client in clients])
    for i, client in enumerate(clients):
        assert client.result == alone(model, [1, 2, 3], 15, seed=5, number=i)


@pytest.mark.parametrize("tokens", [3, C // 2, C - 2])
def test_a_prompt_is_read_once_for_all_its_texts(start, monkeypatch, tokens):
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", C // 2)
    monkeypatch.setattr("gptlite.serving.batch.MAX_GROUP_ROOM", 2)
    model = tiny_model()
    engine = start(model)
    calls = []
    read = engine._batch._programs.read
    monkeypatch.setattr(
        engine._batch._programs,
        "read",
        lambda *args, **words: calls.append(1) or read(*args, **words),
    )
    prompt = [i % VOCAB for i in range(tokens)]
    clients = [Client(prompt, 1, seed=5, number=i, n_best=1, echo="") for i in range(6)]
    engine.submit([client.text for client in clients])
    for i, client in enumerate(clients):
        assert client.result == alone(model, prompt, 1, seed=5, number=i)
        assert len(client.tokens) == tokens + 1
    assert len(calls) == -(-tokens // (C // 2))


def test_long_prompts_are_read_between_the_tokens_of_others(start, monkeypatch):
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 16)
    model = tiny_model(context_length=72)
    engine = start(model)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, n).tolist() for n in (72, 3, 40, 16, 17, 72)]
    clients = [Client(prompt, 90, seed=1, n_best=2, echo="") for prompt in prompts]
    for client in clients:
        engine.submit([client.text])
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.result == alone(model, prompt, 90, seed=1)
        check_scores(model, prompt, client.tokens[: len(prompt)])


def check_scores(model, ids, tokens):
    """Against the whole sequence at once, in one product a layer: 1e-4 is float32's rounding of
    logits near 1, over a few layers."""
    log_probs = np.asarray(jax.nn.log_softmax(eqx.filter_jit(model)(jnp.asarray(ids))))
    assert len(tokens) == len(ids)
    for place, (token, i) in enumerate(zip(tokens, ids, strict=True)):
        assert token.itself.id == i
        assert token.itself.content == TOKENIZER.token_bytes(i)
        assert token.offset == place
        if place == 0:
            assert token.itself.log_prob is None
            assert not token.best
            continue
        row = log_probs[place - 1]
        np.testing.assert_allclose(token.itself.log_prob, row[i], atol=1e-4)
        best = np.sort(row)[::-1][: len(token.best)]
        np.testing.assert_allclose([b.log_prob for b in token.best], best, atol=1e-4)
        assert token.best[0].id == row.argmax()
        assert token.best[0].content == TOKENIZER.token_bytes(int(row.argmax()))


@pytest.mark.parametrize("new", [0, 7])
def test_tokens_are_scored(start, new):
    """Those of the prompt and those that are generated, also beside texts that are not scored."""
    model = tiny_model()
    engine = start(model)
    prompt = [1, 2, 3, 4]
    scored = Client(prompt, new, n_best=3, echo="bcde")
    others = [Client([5, 6], 30), Client(prompt, 9)]
    engine.submit([scored.text, *(other.text for other in others)])
    assert scored.result == "bcde" + (alone(model, prompt, new) if new else "")
    ids = TOKENIZER.encode(scored.result).tolist()
    check_scores(model, ids, scored.tokens)
    assert others[0].result == alone(model, [5, 6], 30)
    assert not others[0].tokens


def test_a_stop_string_ends_a_text_and_its_tokens(start):
    model = tiny_model()
    engine = start(model)
    whole = alone(model, [1, 2], 60)
    stop = whole[20:23]
    client = Client([1, 2], 60, stop=[stop], n_best=1)
    engine.submit([client.text])
    assert client.result == whole[: whole.index(stop)]
    assert client.reason == "stop"
    assert b"".join(token.itself.content for token in client.tokens).decode() == client.result
    assert client.text.n_generated == whole.index(stop) + len(stop)


def test_a_client_that_goes_frees_its_row(start):
    engine = start(max_rows=1)
    gone, waits, stays = Client([1], 10**6), Client([1], 10**6), Client([2], 10)
    for client in (gone, waits, stays):
        engine.submit([client.text])
    engine.cancel([gone.text, waits.text])
    assert len(stays.result) == 10
    assert not gone.done.is_set()
    assert not waits.done.is_set()


def test_requests_take_turns(start):
    """A request of one text does not wait for all texts of one that came before."""
    engine = start(max_rows=1)
    first = [Client([1], 60, seed=i) for i in range(20)]
    second = Client([2], 5)
    engine.submit([client.text for client in first])
    engine.submit([second.text])
    assert second.result
    assert first[-1].result
    assert second.ended < first[2].ended


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}], ids=str)
def test_a_context_that_is_no_multiple_of_what_is_read_at_once(start, changes):
    """Its cache has more places than the context."""
    model = tiny_model(context_length=600, **changes)
    engine = start(model)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, n).tolist() for n in (599, 3, 257, 600)]
    clients = [Client(prompt, 700, seed=i) for i, prompt in enumerate(prompts)]
    for client in clients:
        engine.submit([client.text])
    for i, (client, prompt) in enumerate(zip(clients, prompts, strict=True)):
        assert client.result == alone(model, prompt, 700, seed=i)


def test_a_long_prompt_does_not_hold_up_short_ones(start, monkeypatch):
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 16)
    model = tiny_model(context_length=256)
    engine = start(model)
    long = [Client([1] * 256, 3, seed=i) for i in range(3)]
    short = Client([2], 3)
    engine.submit([client.text for client in long])
    engine.submit([short.text])
    assert short.result == alone(model, [2], 3)
    assert [client.result for client in long] == [
        alone(model, [1] * 256, 3, seed=i) for i in range(3)
    ]
    assert short.ended < long[1].ended


def test_texts_whose_long_prompt_is_read_leave_a_row_for_others(start, monkeypatch):
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 16)
    engine = start(tiny_model(context_length=256), max_rows=2)
    read_on, short, waits = batch.Batch.read_on, Client([2], 3), 0

    def slow(self, reading):
        nonlocal waits
        if short.done.is_set() or waits > 10_000:
            return read_on(self, reading)
        time.sleep(0.001)
        waits += 1
        return False

    monkeypatch.setattr(batch.Batch, "read_on", slow)
    long = [Client([1] * 256, 3, seed=i) for i in range(3)]
    engine.submit([client.text for client in long])
    while not waits:
        time.sleep(0.001)
    engine.submit([short.text])
    assert short.reason == "length"
    assert all(client.reason == "length" for client in long)
    assert waits <= 10_000


def test_a_long_prompt_does_not_wait_for_ever(start, monkeypatch):
    """Where short ones fill all rows."""
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 16)
    engine = start(tiny_model(context_length=256), max_rows=2)
    compiles = Client([1] * 240, 3)  # which takes longer than all short texts together
    engine.submit([compiles.text])
    assert compiles.reason == "length"
    short = [Client([2], 200, seed=i) for i in range(12)]
    long = Client([1] * 240, 3)  # which fit into the context
    for client in (*short[:4], long, *short[4:]):
        engine.submit([client.text])
    assert long.reason == "length"
    assert all(client.reason == "length" for client in short)
    assert sum(client.ended < long.ended for client in short) < 12


def test_what_is_generated_has_half_of_the_time(start, monkeypatch):
    """A part of a long prompt is not read again before as much time was spent on texts."""
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 16)
    engine = start(tiny_model(context_length=256))
    spent: list[tuple[str, float]] = []

    def timed(name, function):
        def run(*arguments):
            begun = time.monotonic()
            time.sleep(0.2 if name == "read_on" else 0.05)
            result = function(*arguments)
            spent.append((name, time.monotonic() - begun))
            return result

        return run

    short = Client([2], 100)
    engine.submit([short.text])
    while not short.pieces:
        time.sleep(0.001)
    for name in ("read_on", "step"):
        monkeypatch.setattr(batch.Batch, name, timed(name, getattr(batch.Batch, name)))
    long = Client([1] * 64, 1)
    engine.submit([long.text])
    assert {long.reason, short.reason} == {"length"}
    first, second, *_ = [place for place, (name, _) in enumerate(spent) if name == "read_on"]
    steps = sum(seconds for _, seconds in spent[first + 1 : second])
    assert steps > 0.9 * spent[first][1]


def test_parts_of_long_prompts_take_the_time_that_they_should():
    model = batch.Batch(tiny_model())
    sizes = []
    for seconds in (9.0, 9.0, 9.0, 0.1, 9.0, 9.0, 9.0, 9.0, 9.0):
        model._note_part(model._part, C, seconds)
        sizes.append(model._part)
    # Not by the first time of a program, when it is compiled.
    assert sizes == [256, 128, 128, 128, 64, 64, 32, 32, 32]


def test_texts_that_are_given_up_leave_the_queue(start):
    engine = start(max_rows=1, max_waiting=3)
    first = Client([1], 10**6)
    engine.submit([first.text])
    while not engine.n_active:
        time.sleep(0.01)
    for _ in range(5):
        waiting = [Client([1], 5).text for _ in range(3)]
        engine.submit(waiting)
        engine.cancel(waiting)
        assert engine.n_waiting == 0
    engine.cancel([first.text])


def test_a_full_queue_refuses(start):
    engine = start(max_rows=1, max_waiting=3)
    clients = [Client([1], 10**6)]
    engine.submit([clients[0].text])
    while not engine.n_active:
        time.sleep(0.01)
    engine.submit([Client([1], 5).text for _ in range(3)])
    with pytest.raises(QueueFullError, match="try again in") as caught:
        engine.submit([Client([1], 5).text])
    assert caught.value.retry_after >= 1
    engine.cancel([clients[0].text])


def test_one_client_does_not_fill_the_queue(start):
    engine = start(max_rows=1, max_waiting=8)
    first = [Client([1], 10**6) for _ in range(2)]
    engine.submit([client.text for client in first], "a")
    while not engine.n_active:
        time.sleep(0.01)
    engine.submit([Client([1], 5).text for _ in range(5)], "a")  # six wait
    with pytest.raises(QueueFullError):
        engine.submit([Client([1], 5).text], "a")
    engine.submit([Client([1], 5).text], "b")
    engine.submit([Client([1], 5).text], "c")
    with pytest.raises(QueueFullError):
        engine.submit([Client([1], 5).text], "d")
    engine.cancel([client.text for client in first])


def test_what_cannot_be_generated_is_refused(start, monkeypatch):
    engine = start(max_rows=2, max_waiting=3)
    with pytest.raises(UserError, match="at most 5 texts, got 6"):
        engine.submit([Client([1], 5).text for _ in range(6)])
    for count in (0, C + 1):
        with pytest.raises(UserError, match=f"1 to {C} tokens .*got {count}"):
            engine.check(count, 5)
    monkeypatch.setattr(engine, "_memory", 1000)
    with pytest.raises(UserError, match="no memory for 8 tokens"):
        engine.check(3, 5)


def test_memory_decides_how_many_texts_are_generated_together(start, monkeypatch):
    model = tiny_model()
    engine = start(model)
    monkeypatch.setattr(engine, "_memory", engine._batch.memory(2, C))
    most = 0
    clients = [Client([1, 2], 50, seed=i) for i in range(6)]
    engine.submit([client.text for client in clients])
    while not all(client.done.is_set() for client in clients):
        most = max(most, engine.n_active)
        time.sleep(0.001)
    assert most <= 2
    assert [c.result for c in clients] == [alone(model, [1, 2], 50, seed=i) for i in range(6)]


def test_a_failure_ends_the_texts_of_the_moment_and_no_others(start, monkeypatch, capsys):
    engine = start()
    step = engine._batch.step
    monkeypatch.setattr(engine._batch, "step", lambda: 1 / 0)
    broken = Client([1], 5)
    engine.submit([broken.text])
    assert broken.reason == "error"
    monkeypatch.setattr(engine._batch, "step", step)
    right = Client([1], 5)
    engine.submit([right.text])
    assert right.result == alone(tiny_model(), [1], 5)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_closing_fails_what_is_not_finished():
    engine = Engine(tiny_model(), max_rows=1, max_waiting=10)
    clients = [Client([1], 10**6), Client([1], 10**6)]
    for client in clients:
        engine.submit([client.text])
    engine.close()
    assert [client.reason for client in clients] == ["error", "error"]
    with pytest.raises(QueueFullError):
        engine.submit([Client([1], 5).text])


class WithoutRows(eqx.Module):
    """An attention that keeps one number for all texts."""

    def __init__(self, config, *, key):
        pass

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((), dtype)

    def __call__(self, x, cache=None, context=None, *, key=None):
        return x, cache


def test_a_layer_that_keeps_nothing_for_each_text_is_refused():
    with pytest.raises(UserError, match="without an axis for the texts"):
        Engine(tiny_model(attention=WithoutRows), max_rows=4, max_waiting=4)


# Tokens, and how they are drawn.
LONG = (2000, SamplingConfig(0.9))


def long_prompt(size):
    return [i % VOCAB for i in range(size)]


@functools.cache
def long_alone(n_prompt, seed):
    return alone(tiny_model(), long_prompt(n_prompt), *LONG, seed=seed)


@pytest.mark.parametrize("n_prompt", [3, C])
@pytest.mark.parametrize("max_rows", [2, 8])
def test_rows_and_memory_are_shared_in_time(start, monkeypatch, n_prompt, max_rows):
    """A text of another client does not wait for the end of long ones, which are put aside, go on
    later, and are what they would have been alone."""
    monkeypatch.setattr("gptlite.serving.engine.TURN_SECONDS", 0.02)
    model = tiny_model()
    engine = start(model, max_rows=max_rows)
    if max_rows > 2:  # memory has room for two, and for what waits
        memory = engine._batch.memory(2, C) + engine._batch.memory(1, C)
        monkeypatch.setattr(engine, "_memory", memory)
    long = [Client(long_prompt(n_prompt), *LONG, seed=seed) for seed in range(3)]
    engine.submit([client.text for client in long])
    while not all(client.pieces for client in long[:2]):
        time.sleep(0.001)
    short = [Client([1, 2], 30, seed=9) for _ in range(3)]
    for client in short:
        engine.submit([client.text])
    for client in short:
        assert client.result == alone(model, [1, 2], 30, seed=9)
    for seed, client in enumerate(long):
        assert client.result == long_alone(n_prompt, seed)
    assert max(client.ended for client in short) < min(client.ended for client in long)
    assert not engine._batch._aside


def test_texts_that_wait_take_no_more_memory_than_there_is(start, monkeypatch):
    monkeypatch.setattr("gptlite.serving.engine.TURN_SECONDS", 0.0)
    model = tiny_model()
    engine = start(model, max_rows=8)
    batch = engine._batch
    # For one text of the context's length, and for what waits of two others.
    monkeypatch.setattr(engine, "_memory", 3 * batch.memory(1, C) // 2 + batch.memory(1, C) // 4)
    taken = []
    step = batch.step

    def step_and_note():
        active = batch.memory(len(batch.texts), C)
        taken.append((active + batch.bytes_aside, len(batch.texts)))
        return step()

    monkeypatch.setattr(batch, "step", step_and_note)
    clients = [Client([1, 2], 600, seed=seed) for seed in range(8)]
    for client in clients:
        engine.submit([client.text])
    assert [x.result for x in clients] == [alone(model, [1, 2], 600, seed=s) for s in range(8)]
    assert max(memory for memory, _ in taken) <= engine._memory
    assert {n for _, n in taken} == {1}


def watched_reads(engine, monkeypatch, then=lambda reading: None):
    """The texts and the tokens of each part that is read of a context that was full."""
    read, step, parts, waited = engine._batch.read_on, engine._batch.step, [], [True]

    def read_on(reading):
        # Others have had a step since the part before.
        assert waited or not engine._batch.texts
        waited.clear()
        before, texts = reading.done, list(reading.texts)
        is_last = read(reading)
        if not reading.is_prompt:
            parts.append((texts, reading.done - before))
            then(reading)
        return is_last

    def note_step():
        waited.append(True)
        return step()

    monkeypatch.setattr(engine._batch, "read_on", read_on)
    monkeypatch.setattr(engine._batch, "step", note_step)
    return parts


def test_a_full_context_is_read_again_between_the_tokens_of_others(start, monkeypatch):
    """In parts, once for texts that are the same, and not for a last token."""
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 16)
    model = tiny_model(context_length=72)
    engine = start(model)
    parts = watched_reads(engine, monkeypatch)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 72).tolist()
    last = [Client(prompt, 1, seed=seed) for seed in range(5)]
    engine.submit([client.text for client in last])
    for seed, client in enumerate(last):
        assert client.result == alone(model, prompt, 1, seed=seed)
    assert not parts
    other = Client([1, 2], 10**6)
    engine.submit([other.text])
    same = [Client(prompt, 30, seed=seed) for seed in range(3)]
    engine.submit([client.text for client in same])
    for seed, client in enumerate(same):
        assert client.result == alone(model, prompt, 30, seed=seed)
    engine.cancel([other.text])
    assert [n for texts, n in parts if same[0].text in texts] == [16, 16, 4]
    assert [len(texts) for texts, _ in parts if same[0].text in texts] == [3, 3, 3]


def test_short_contexts_that_are_full_are_read_again_together(start, monkeypatch):
    engine = start(max_rows=9)
    read, sizes = engine._batch.read_again, []

    def counted(readings):
        group = read(readings)
        sizes.append((len(readings), len(group)))
        return group

    monkeypatch.setattr(engine._batch, "read_again", counted)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (9, C)).tolist()
    clients = [Client(prompt, 40, seed=seed) for seed, prompt in enumerate(prompts)]
    engine.submit([client.text for client in clients])
    for seed, (client, prompt) in enumerate(zip(clients, prompts, strict=True)):
        assert client.result == alone(tiny_model(), prompt, 40, seed=seed)
    assert (9, 9) in sizes


def test_a_text_whose_context_is_read_again_may_be_cancelled(start, monkeypatch):
    monkeypatch.setattr("gptlite.serving.batch.TOKENS_PER_READ", 2)
    engine = start()
    gone, other = Client([1] * C, 100_000), Client([1, 2], 10**6)
    parts = watched_reads(
        engine,
        monkeypatch,
        lambda reading: engine.cancel([gone.text] if gone.text in reading.texts else []),
    )
    engine.submit([other.text])
    engine.submit([gone.text])
    end = time.monotonic() + 60
    while not gone.text.cancelled or engine.n_active > 1:
        assert time.monotonic() < end
        time.sleep(0.001)
    engine.cancel([other.text])
    while engine.n_active or engine._again:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert [n for texts, n in parts if gone.text in texts] == [2]
    right = Client([1, 2], 30)
    engine.submit([right.text])
    assert right.result == alone(tiny_model(), [1, 2], 30)


def test_what_cannot_be_put_aside_or_taken_back_loses_no_other_text(start, monkeypatch, capsys):
    monkeypatch.setattr("gptlite.serving.engine.TURN_SECONDS", 0.0)
    engine = start(max_rows=2)
    batch, failed = engine._batch, set()

    def fails_once(name, when):
        work = getattr(batch, name)

        def sometimes(*given, **words):
            if name not in failed and when(words):
                failed.add(name)
                raise MemoryError
            return work(*given, **words)

        monkeypatch.setattr(batch, name, sometimes)

    fails_once("put_aside", lambda words: len(batch.aside) > 1)
    fails_once("_join", lambda words: "length" in words and len(failed) == 1)
    clients = [Client([1], 200, seed=seed) for seed in range(8)]
    for client in clients:
        engine.submit([client.text])
    right = 0
    for seed, client in enumerate(clients):
        if client.reason != "error":
            assert client.result == alone(tiny_model(), [1], 200, seed=seed)
            right += 1
    assert failed == {"put_aside", "_join"}
    assert right >= 4  # each failure ends the texts that have a row
    assert not batch.aside
    assert capsys.readouterr().err.count("this does not fit into memory") == 2


def test_a_text_that_was_put_aside_may_be_cancelled(start, monkeypatch):
    monkeypatch.setattr("gptlite.serving.engine.TURN_SECONDS", 0.0)
    engine = start(max_rows=1)
    clients = [Client([1], 100_000) for _ in range(3)]
    for client in clients:
        engine.submit([client.text])
    end = time.monotonic() + 60
    while not all(client.pieces for client in clients) or not engine._batch._aside:
        assert time.monotonic() < end
        time.sleep(0.001)
    engine.cancel([client.text for client in clients])
    while engine.n_active or engine.n_waiting or engine._batch._aside:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert Client([1, 2], 5).text.request is not clients[0].text.request
    last = Client([1, 2], 5)
    engine.submit([last.text])
    assert last.result == alone(tiny_model(), [1, 2], 5)
