"""What requests hold until their answers are sent."""

import asyncio
import http.client
import json
import time
from collections import Counter

import pytest
from support.servers import NAME, serving

from gptlite.serving import memory
from gptlite.serving.api import ApiError
from gptlite.serving.memory import MAX_HELD, MAX_OF_ONE, PART, BoundedMemory, Held


def test_one_client_leaves_room_for_others():
    held_by = Counter()
    first, second, other = (Held(held_by, client) for client in ("a", "a", "b"))
    first.at_least(MAX_OF_ONE - 10)
    second.at_least(10)
    second.at_least(5)  # it holds them already
    with pytest.raises(ApiError, match=r"try again in 10 s") as refused:
        second.at_least(11)
    assert refused.value.status == 429
    other.at_least(MAX_HELD - MAX_OF_ONE)
    with pytest.raises(ApiError, match="try again"):
        Held(held_by, "c").at_least(1)
    assert held_by.total() == MAX_HELD
    first.release()
    second.at_least(100)
    for held in (first, second, other):
        held.release()
    assert held_by == {}
    first.at_least(MAX_OF_ONE)


def test_a_request_that_holds_its_body_is_still_the_only_one_of_its_client():
    held_by = Counter()
    Held(held_by, "a").at_least(MAX_OF_ONE)
    other = Held(held_by, "b")
    other.at_least(100)
    other.at_least(10_000)
    with pytest.raises(ApiError, match="try again"):
        Held(held_by, "b").at_least(1)


def test_what_no_request_may_hold_is_refused():
    with pytest.raises(ApiError, match=rf"could take {MAX_OF_ONE + 1:,} bytes") as refused:
        Held(Counter(), "a").at_least(MAX_OF_ONE + 1)
    assert refused.value.status == 400


def sent(app, n_times=1):
    """The messages that `app` sends through `BoundedMemory`, `n_times` at once."""
    messages = [[] for _ in range(n_times)]
    bounded = BoundedMemory(app)

    async def main():
        def one(kept):
            async def send(message):
                kept.append(message)
                await asyncio.sleep(0)

            return bounded({"type": "http", "client": ("a", 1)}, receive, send)

        await asyncio.gather(*map(one, messages))

    async def receive():
        return {"type": "http.disconnect"}

    asyncio.run(main())
    return messages


def large_answer(size, more=0):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size), "more_body": bool(more)})
        if more:
            await send({"type": "http.response.body", "body": b"\1" * more})

    return app


@pytest.mark.parametrize("more", [0, 3, PART + 1])
@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART])
def test_an_answer_is_sent_in_parts(size, more):
    ((start, *parts),) = sent(large_answer(size, more))
    assert start["status"] == 200
    assert b"".join(part["body"] for part in parts) == bytes(size) + b"\1" * more
    assert max(len(part["body"]) for part in parts) <= PART
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


def test_large_answers_beyond_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "MAX_OF_ONE", 10 * PART)
    answers = sent(large_answer(4 * PART), n_times=3)
    assert [start["status"] for start, *_ in answers] == [200, 200, 429]
    body = b"".join(part["body"] for part in answers[2][1:])
    assert "not read yet" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [False, True])
def test_answers_that_are_not_read_are_counted(stream, leave, monkeypatch):
    body = {"model": NAME, "prompt": "a", "max_tokens": 3000, "logprobs": 20, "stream": stream}
    monkeypatch.setattr(memory, "MAX_OF_ONE", int(1.5 * memory.answer_bytes(3000, 20)))
    given = {"Content-Type": "application/json"}

    def ask(address):
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), given)
        return connection

    with serving() as address:
        silent = ask(address)
        while not address.engine.n_active:
            time.sleep(0.001)
        address.wait_until_idle()
        refused = ask(address).getresponse()
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert b"not read yet" in refused.read()
        if leave:
            silent.close()
        else:
            silent.getresponse().read()
        end = time.monotonic() + 20
        while (served := ask(address).getresponse()).status == 429:
            assert time.monotonic() < end, "the answer is still held"
            served.read()
        assert served.status == 200
        served.read()
