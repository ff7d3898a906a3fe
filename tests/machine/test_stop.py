"""Signals, sent to a process of its own that is busy outside Python, as in a compiled step."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from gptlite.machine.stop import Stop

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)

# Hashing 1 MB blocks without Python in between, as a compiled step would.
PROGRAM = """
import hashlib, sys
from gptlite.machine.stop import Stop
data = bytes(400_000_000)
with Stop(exits=True) as stop:
    print("ready", flush=True)
    while not stop.requested:
        hashlib.sha256(data)  # nothing of Python's runs until this returns
    print("saved", flush=True)
    while "wait" in sys.argv:
        hashlib.sha256(data)
print("left", flush=True)
sys.exit(stop.exit_code)
"""


def start(*argv: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_without_exits_the_second_ctrl_c_is_a_keyboard_interrupt(capfd):
    """In a notebook, it must not end the process with all its variables."""
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("stopping after this step") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (HANGUP, 129)]
)
def test_the_first_signal_lets_the_step_end(number, code):
    process = start()
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert out == "saved\nleft\n"
    assert "stopping after this step" in error


@pytest.mark.processes
def test_the_second_signal_ends_it_at_once():
    process = start("wait")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""  # without another word
    assert time.monotonic() - began < 30


def test_ignored_signals_stay_ignored():
    before = signal.signal(HANGUP, signal.SIG_IGN)  # as nohup does
    try:
        with Stop() as stop:
            signal.raise_signal(HANGUP)
            time.sleep(0.1)
            assert not stop.requested
    finally:
        signal.signal(HANGUP, before)


def test_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_nothing_that_a_signal_calls_is_checked():
    """A check is made under a lock, in which the signal may have come."""
    for function in (Stop._set, Stop.__exit__, vars(Stop)["requested"].fget):
        assert not hasattr(function, "__wrapped__")
