"""serve.py as it is typed: a run from a folder, until a signal ends it."""

import contextlib
import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TEXT, run_script, tiny_run

from gptlite.serving.server import Server, open_socket, run_server


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory):
    """A folder with a run."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "text.txt").write_text(TEXT)
    assert run_script("train.py", *tiny_run(), "--run", "small", folder=folder).code == 0
    return folder


@contextlib.contextmanager
def serving(folder, *words, **environment):
    """The process and its port."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "serve.py"), "--port", "0", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 120)[0]
        line = process.stdout.readline()
        found = re.search(r"serving small: a page at http://.*:(\d+), and", line)
        assert found, line + process.stdout.read()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


def ask(port, key=None, **words):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    body = {"model": "small", "prompt": "The", "seed": 3} | words
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


@pytest.mark.processes
def test_serve_finishes_what_is_running_when_it_is_told_to_stop(folder):
    with serving(folder) as (process, port):
        text = json.loads(ask(port, max_tokens=40).read())["choices"][0]["text"]
        words = ("--prompt", "The", "--seed", "3", "--max-new-tokens", "40")
        assert run_script("sample.py", *words, folder=folder).out == text + "\n"
        stream = ask(port, max_tokens=10_000, stream=True)
        assert stream.read(10)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError, match=r"refused|reset|closed"):
            ask(port)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(30) == 0
        assert process.communicate()[0] == "stopped\n"


@pytest.mark.processes
def test_serve_gives_up_what_takes_too_long(folder):
    with serving(folder) as (process, port):
        stream = ask(port, max_tokens=100_000, n=4, stream=True)
        assert stream.read(10)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert b"The model was stopped: the server ends" in stream.read()
        said = process.communicate(timeout=30)[0]
        assert process.returncode == 0
        assert time.monotonic() - begun < 20
        assert said == "stopped\n"


@pytest.mark.processes
def test_a_second_signal_ends_what_is_running(folder):
    with serving(folder) as (process, port):
        stream = ask(port, max_tokens=100_000, n=4, stream=True)
        assert stream.read(10)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert b"The model was stopped: the server ends" in stream.read()
        assert process.communicate(timeout=30)[0] == "stopped\n"
        assert process.returncode == 0
        assert time.monotonic() - begun < 8


@pytest.mark.processes
def test_a_signal_as_soon_as_it_answers_ends_it(folder):
    with serving(folder) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "stopped\n"
        assert process.returncode == 0


def test_a_signal_before_it_answers_ends_it(monkeypatch):
    """Uvicorn has no handlers yet."""
    ends = []

    def run(self, sockets):
        signal.raise_signal(signal.SIGTERM)
        ends.append(self.should_exit)

    async def app(scope, receive, send):
        pass

    monkeypatch.setattr(Server, "run", run)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with open_socket("127.0.0.1", 0) as listening:
        run_server(app, listening, lambda: None, lambda: None)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ends == [True]


@pytest.mark.processes
def test_serve_takes_the_key_from_the_environment(folder):
    with serving(folder, "--host", "0.0.0.0", GPTLITE_API_KEY="secret") as (_, port):
        assert ask(port).status == 401
        assert ask(port, "wrong").status == 401
        assert ask(port, "secret", max_tokens=2).status == 200


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--host", "0.0.0.0"], "Others reach this server at 0.0.0.0: give --api-key"),
        (["--host", "192.0.2.1", "--api-key", "x"], "cannot listen at '192.0.2.1', port 8000"),
        (["--host", "no such host", "--api-key", "x"], "cannot listen at 'no such host'"),
        (["--host", "a..b", "--without-key"], "cannot listen at 'a..b'"),
        (["--allow-origin", "http://a.example/"], "got 'http://a.example/'"),
        (["--run", "nothing", "--port", "0"], "nothing"),
        (["--api-key", ""], "api_key must have at least one character"),
        (["--api-key", "gärtner"], "The API key must be printable ASCII"),
        (["--api-key", " x"], "without spaces around them"),
        (["--port", "70000"], "port must be at least 0 and at most 65535, got 70000"),
        (["--rows", "0"], "rows must be at least 1"),
    ],
    ids=str,
)
def test_serve_refuses_what_it_cannot_do(folder, words, sentence):
    answer = run_script("serve.py", *words, folder=folder)
    assert answer.code == 2
    assert sentence in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.processes
def test_a_port_in_use_is_named(folder):
    with serving(folder) as (_, port):
        answer = run_script("serve.py", "--port", str(port), folder=folder)
    assert answer.code == 2
    assert (
        f"cannot listen at '127.0.0.1', port {port}: Address already in use. --port 0" in answer.err
    )
