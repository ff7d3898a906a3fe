"""Training what a comparison lacks: one group of seeds after the other, until all is decided."""

import time
from collections.abc import Iterator

import jax

from gptlite.errors import require
from gptlite.machine.progress import log, progress_bar
from gptlite.research.comparison import AGAIN, Comparison
from gptlite.research.report import told
from gptlite.research.seeds import SeedsProgress

# The seeds of a group, at least: fewer decide hardly anything.
GROUP = 5
# Seconds of steps that tell how long the whole will take.
MEASURED = 3.0


def group_size(devices: int) -> int:
    """The seeds that are trained at the same time, if nothing else is said."""
    return -(-GROUP // devices) * devices


def conduct(
    comparison: Comparison, n_seeds: int, at_once: int | None = None, minutes: float | None = None
) -> None:
    """Train the variants that were entered from the seeds 0, 1, ..., at most `n_seeds`, in groups
    of `at_once` (default: `GROUP`, or the next number that all devices share evenly). After each
    group, the variants are looked at. One that is decided gets no more seeds.

    `minutes`: for all together. A group that would take longer is not begun.

    **Raises:** `UserError` if the first group would take longer than `minutes`, as its first
    seconds tell.
    """
    size = at_once or group_size(jax.device_count())
    base, *left = comparison.names
    clock = _Clock(minutes, len(comparison.names))
    for first in range(0, n_seeds, size):
        seeds = list(range(first, min(first + size, n_seeds)))
        for name in (base, *left):
            missing = comparison.missing(name, seeds)
            if not clock.has_time_for(name, len(missing)):
                log(f"{name} gets no more seeds: the {minutes:g} minutes are used up.")
                return
            together = min(len(missing), comparison.seeds_that_fit(name)) or 1
            for i in range(0, len(missing), together):
                group = missing[i : i + together]
                began = time.perf_counter()
                training = clock.checked(comparison.train(name, group), len(group))
                show(name, training, len(group))
                clock.per_seed[name] = (time.perf_counter() - began) / len(group)
        for name in list(left):
            result = comparison.look(name)
            log(f"after {seeds[-1] + 1} seeds: {told(result)}")
            if name != AGAIN and result.verdict and result.verdict.is_decided:
                left.remove(name)
        if not set(left) - {AGAIN}:
            return
        n_left = n_seeds - seeds[-1] - 1
        if n_left and clock.per_seed:
            at_most = n_left * sum(clock.per_seed.get(name, 0.0) for name in (base, *left)) / 60
            log(f"left: at most {n_left} seeds of {len(left) + 1}, {at_most:.1f} min")


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


class _Clock:
    """The time that is left."""

    def __init__(self, minutes: float | None, rows: int):
        self._minutes, self._rows, self._began = minutes, rows, time.perf_counter()
        self.per_seed: dict[str, float] = {}
        """Seconds of a seed, by the name of the variant."""

    def has_time_for(self, name: str, seeds: int) -> bool:
        """Whether `seeds` of a variant can be trained in time, as far as it is known."""
        if self._minutes is None or not seeds or not self.per_seed:
            return True
        seconds = seeds * self.per_seed.get(name, max(self.per_seed.values()))
        return time.perf_counter() - self._began + seconds <= 60 * self._minutes

    def checked(self, training: Iterator[SeedsProgress], seeds: int) -> Iterator[SeedsProgress]:
        """`training` of the base from the first `seeds`.

        **Raises:** `UserError` if all variants together would take longer than there is time.
        """
        began, is_known = time.perf_counter(), bool(self.per_seed) or self._minutes is None
        for progress in training:
            yield progress
            if is_known or progress.step_seconds < MEASURED or self._minutes is None:
                continue
            is_known = True
            seconds = (time.perf_counter() - began) / progress.step * progress.steps
            needed = seconds * self._rows / 60
            fitting = int(progress.steps * self._minutes / needed)
            require(
                needed <= self._minutes,
                f"{seeds} seeds each of {self._rows} variants would take about {needed:.1f} "
                f"minutes here: give --minutes more, or --training.steps about {fitting} in place "
                f"of {progress.steps}.",
            )
