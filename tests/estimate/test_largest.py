import math
from types import SimpleNamespace
from typing import Any

import pytest

from gptlite.estimate.hardware import HARDWARE
from gptlite.estimate.largest import TOLERANCE, TRIES, largest_batch
from gptlite.estimate.step import CompiledStep, memory_share

ANY: Any = None


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("start", [8, 32, 4096])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 33, 120, 1000, 10_001])
@pytest.mark.parametrize("kind", ["linear", "steps", "room", "refused"])
def test_the_largest_batch_is_found_with_few_tries(unit, start, limit, kind):
    """`limit` rows fit. `steps`: 20 % more memory from half of them on, as of a program that the
    compiler then divides in another way. `room`: the last fifth takes no more memory.
    `refused`: no size of what does not fit."""
    tried = []

    def used(rows):
        tried.append(rows)
        share = rows / (limit + 0.5)
        if kind == "steps" and rows < limit / 2:
            share /= 1.2
        if kind == "room" and 0.8 * limit < rows <= limit:
            share = 0.8
        return math.inf if kind == "refused" and share > 1 else 0.1 + 0.9 * share

    fits, fails = largest_batch(used, 0.1, start, unit)
    assert len(tried) == len(set(tried)) <= TRIES
    assert all(rows > 0 and rows % unit == 0 for rows in tried)
    assert fits <= limit
    assert fails is None or limit < fails
    if limit / 20 < start < limit * 20 and kind != "refused":
        assert fails is not None
        assert fails - fits <= max(unit, TOLERANCE * fits)
    elif start < limit * 20:
        assert fits >= limit // unit * unit / 2


def test_nothing_fits_beside_a_state_that_is_too_large():
    fits, fails = largest_batch(lambda rows: 1.5 + rows, 1.5, 64, 4)
    assert (fits, fails) == (0, 4)


class FakeCompiled:
    """A program that takes 20 GB."""

    def memory_analysis(self):
        return SimpleNamespace(
            argument_size_in_bytes=12e9,
            temp_size_in_bytes=8e9,
            output_size_in_bytes=12e9,
            alias_size_in_bytes=12e9,
            generated_code_size_in_bytes=0,
        )


def test_what_a_tpu_compiler_takes_fits():
    taken = CompiledStep(None, ANY, FakeCompiled(), "", 1.0)
    refused = CompiledStep(None, ANY, None, "too much", 1.0)
    v5e, h100 = HARDWARE["v5e"], HARDWARE["h100"]
    assert taken.used == 20e9
    assert memory_share(taken, v5e) == 1.0
    assert memory_share(taken, h100) == pytest.approx(20e9 / (0.75 * h100.memory))
    assert memory_share(refused, v5e) == math.inf
