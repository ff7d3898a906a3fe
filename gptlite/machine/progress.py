"""Log lines and progress bars, on standard output."""

import errno
import re
import sys
from typing import TextIO

from tqdm import tqdm

from gptlite.errors import UserError
from gptlite.machine.printed import printable

# Characters of an error message.
MAX_SENTENCE = 4000


def log(message: str, file: TextIO | None = None) -> None:
    """Print `message` as a line, above any progress bar. `file`: default standard output."""
    stream = sys.stdout if file is None else file
    tqdm.write(printable(message), file=stream)
    stream.flush()


def sentence_of(error: BaseException) -> str | None:
    """The sentence that a user is told of an error; None if it is unexpected, a mistake of the
    program's."""
    if isinstance(error, UserError):
        return re.sub(r"(?<!\.)\.\.$", ".", str(error))  # after a reason that is a sentence
    if isinstance(error, KeyboardInterrupt):
        return "stopped"
    if isinstance(error, OSError):
        is_gone = error.errno == errno.ENOENT and error.filename is None
        return "The working folder does not exist any more." if is_gone else f"{error}."
    if isinstance(error, FloatingPointError):
        reason = str(error).partition("\n")[0]
        return (
            "a number is not finite, which JAX_DEBUG_NANS or JAX_DEBUG_INFS makes an error: "
            f"{reason}. --debug shows where."
        )
    # XLA's error, recognised by its text: this module does not import JAX.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return (
            "this does not fit into memory: use a smaller model or batch, or less at once "
            "(in training, --training.accumulation; in samples, --num-samples; in a comparison, "
            "--seeds-at-once)."
        )
    return None


def print_error(sentence: str) -> None:
    """Print an error on standard error."""
    sentence = printable(sentence)
    # It may repeat a string of a run, of any length.
    cut = sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[:MAX_SENTENCE]} ..."
    print(f"error: {cut}", file=sys.stderr, flush=True)


def progress_bar(
    description: str, total: int | None = None, *, unit: str, done: int = 0, delay: float = 0.0
) -> tqdm:
    """A progress bar where standard output is a terminal, and nothing elsewhere.

    It starts at `done` of `total`, appears after `delay` seconds, and is removed at its end.
    """
    return tqdm(
        desc=description,
        total=total,
        initial=done,
        unit=unit,
        unit_scale=unit != "step",
        delay=delay,
        leave=False,
        file=sys.stdout,
        disable=not sys.stdout.isatty(),
        dynamic_ncols=True,
    )
