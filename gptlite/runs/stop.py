"""Stopping when asked to: Ctrl-C, SIGTERM, a terminal that closes."""

import contextlib
import os
import signal
import socket
import sys
import threading


class Stop:
    """While it is entered, the first of these signals is only noted, for the loop to end at the
    next step; the second one ends the process at once. Those that were ignored (`nohup`) stay so.

    Python runs its signal handlers between two of its own instructions, and a compiled step may
    last minutes. So a thread of its own learns of signals through the wake-up socket, to which they
    are written at once. It can be entered on the main thread only.
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
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # The handlers do nothing; but without one there is no wake-up.
        numbers = [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)]
        self._handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in dict.fromkeys(numbers)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self._write.close()
        self._thread.join()
        self._read.close()

    def _listen(self) -> None:
        while received := self._read.recv(1):
            if received[0] not in self._handlers:
                continue
            if self.requested:
                os._exit(128 + received[0])
            self.signal = received[0]
            with contextlib.suppress(OSError):  # the terminal may be gone
                print("\nstopping after this step; once more to stop at once", file=sys.stderr)
