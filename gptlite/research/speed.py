"""How much faster a variant trains than its base, measured by turns."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from gptlite.config import Config
from gptlite.research.seeds import fit_seeds
from gptlite.research.statistics import median_interval
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split

# The probability that a ratio of speeds is outside of its interval, at most, if what else the
# machine does changes from one dispatch to the next.
MISSED = 0.001
# An interval whose ends are so near to its middle, as a share of it, is narrow enough; so many
# measurements are, on a machine on which it never is.
NARROW, MOST = 0.01, 60


def ratio_of(ratios: Sequence[float], missed: float = MISSED) -> tuple[float, float]:
    """The ratio of speeds that was measured, and the largest error of its logarithm, but for the
    probability `missed`."""
    low, middle, high = median_interval(ratios, missed)
    error = max(high / middle, middle / low) if low > 0 else math.inf
    return middle, math.log(error)


def tolerance(ratios: Sequence[float], share: float, fall: float, missed: float = MISSED) -> float:
    """The difference of losses that an error in a variant's number of steps may make: it has
    `share` times the base's, and was to have the measured ratio of speeds.

    `fall`: what the base's loss falls by in the second half of its steps, of which the number is
    then doubled. It also falls because the learning rate does, so this is more than a run of twice
    the steps would gain."""
    ratio, error = ratio_of(ratios, missed)
    return (error + abs(math.log(share / ratio))) * abs(fall) / math.log(2)


def speed_ratios(
    base: Config,
    variant: Config,
    tokenizer: Tokenizer,
    split: Split,
    at_once: int,
    missed: float = MISSED,
) -> list[float]:
    """The base's seconds per step over the variant's, with `at_once` seeds at the same time, in
    short dispatches of one after the other: whatever else the machine does slows both. The order
    alternates, so a copy of the base is as often faster as slower. `missed`: see `ratio_of`."""
    seconds = [seconds_per_step(config, tokenizer, split, at_once) for config in (base, variant)]
    for run in seconds:
        next(run)  # where the number of steps in a dispatch settles
    ratios: list[float] = []
    while len(ratios) < MOST:
        if len(ratios) % 2:
            of_base, of_variant = (next(run) for run in seconds)
        else:
            of_variant, of_base = (next(run) for run in reversed(seconds))
        ratios.append(of_base / of_variant)
        if ratio_of(ratios, missed)[1] < NARROW:
            break
    return ratios


def seconds_per_step(
    config: Config, tokenizer: Tokenizer, split: Split, at_once: int
) -> Iterator[float]:
    """Those of one dispatch after the other, without evaluations."""
    steps = config.training.log_every * (MOST + 2)
    short = dataclasses.replace(config.training, steps=steps, eval_every=steps)
    config = dataclasses.replace(config, training=short)
    step, before = 0, 0.0
    for progress in fit_seeds(config, tokenizer, range(at_once), split):
        yield (progress.step_seconds - before) / (progress.step - step)
        step, before = progress.step, progress.step_seconds
