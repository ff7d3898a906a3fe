"""gptlite/planning/deadline.py: runs that end in time."""

import numpy as np
import pytest

from gptlite.planning.deadline import ENDING, Deadline
from gptlite.training.fit import Position


def train(
    seconds,
    planned,
    *,
    pace=lambda clock: 0.05,
    begin=5.0,
    pause=lambda number: 1.0 + 2.0 * (number == 0),
    guess=20.0,
    start=0,
    eval_every=None,
):
    """A run with a clock of its own: when it ends, and its steps. `pace`: seconds a step at a time
    of the clock. `pause`: seconds of an evaluation. `begin`: when the first step begins."""
    deadline = Deadline(seconds, guess)
    clock, step, steps, on_steps, number, count = begin, start, planned, 0.0, 0, 1
    eval_every = eval_every or max(1, round(planned / 3.5))
    while step < steps:
        count = min(count, eval_every - step % eval_every, steps - step)
        spent = sum(pace(clock) for _ in range(count))
        step, on_steps, clock = step + count, on_steps + spent, clock + spent
        due = step % eval_every == 0 or step == steps
        position = Position(step, step_seconds=on_steps)
        steps = deadline.steps(position, clock, steps, eval_every, evaluates=due)
        assert steps >= step
        if due:
            clock += pause(number)
            number += 1
        count = max(1, min(20, int(2.0 / (spent / count))))
    return clock + ENDING, steps


@pytest.mark.parametrize("minutes", [0.5, 1, 5, 30, 120])
@pytest.mark.parametrize("wrong", [0.3, 0.7, 1.0, 1.5, 4.0])
def test_a_run_ends_in_time_however_wrong_its_number_of_steps_was(minutes, wrong):
    """Within the 5 % that `--minutes` promises."""
    right = 60 * minutes / 0.05
    end, steps = train(60 * minutes, round(wrong * right))
    assert end == pytest.approx(60 * minutes, rel=0.05)
    assert steps <= right


def test_a_machine_may_become_slower_or_faster():
    for factor in (0.5, 2.0):
        end, _ = train(300, 6000, pace=lambda clock, f=factor: 0.05 * (f if clock > 150 else 1))
        assert end == pytest.approx(300, rel=0.05)
    noise = np.random.default_rng(0)
    end, _ = train(300, 6000, pace=lambda clock: 0.05 * noise.lognormal(0, 0.5))
    assert end == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
def test_evaluations_may_take_longer_or_shorter_than_was_assumed(seconds):
    """The first one compiles its program."""
    end, _ = train(120, 2000, pause=lambda number: seconds + 3.0 * (number == 0))
    assert end == pytest.approx(120, rel=0.05)


def test_evaluations_after_few_steps():
    """Of 2,400 steps that there is time for, a sixth goes to evaluations."""
    end, steps = train(120, 2000, pause=lambda number: 0.5, eval_every=50)
    assert end == pytest.approx(120, rel=0.05)
    assert steps < 2000


def test_steps_that_take_long():
    """A step of 8 s: the run ends at the step that is nearest to the end."""
    end, steps = train(120, 30, pace=lambda clock: 8.0, guess=0.1)
    assert end <= 120 * 1.05
    assert steps == pytest.approx((120 - 5 - 4 - ENDING) / 8, abs=1.5)


def test_a_small_change_is_none():
    """The schedule is not disturbed for a hundredth."""
    end, steps = train(120, planned := 2120)
    assert steps == planned
    assert end == pytest.approx(120, rel=0.05)


def test_time_that_is_up_ends_the_run_at_once():
    """After the second dispatch, because the first one does not tell the pace."""
    _, steps = train(60, 1000, begin=100.0)
    assert steps <= 22


def test_a_resumed_run_has_what_is_left():
    """As if it had been trained for 100 of 300 s before."""
    end, steps = train(300, 5600, begin=105.0, start=1900, eval_every=1600)
    assert end == pytest.approx(300, rel=0.05)
    assert steps == pytest.approx(1900 + (300 - 105 - 6) / 0.05, rel=0.03)
