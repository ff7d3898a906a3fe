"""The endpoints, as OpenAI's own client sees them, and as one that breaks the rules does."""

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from support.servers import NAME, TOKENIZER, post, served_model, serving

from gptlite.config import SamplingConfig
from gptlite.generation.generate import generate
from gptlite.serving import (
    endpoints as endpoints_module,
    memory as memory_module,
    server as server_module,
)
from gptlite.serving.text import shown
from gptlite.text.tokenizer import ByteTokenizer

openai = pytest.importorskip("openai")
C = TINY.context_length


@pytest.fixture(name="address", scope="module")
def fixture_address():
    with serving() as address:
        yield address


@pytest.fixture(name="client", scope="module")
def fixture_client(address):
    with openai.OpenAI(base_url=address.url, api_key="none", max_retries=0) as client:
        yield client


def alone(prompt, new, config=None, seed=0, number=0):
    """What `generate` makes with the key of sample.py."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)[None]
    ids = generate(
        served_model(), jnp.asarray(TOKENIZER.encode(prompt))[None], new, config, keys=key
    )
    return TOKENIZER.decode(np.asarray(ids[0]))


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "gptlite"
    with pytest.raises(openai.NotFoundError, match=f"no model 'other': this server has '{NAME}'"):
        client.models.retrieve("other")


def test_a_completion_is_the_text_of_its_seed(client):
    answer = client.completions.create(model=NAME, prompt="abc", max_tokens=30, seed=7, user="me")
    (choice,) = answer.choices
    assert choice.text == alone("abc", 30, seed=7)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert answer.object == "text_completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 30, 33)
    default = client.completions.create(model=NAME, prompt="abc", seed=7)
    assert default.choices[0].text == alone("abc", 16, seed=7)


def test_without_a_seed_texts_differ(client):
    texts = {
        client.completions.create(model=NAME, prompt="a", max_tokens=40).choices[0].text
        for _ in range(3)
    }
    assert len(texts) == 3
    answer = client.completions.create(model=NAME, prompt=["a", "a", "a"], max_tokens=40)
    assert len({choice.text for choice in answer.choices}) == 3


@pytest.mark.parametrize(
    ("knobs", "config"),
    [
        ({"temperature": 0}, SamplingConfig(greedy=True)),
        ({"temperature": 0.7, "top_p": 0.8}, SamplingConfig(0.7, top_p=0.8)),
        ({"extra_body": {"top_k": 3, "min_p": 0.1}}, SamplingConfig(top_k=3, min_p=0.1)),
    ],
    ids=str,
)
def test_knobs_are_those_of_sampling(client, knobs, config):
    answer = client.completions.create(model=NAME, prompt="ab", max_tokens=25, seed=1, **knobs)
    assert answer.choices[0].text == alone("ab", 25, config, seed=1)


def test_several_prompts_and_several_texts_of_each(client):
    prompts = ["a", "bcd", "efghijklma"]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=9, n=2, seed=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    wanted = [alone(prompt, 9, seed=2, number=i) for prompt in prompts for i in range(2)]
    assert [choice.text for choice in answer.choices] == wanted
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (14, 54)
    ids = [TOKENIZER.encode(prompt).tolist() for prompt in prompts]
    answer = client.completions.create(model=NAME, prompt=ids, max_tokens=9, seed=2)
    assert [choice.text for choice in answer.choices] == wanted[::2]
    answer = client.completions.create(model=NAME, prompt=ids[1], max_tokens=9, seed=2)
    assert [choice.text for choice in answer.choices] == wanted[2:3]


def test_a_stream_is_the_text_in_pieces(client):
    stream = client.completions.create(
        model=NAME,
        prompt=["ab", "c"],
        max_tokens=200,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage.completion_tokens == 400
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks)
    for index, prompt in enumerate(["ab", "c"]):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert len(own) > 1
        assert "".join(choice.text for choice in own) == alone(prompt, 200, seed=3)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]


def test_a_stop_string_ends_a_text(client):
    whole = alone("ab", 60, seed=4)
    stop = whole[25:28]
    for words in ({"stop": stop}, {"stop": ["zzz", stop]}, {"stop": stop, "stream": True}):
        answer = client.completions.create(
            model=NAME, prompt="ab", max_tokens=60, seed=4, logprobs=1, **words
        )
        choices = [c.choices[0] for c in answer] if "stream" in words else answer.choices
        text = whole[: whole.index(stop)]
        assert "".join(choice.text for choice in choices) == text
        assert choices[-1].finish_reason == "stop"
        assert "".join(t for choice in choices for t in choice.logprobs.tokens) == text


def log_probs_of(ids):
    return np.asarray(jax.nn.log_softmax(eqx.filter_jit(served_model())(jnp.asarray(ids))))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new", [0, 1, 6])
def test_an_echoed_prompt_is_scored(client, new, stream):
    """As evaluation harnesses ask for it. The tolerance is that of float32 logits near 1, over a
    few layers."""
    answer = client.completions.create(
        model=NAME, prompt="abcde", max_tokens=new, echo=True, logprobs=2, seed=5, stream=stream
    )
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    assert text == "abcde" + (alone("abcde", new, seed=5) if new else "")
    ids = TOKENIZER.encode(text).tolist()
    log_probs = log_probs_of(ids)
    tokens, values, best, offsets = (
        [x for choice in choices for x in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert "".join(tokens) == text
    assert offsets == list(range(len(text)))
    assert values[0] is None
    assert best[0] is None
    for place in range(1, len(ids)):
        row = log_probs[place - 1]
        np.testing.assert_allclose(values[place], row[ids[place]], atol=1e-4)
        first, second = np.argsort(row)[::-1][:2]
        wanted = dict.fromkeys((int(first), int(second), ids[place]))  # each once
        assert list(best[place]) == [TOKENIZER.characters[i] for i in wanted]
        np.testing.assert_allclose(list(best[place].values()), row[list(wanted)], atol=1e-4)


def test_an_empty_prompt_begins_a_new_text(address):
    """After the token that ends a text, if there is one."""

    class Ended(ByteTokenizer):
        end_ids = (10,)

    model = served_model()
    with pytest.raises(openai.BadRequestError, match="at least one character"):
        ask(address.url, prompt="")
    with serving(model, tokenizer=Ended()) as other:
        answer = ask(other.url, prompt="", max_tokens=5, echo=True, logprobs=1, seed=0)
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), 0)[None]
    wanted = np.asarray(generate(model, jnp.asarray([[10]]), 5, keys=key)[0]).tolist()
    ends = wanted.index(10) if 10 in wanted else 5
    assert answer.choices[0].text == bytes(wanted[:ends]).decode()
    assert None not in answer.choices[0].logprobs.token_logprobs
    assert answer.usage.prompt_tokens == 1


def ask(url, **words) -> Any:
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        answer = client.completions.create(**({"model": NAME, "prompt": "a"} | words))
        return list(answer) if words.get("stream") else answer


def test_bytes_that_are_no_characters_have_names():
    assert shown(b"\xe2\x80") == "bytes:\\xe2\\x80"
    assert shown("é".encode()) == "é"


BAD = [
    ({"prompt": "xyz"}, "'x' .*not in the vocabulary"),
    ({"prompt": "a" * (C + 1)}, f"1 to {C} tokens .*got {C + 1}"),
    ({"prompt": "a" * 100}, "at most 48 characters, got 100"),
    ({"max_tokens": 131_072, "n": 5}, "up to 655,360 tokens"),
    ({"max_tokens": 30_000, "logprobs": 20}, "are 630,000 numbers, and may have 524,288"),
    ({"prompt": []}, "1 to 128 texts, got 0 prompts"),
    ({"prompt": [[]]}, f"1 to {C} tokens .*got 0"),
    ({"prompt": [1, 13]}, r"from 0 to 12, got \[13\]"),
    ({"prompt": [-1]}, r"from 0 to 12, got \[-1\]"),
    ({"prompt": [1, "a"]}, "prompt must be a text, ids, or a list"),
    ({"prompt": [True]}, "prompt must be a text, ids, or a list"),
    ({"prompt": ["a", [1.5]]}, "prompt must be a text, ids, or a list"),
    ({"prompt": {"a": 1}}, "prompt must be str or list"),
    ({"prompt": ["a"] * 129}, "1 to 128 texts, got 129 prompts"),
    ({"prompt": ["a"] * 13, "n": 10}, "1 to 128 texts, got 13 prompts with n 10"),
    ({"max_tokens": -1}, "max_tokens must be at least 0 .*got -1"),
    ({"max_tokens": 10**9}, "max_tokens must be at least 0 and at most"),
    ({"max_tokens": "5"}, "max_tokens must be int, got '5'"),
    ({"max_tokens": 1.5}, "max_tokens must be int, got 1.5"),
    ({"max_tokens": True}, "max_tokens must be int, got True"),
    ({"temperature": -0.5}, "temperature must be at least 0.0, got -0.5"),
    ({"temperature": 1e999}, "temperature must be at least 0.0"),
    ({"top_p": 0}, "top_p must be above 0.0 and at most 1.0, got 0"),
    ({"top_k": -1}, "top_k must be at least 0"),
    ({"min_p": 2}, "min_p must be at least 0.0 and at most 1.0, got 2"),
    ({"n": 0}, "n must be at least 1"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"stop": 5}, "stop must be str or list or None, got 5"),
    ({"stop": ""}, "stop must be a string or at most 16 strings"),
    ({"stop": ["a"] * 17}, "stop must be a string or at most 16 strings"),
    ({"stop": [1]}, "stop must be a string or at most 16 strings"),
    ({"logprobs": 21}, "logprobs must be at least 0 and at most 20, got 21"),
    ({"logprobs": True}, "logprobs must be int or None, got True"),
    ({"echo": 1}, "echo must be bool, got 1"),
    ({"stream": "yes"}, "stream must be bool, got 'yes'"),
    ({"stream_options": {"x": 1}}, "include_usage, true or false"),
    ({"best_of": 3}, "best_of is not supported"),
    ({"suffix": "end"}, "suffix is not supported"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    ({"logit_bias": {"1": 0, "2": 5}}, "logit_bias is not supported"),
    ({"temprature": 1}, r"no argument \['temprature'\]: known are model"),
    ({"model": 5}, "model must be str, got 5"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[str(words)[:40] for words, _ in BAD])
def test_a_bad_request_is_refused_with_a_sentence(address, words, sentence):
    body = json.dumps({"model": NAME, "prompt": "a"} | words).replace("Infinity", "1e999")
    status, answer, _ = post(address, body)
    assert status == 400
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert re.search(sentence, answer["error"]["message"])
    assert len(answer["error"]["message"]) < 600


RUBBISH = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": -Infinity}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"prompt": "a"}',
    b"[" * 100_000,
    b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    '{"model": "tiny", "prompt": "a"}'.encode("utf-16"),
]


@pytest.mark.parametrize("body", RUBBISH, ids=[str(body[:50]) for body in RUBBISH])
def test_rubbish_is_refused_with_a_sentence(address, body):
    status, answer, _ = post(address, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].endswith((".", "..."))


def test_what_is_no_endpoint_is_refused(address):
    for path, method, status in (
        ("/v1", "GET", 404),
        ("/page/nothing", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/chat/completions", "POST", 404),
        ("/../../etc/passwd", "GET", 404),
    ):
        found, answer, _ = post(address, None, path, method)
        assert found == status
        assert "error" in answer
    status, answer, _ = post(address, b"prompt=a", Content_Type="text/plain")
    assert status == 415
    assert "application/json, got 'text/plain'" in answer["error"]["message"]


def test_a_large_body_is_refused_while_it_comes(address, monkeypatch):
    monkeypatch.setattr(endpoints_module, "MAX_BODY", 1000)
    body = json.dumps({"model": NAME, "prompt": "a" * 1000})
    status, answer, _ = post(address, body)
    assert status == 413
    assert "at most 1,000 bytes" in answer["error"]["message"]


def test_a_long_request_does_not_hold_up_shorter_ones(address, monkeypatch):
    """Not while it is read, which takes longer than all else of a request that is refused."""
    begun, release, parse = threading.Event(), threading.Event(), endpoints_module.parse

    def slow(kind, body):
        if len(body) > 10**6:
            begun.set()
            release.wait(60)
        return parse(kind, body)

    monkeypatch.setattr(endpoints_module, "parse", slow)
    bodies = [json.dumps({"model": NAME, "prompt": "a" * 10**n}) for n in (2, 5, 6)]
    with ThreadPoolExecutor() as threads:
        long = threads.submit(post, address, bodies[2])
        assert begun.wait(60)
        for body in bodies[:2]:
            assert post(address, body)[0] == 400
        assert not long.done()
        release.set()
        assert long.result()[0] == 400


def test_a_request_that_does_not_end_is_given_up(address, monkeypatch):
    monkeypatch.setattr(endpoints_module, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", address.port), 10) as half_body:
        half_body.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert b"408 Request Timeout" in half_body.recv(2000)
    for start in (b"", b"POST /v1/comp"):
        with socket.create_connection(("127.0.0.1", address.port), 10) as half_head:
            half_head.sendall(start)
            assert half_head.recv(2000) == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(address, stream):
    body = {"model": NAME, "prompt": "a", "max_tokens": 100_000, "n": 3, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    while address.engine.n_active < 3:
        time.sleep(0.001)
    if stream:
        connection.getresponse().read(10)
    connection.close()
    address.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_cut_off(stream, monkeypatch):
    monkeypatch.setattr(memory_module, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.2)
    body = {"model": NAME, "prompt": "a", "max_tokens": 2000, "n": 4, "logprobs": 20}
    content = json.dumps(body | {"stream": stream}).encode()
    with serving() as address, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", address.port))
        silent.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        while not address.engine.n_active:
            time.sleep(0.001)
        address.wait_until_idle()
        end = time.monotonic() + 20
        while address.server.server_state.connections:
            assert time.monotonic() < end, "the connection is left"
            time.sleep(0.01)


def test_a_client_that_reads_slowly_is_given_all(monkeypatch):
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.2)
    body = {"model": NAME, "prompt": "a", "max_tokens": 2000, "n": 4, "logprobs": 20}
    with serving() as address, socket.socket() as slow:
        monkeypatch.setattr(address.server.config, "timeout_keep_alive", 0.1)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", address.port))
        content = json.dumps(body).encode()
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        begun, got = None, b""
        while part := slow.recv(2**16):
            begun = begun or time.monotonic()
            got += part
            # 2 MB a second: several times longer than two checks.
            time.sleep(max(0.0, begun + len(got) / 2e6 - time.monotonic()))
    head, _, answer = got.partition(b"\r\n\r\n")
    assert begun is not None
    assert time.monotonic() - begun > 1
    assert int(head.lower().partition(b"content-length: ")[2].split()[0]) == len(answer)
    assert len(json.loads(answer)["choices"]) == 4


def test_an_unexpected_error_is_an_error_object(address, monkeypatch):
    def fail(*_):
        raise ValueError("/home/someone/secret")

    monkeypatch.setattr(endpoints_module, "read_prompt", fail)
    status, answer, headers = post(address, json.dumps({"model": NAME, "prompt": "a"}))
    assert status == 500
    assert answer["error"]["message"] == "The server failed. Its log says why."
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_full_queue_says_when_to_come_again():
    body = {"model": NAME, "prompt": "a", "max_tokens": 100_000}
    given = {"Content-Type": "application/json"}
    with serving(max_rows=1, max_waiting=2) as address:
        connections = []
        for n, waiting in ((1, 0), (2, 2)):
            connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)
            connection.request("POST", "/v1/completions", json.dumps(body | {"n": n}), given)
            connections.append(connection)
            while not (address.engine.n_active and address.engine.n_waiting == waiting):
                time.sleep(0.001)
        status, answer, headers = post(address, json.dumps(body))
        assert status == 429
        assert answer["error"]["code"] == "rate_limit_exceeded"
        assert int(headers["Retry-After"]) >= 1
        _, health, _ = post(address, None, "/health", "GET")
        assert health == {"status": "ok", "active": 1, "waiting": 2}
        for connection in connections:
            connection.close()
        address.wait_until_idle()
        assert ask(address.url, max_tokens=3).choices[0].text


def test_a_failure_of_the_engine_says_nothing_of_the_machine(address, monkeypatch, capsys):
    step = address.engine._batch.step

    def fail():
        raise ValueError("/home/someone/secret")

    monkeypatch.setattr(address.engine._batch, "step", fail)
    for stream in (False, True):
        with pytest.raises(openai.APIError, match="server failed") as caught:
            ask(address.url, stream=stream)
        assert "secret" not in str(caught.value)
    monkeypatch.setattr(address.engine._batch, "step", step)
    assert len(ask(address.url, max_tokens=3).choices[0].text) == 3
    assert "/home/someone/secret" in capsys.readouterr().err


def test_a_host_of_another_name_is_refused(address):
    for host in (
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:80",
        "127.0.0.1:80@evil.example",
        "127.0.0.1:80.evil.example",
        "[127.0.0.1].evil.example",
        "",
    ):
        status, answer, headers = post(address, None, "/v1/models", "GET", Host=host)
        assert status == 403
        assert "must name 127.0.0.1" in answer["error"]["message"]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert post(address, None, "/v1/models", "GET", Host="127.0.0.1:8000")[0] == 200


def test_answers_tell_browsers_to_keep_out(address):
    _, _, headers = post(address, None, "/v1/models", "GET", Origin="http://evil.example")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers
    with serving(allow_origins=["http://page.example"]) as other:
        allowed, refused = (
            post(other, None, "/v1/models", "GET", Origin=origin)[2]
            for origin in ("http://page.example", "http://evil.example")
        )
        asked = {
            "Origin": "http://page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        connection = http.client.HTTPConnection("127.0.0.1", other.port, timeout=30)
        connection.request("OPTIONS", "/v1/completions", None, asked)
        assert connection.getresponse().status == 200
        connection.close()
    assert allowed["Access-Control-Allow-Origin"] == "http://page.example"
    assert "Access-Control-Allow-Origin" not in refused


def test_a_key_is_asked_for():
    with serving(hosts=None, api_key="secret") as address:
        assert ask(address.url, max_tokens=3).choices[0].text
        for header in ("", "Bearer", "Bearer wrong", "secret", "Bearer secretx", "Bearer \xe9"):
            status, answer, headers = post(
                address, None, "/v1/models", "GET", Authorization=header, Host="any.example"
            )
            assert status == 401
            assert answer["error"]["code"] == "invalid_api_key"
            assert headers["WWW-Authenticate"] == "Bearer"
        right = {"Authorization": "bearer secret"}
        assert post(address, None, "/v1/models", "GET", **right)[0] == 200


def test_idle_connections_of_one_client_keep_no_other_out(monkeypatch):
    """Neither those that send nothing, nor those that send half a request."""
    monkeypatch.setattr("gptlite.serving.server.MAX_CONNECTIONS", 40)
    monkeypatch.setattr("gptlite.serving.server.MANY_CONNECTIONS", 20)
    half = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
    with serving() as address, contextlib.ExitStack() as stack:
        client = stack.enter_context(openai.OpenAI(base_url=address.url, api_key="none"))
        create = client.completions.create
        streamed = create(model=NAME, prompt="a", stream=True, max_tokens=2000)
        next(streamed)
        for i in range(100):
            idle = socket.create_connection(("127.0.0.1", address.port))
            stack.enter_context(idle)
            idle.sendall(half if i % 2 else b"")
        status, answer, _ = post(address, json.dumps({"model": NAME, "prompt": "a"}))
        assert (status, len(answer["choices"])) == (200, 1)
        assert [piece.choices[0].finish_reason for piece in streamed][-1] == "length"


BEGIN = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
ENDLESS = {
    "address": (b"GET /", b"a"),
    "header": (BEGIN + b"x: ", b"a"),
    "headers": (BEGIN, b"x: y\r\n"),
    "size of a chunk": (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a"),
    "trailers": (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_head_without_end_ends_the_connection(what):
    begin, more = ENDLESS[what]
    with serving() as address, socket.create_connection(("127.0.0.1", address.port), 10) as long:
        sent = 0
        with contextlib.suppress(OSError):
            long.sendall(begin)
            while sent < 2**25:
                long.sendall(more * (2**16 // len(more)))
                sent += 2**16
    assert sent < 2**24
