"""Log lines and progress bars, on standard output."""

import sys

from tqdm import tqdm


def log(message: str) -> None:
    """Print a line, above any progress bar."""
    tqdm.write(message, file=sys.stdout)
    sys.stdout.flush()


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
