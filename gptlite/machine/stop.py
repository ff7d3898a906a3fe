"""Stopping when asked to: Ctrl-C, SIGTERM, a terminal that closes."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import no_type_check


def _end(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, b"\nstopped\n")
    os._exit(128 + number)


@contextlib.contextmanager
def ends_on_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C ends the process, unless it is ignored, as in a background job."""
    handler = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread() and handler != signal.SIG_IGN
    if here:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if here:
            signal.signal(signal.SIGINT, handler)


# A handler must not be checked: beartype makes a check when a function is first called, and holds a
# lock meanwhile. A signal that came then would wait for that lock for ever.
@no_type_check
class Stop:
    """A context manager. Inside, the first of these signals sets a flag, so that the loop can end
    after the next dispatch; the second does what it would do outside: so the second Ctrl-C raises
    a `KeyboardInterrupt`. With `exits`, it ends the process at once. Signals that were ignored
    (`nohup`) stay ignored. In another thread than the main one, which gets no signals, it does
    nothing.

    Python runs signal handlers between bytecodes, so a handler waits for the dispatch in progress.
    """

    def __init__(self, *, exits: bool = False) -> None:
        self._exits = exits
        self.signal: int | None = None
        """The number of the signal that asked for a stop."""

    @property
    def requested(self) -> bool:
        """Whether a signal asked for a stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, as shells expect."""
        return 128 + (self.signal or 0)

    def __enter__(self) -> "Stop":
        numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
        if threading.current_thread() is not threading.main_thread():
            numbers = set()
        self._before = {
            number: signal.signal(number, self._set)
            for number in numbers
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _set(self, number: int, frame: object) -> None:
        if self.requested and self._exits:
            os._exit(128 + number)
        if self.requested:
            self.__exit__()
            signal.raise_signal(number)
        self.signal = number
        # Not `print`, because a handler may interrupt one. The terminal may be gone.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step; once more to stop at once\n")
