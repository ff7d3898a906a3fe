"""How many steps a run may have, so that it ends in time."""

import math
from dataclasses import dataclass, field

from gptlite.training.fit import Position

# Seconds from the last evaluation to the end: a checkpoint, a picture, the result.
ENDING = 2.5
# Seconds that the first evaluation takes beside its tokens: its program, and that of the sample,
# are compiled.
COMPILING = 3.0
# The share of the time over which the pace is a mean. (A laptop's speed changes within minutes.)
MEMORY = 0.1
# A change of the number of steps by a smaller share than this is none.
SMALLEST = 0.01


@dataclass
class Deadline:
    """The end of a run, and what is known of its speed."""

    end: float
    """Seconds from the beginning of the run to its end."""
    evaluation_steps: float
    """An evaluation takes as long as so many steps. Assumed until one is measured."""
    _seconds: float = field(default=math.nan, init=False)
    _step_seconds: float = field(default=0.0, init=False)
    _step: int = field(default=0, init=False)
    _evaluated: bool = field(default=False, init=False)
    _pace: float = field(default=math.nan, init=False)
    """Seconds a step."""
    _weight: float = field(default=0.0, init=False)
    _pauses: list[float] = field(default_factory=list, init=False)
    """Seconds of the evaluations."""

    def steps(
        self, position: Position, seconds: float, planned: int, eval_every: int, *, evaluates: bool
    ) -> int:
        """The steps of the run, of which `planned` were to be. To be asked after every dispatch.
        `seconds`: from the beginning of the run to now. `evaluates`: whether an evaluation is to
        follow."""
        step = position.step
        self._measure(step, seconds, position.step_seconds)
        self._evaluated = evaluates
        if math.isnan(self._pace) or step >= planned:
            return planned
        left = self.end - ENDING - seconds
        number = len(self._pauses)
        if evaluates:
            left -= self._pause(number)
            number += 1
        # Each part of `eval_every` steps ends with an evaluation, and so does the last one.
        begin = step - step % eval_every
        while (seconds_left := left - self._pause(number)) > 0:
            steps = max(step, begin) + math.floor(seconds_left / self._pace)
            if steps <= begin + eval_every:
                break
            begin += eval_every
            left = seconds_left - (begin - max(step, begin - eval_every)) * self._pace
            number += 1
        else:  # no time for the evaluation of another part
            steps = max(step, begin)
        steps = max(steps, step + 1)
        return planned if abs(steps - planned) < SMALLEST * planned else steps

    def _measure(self, step: int, seconds: float, step_seconds: float) -> None:
        if not math.isnan(self._seconds):
            since, on_steps = seconds - self._seconds, step_seconds - self._step_seconds
            if self._evaluated:
                self._pauses.append(since - on_steps)
            else:
                on_steps = since  # with all that comes between steps
            keep = math.exp(-on_steps / (MEMORY * self.end))
            before = 0.0 if self._weight == 0 else keep * self._weight * self._pace
            self._weight = keep * self._weight + 1 - keep
            self._pace = (before + (1 - keep) * on_steps / (step - self._step)) / self._weight
        self._step, self._seconds, self._step_seconds = step, seconds, step_seconds

    def _pause(self, number: int) -> float:
        """Seconds of an evaluation; `number`: how many come before it in this process."""
        if not self._pauses:
            return self.evaluation_steps * self._pace + (COMPILING if number == 0 else 0.0)
        first, last = self._pauses[0], self._pauses[-1]
        return last if len(self._pauses) > 1 else max(first - COMPILING, first / 2)
