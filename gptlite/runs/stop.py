"""Stopping when asked to: Ctrl-C, SIGTERM, a terminal that closes."""

import contextlib
import os
import signal


class Stop:
    """While it is entered, the first of these signals only sets a flag, for the loop to end after
    the next dispatch; the second ends the process at once. Signals that were ignored (`nohup`) stay
    ignored. It can be entered on the main thread only.

    Python runs signal handlers between two of its own instructions: after the compiled steps that
    are under way, which `fit` keeps short.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The number of the signal that asked for a stop."""

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.signal or 0)

    def __enter__(self) -> "Stop":
        numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
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
        if self.requested:
            os._exit(128 + number)
        self.signal = number
        # Not print: a handler may interrupt one. And the terminal may be gone.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step; once more to stop at once\n")
