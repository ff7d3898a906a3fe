"""Training what a comparison lacks: one group of seeds after the other, until all is decided."""

import time
import traceback
from collections.abc import Iterator, Sequence

import jax

from gptlite.errors import UserError
from gptlite.machine.printed import printable
from gptlite.machine.progress import log, progress_bar
from gptlite.research.comparison import Comparison
from gptlite.research.journal import NotWrittenError
from gptlite.research.report import told
from gptlite.research.results import Result
from gptlite.research.seeds import SeedsProgress

# The seeds of a group, at least: fewer decide hardly anything.
GROUP = 5
# Seconds of steps that tell how long the whole will take.
MEASURED = 3.0


def group_size(devices: int) -> int:
    """The seeds that are trained at the same time, if nothing else is said."""
    return -(-GROUP // devices) * devices


def conduct(
    comparison: Comparison,
    n_seeds: int,
    at_once: int | None = None,
    clock: "Clock | None" = None,
    *,
    early: bool = True,
) -> list[str]:
    """Train the variants that were entered from the seeds 0, 1, ..., at most `n_seeds`, in groups
    of `at_once` (default: `GROUP`, or the next number that all devices share evenly). After each
    group, the variants are looked at. One that is decided gets no more seeds.

    `early`: see `Comparison.train`. `clock`: a group that would take longer than there is time, at
    the speed of what was trained before, is not begun.

    Gives the names of the variants whose training failed. Why was printed, and the others are
    trained all the same.

    **Raises:** `NotJudgedError` if the first group would take longer, as its first seconds tell.
    """
    for name, ratio in comparison.more_tokens().items():
        log(
            f"{name} reads {ratio:.3g} times the tokens of the base, and other windows: "
            "--equal tokens gives it as many"
        )
    clock = clock or Clock(None)
    size = at_once or group_size(jax.device_count())
    base, *variants = comparison.names
    # An interrupted command trained what it did not look at.
    left = [name for name in variants if not _is_done(comparison.look(name), early)]
    failed: list[str] = []
    for first in range(0, n_seeds, size):
        if not set(left) & set(comparison.judged):
            break
        seeds = list(range(first, min(first + size, n_seeds)))
        missing = {name: comparison.missing(name, seeds, early) for name in (base, *left)}
        rows = sum(map(bool, missing.values()))
        for name, group in missing.items():
            if not clock.has_time_for(name, len(group)):
                log(f"{name} gets no more seeds: the {clock.minutes:g} minutes are used up.")
                for each in left:
                    comparison.look(each)
                return failed
            together = min(len(group), comparison.seeds_that_fit(name)) or 1
            try:
                for i in range(0, len(group), together):
                    part = group[i : i + together]
                    training = comparison.train(name, part, early)
                    training = clock.checked(name, training, part, rows, len(group))
                    show(name, training, len(part))
            except Exception as error:
                if name == base or isinstance(error, NotJudgedError | NotWrittenError):
                    raise
                is_told = isinstance(error, UserError)
                log(str(error) if is_told else printable(traceback.format_exc()))
                log(f"{name} failed: it gets no more seeds.")
                failed.append(name)
                left.remove(name)
        for name in list(left):
            result = comparison.look(name)
            log(f"after {seeds[-1] + 1} seeds: {told(result)}")
            if _is_done(result, early):
                left.remove(name)
        n_left = n_seeds - seeds[-1] - 1
        if n_left and set(left) & set(comparison.judged) and any(missing.values()):
            at_most = n_left * clock.seconds_per_seed(base, *left) / 60
            log(f"left: at most {n_left} seeds of {len(left) + 1}, {at_most:.1f} min")
    return failed


def show(
    name: str, training: Iterator[SeedsProgress], seeds: int, text: str = "choice"
) -> SeedsProgress | None:
    """Train, with a line for each evaluation, and give the last progress."""
    # Its first evaluation, the next line of a log, may take minutes.
    log(f"training {name}, {seeds} seed{'s' * (seeds > 1)} ...")
    progress = None
    with progress_bar(name, unit="step") as bar:
        for progress in training:
            bar.total, bar.n = progress.steps, progress.step
            bar.refresh()
            if progress.val_losses is not None:
                losses = " ".join(f"{loss:.4f}" for loss in progress.val_losses)
                log(f"{name}: step {progress.step}/{progress.steps}  {text} losses {losses}")
    return progress


def _is_done(result: Result, early: bool) -> bool:
    """Whether more seeds of a variant would be for nothing. What is not judged, such as the base
    again, goes on as long as others do."""
    if result.variant.level is None or result.verdict is None:
        return False
    return result.verdict.is_decided and (early or not result.is_stopped)


class NotJudgedError(UserError):
    """There is no verdict, for want of time or of seeds, or because another process is at work:
    nothing is known to be wrong with the variant."""


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float | None):
        """It runs from now on. None: there is no limit."""
        self.minutes, self._began = minutes, time.perf_counter()
        self._per_seed: dict[str, float] = {}

    def seconds_per_seed(self, *names: str) -> float:
        """Of all these variants together, as far as they are known."""
        return sum(self._per_seed.get(name, 0.0) for name in names)

    def has_time_for(self, name: str, seeds: int) -> bool:
        """Whether `seeds` of a variant can be trained in time, as far as it is known."""
        if self.minutes is None or not seeds or not self._per_seed:
            return True
        seconds = seeds * self._per_seed.get(name, max(self._per_seed.values()))
        return time.perf_counter() - self._began + seconds <= 60 * self.minutes

    def checked(
        self,
        name: str,
        training: Iterator[SeedsProgress],
        seeds: Sequence[int],
        rows: int,
        n_seeds: int | None = None,
    ) -> Iterator[SeedsProgress]:
        """`training` of a variant from `seeds`, the first of so many `rows` if none was trained
        before. A row has `n_seeds`: not all of them may fit into memory together. None: `seeds`.

        **Raises:** `NotJudgedError` if all rows together would take longer than there is time.
        """
        began, first, since = time.perf_counter(), None, 0.0
        is_known = bool(self._per_seed) or self.minutes is None
        for progress in training:
            yield progress
            now = time.perf_counter()
            if first is None:
                first, since = progress, now
            if is_known or now - since < MEASURED:
                continue
            is_known = True
            before = since - began
            of_steps = (now - since) / (progress.step - first.step) * progress.steps
            n_seeds = n_seeds or len(seeds)
            of_steps *= n_seeds / len(seeds)
            used = (began - self._began) / 60
            needed = used + rows * (before + of_steps) / 60
            assert self.minutes is not None
            fitting = (60 * (self.minutes - used) / rows - before) / of_steps * progress.steps
            if needed > self.minutes:
                raise NotJudgedError(
                    f"What is left, {rows} times {n_seeds} seeds, would take about {needed:.1f} "
                    "minutes here: give --minutes more"
                    + (f", or --training.steps at most {int(fitting)}." if fitting >= 1 else ".")
                )
        self._per_seed[name] = (time.perf_counter() - began) / len(seeds)
