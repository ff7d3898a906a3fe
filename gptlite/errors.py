"""Errors that are told to the user in a sentence."""

import contextlib
from collections.abc import Iterator

from gptlite.machine.printed import printable


class UserError(ValueError):
    """What the user asked for cannot be done: a sentence, with escapes for control characters."""

    def __str__(self) -> str:
        return printable(super().__str__())


def require(holds: bool, sentence: str) -> None:
    """Raise `UserError(sentence)` unless `holds`."""
    if not holds:
        raise UserError(sentence)


@contextlib.contextmanager
def told(sentence: str) -> Iterator[None]:
    """Whatever a library raises inside, as a `UserError`: `sentence`, and the reason. Those that
    are written in Rust raise plain `Exception`s, and their panics are no `Exception`s at all."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        nothing = "it is empty" if kind == "StopIteration" else f"{kind} without a reason"
        reason = str(error).strip().partition("\n")[0][:300] or nothing
        raise UserError(f"{sentence}: {reason.removesuffix('.')}.") from error
