"""The largest batch that fits into a device's memory."""

import math
from collections.abc import Callable
from typing import Any

from gptlite.estimate.hardware import Hardware
from gptlite.estimate.step import (
    CompiledStep,
    compile_step,
    memory_share,
    size_on_device,
    usable_memory,
)
from gptlite.machine.progress import log
from gptlite.training.step import TrainSteps

# To compile a step takes 10 seconds to minutes.
TRIES = 8
# Which share of the batch may stay unknown.
TOLERANCE = 0.02
# How many times the largest batch that fits is tried next, at most.
GROWTH = 16


def largest_step(
    model: Any, make_steps: Callable[[int], TrainSteps], rows: int, hardware: Hardware
) -> CompiledStep:
    """The step with the most rows that fit, within `TOLERANCE`; the smallest, if none fits. Logs
    what it tries, `rows` first."""
    usable, tried = usable_memory(hardware), {}
    steps = make_steps(rows)
    shards = steps.mesh.shape["data"] * steps.mesh.shape["fsdp"]

    def used(rows: int) -> float:
        step = tried[rows] = compile_step(model, make_steps(rows))
        size = step.refusal or f"{step.used / 1e9:.2f} GB of {usable / 1e9:.2f}"
        log(f"{rows:,} rows: {size} ({step.seconds:.0f} s)")
        return memory_share(step, hardware)

    fits, fails = largest_batch(
        used,
        size_on_device(steps.abstract_state(model)) / usable,
        rows,
        shards * (steps.training.accumulation or 1),
    )
    if fits and fails is None:
        log(f"{fits:,} rows fit. More were not tried.")
    elif fits:
        log(f"{fits:,} rows fit, {fails:,} do not.")
    else:
        log(f"No batch fits: {fails:,} rows do not.")
    return tried[fits or fails]


def largest_batch(
    used: Callable[[int], float], state: float, start: int, unit: int
) -> tuple[int, int | None]:
    """The most rows that are known to fit, and the fewest that are known not to (None: all that
    were tried fit).

    **Arguments:**

    - `used(rows)`: which share of the memory a step with so many rows takes; infinite, if the
      compiler only says that it is too much. It should grow with the rows.
    - `state`: the share that parameters and optimizer take.
    - `start`: the rows to try first, a multiple of `unit`, as are all.
    """
    known = {0: state}
    fits, fails = 0, None
    rows, before, slow = start, math.inf, 0
    for _ in range(TRIES):
        known[rows] = used(rows)
        if known[rows] <= 1:
            fits = max(fits, rows)
        else:
            fails = rows if fails is None else min(fails, rows)
        step = max(unit, int(fits * TOLERANCE) // unit * unit)
        if fails is not None and fails - fits <= step:
            break
        # Memory is nearly linear in the rows: a line through the two sizes nearest to the limit.
        # Not so where the compiler makes room by computing more: then the middle.
        finite = sorted(
            (size for size in known if math.isfinite(known[size])), key=lambda n: abs(known[n] - 1)
        )
        a, b = (*finite, rows)[:2]
        slope = (known[b] - known[a]) / (b - a)
        between = math.inf if fails is None else fails - fits
        slow = slow + 1 if between > 0.6 * before else 0
        before = between
        if 0 < slope < math.inf and slow < 2:
            rows = int(a + (1 - known[a]) / slope)
        else:
            rows = fits * 5 // 4 if fails is None else math.isqrt(max(fits, unit) * fails)
        rows = max(rows // unit * unit, fits + step)
        rows = min(rows, GROWTH * fits if fails is None else fails - step)
        if rows in known:
            rows = fits + step
    return fits, fails
