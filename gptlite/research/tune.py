"""Base and variants tuned alike, before they are compared: the same number of points for each, from
the same seeds, on the choice text."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from scipy.stats import qmc

from gptlite.config import Config
from gptlite.errors import UserError, require
from gptlite.machine.fields import annotations
from gptlite.machine.progress import log
from gptlite.research.comparison import Comparison
from gptlite.research.conduct import Clock, NotJudgedError, show
from gptlite.research.equal import Equal

# The seeds that all points are trained from: others than those of comparisons.
SEEDS = (100_000, 100_001)
# Without a range, a knob is tuned from its value divided by this to its value times this.
AROUND = 4.0


@dataclass(frozen=True)
class Knob:
    """A number in a config, and the range in which it is looked for."""

    section: str
    field: str
    bounds: tuple[float, float] | None
    """None: around the value that a config has."""

    @property
    def name(self) -> str:
        """SECTION.FIELD."""
        return f"{self.section}.{self.field}"

    def at(self, config: Config, place: float) -> float:
        """The value at a place from 0 to 1 of the range, evenly in its logarithm."""
        value = getattr(getattr(config, self.section), self.field)
        low, high = self.bounds or (value / AROUND, value * AROUND)
        return low * (high / low) ** place


def parse_knob(text: str, config: Config) -> Knob:
    """`SECTION.FIELD`, or `SECTION.FIELD=LOW,HIGH`.

    **Raises:** `UserError` if that is no number of the config, or the range is none.
    """
    name, equals, values = text.partition("=")
    section, _, field = name.strip().replace("-", "_").partition(".")
    part = getattr(config, section, None) if section in ("model", "optimizer", "training") else None
    kind = annotations(type(part)).get(field) if part is not None else None
    kinds = get_args(kind) if get_args(kind) else (kind,)
    require(
        float in kinds or any(float in get_args(k) for k in kinds),
        "--tune takes a number of model, optimizer or training, such as optimizer.learning_rate, "
        f"got {name!r}.",
    )
    if not equals:
        value = getattr(part, field)
        require(
            bool(value),
            f"--tune {name} needs a range, because its value is {value}: {name}=LOW,HIGH.",
        )
        return Knob(section, field, None)
    try:
        low, high = map(float, values.split(","))
    except ValueError as error:
        raise UserError(f"--tune {name} takes a range LOW,HIGH, got {values!r}.") from error
    require(0 < low < high < math.inf, f"--tune {name} takes a range 0 < LOW < HIGH, got {values}.")
    knob = Knob(section, field, (low, high))
    for place in (0.0, 1.0):  # or an error, if it is out of the bounds of the field
        _turned(config, {knob: knob.at(config, place)})
    return knob


def tune(
    comparison: Comparison,
    configs: Mapping[str, Config],
    knobs: Sequence[Knob],
    n_points: int,
    equal: Equal,
    clock: Clock | None = None,
) -> tuple[dict[str, Config], dict[str, tuple[str, Config]]]:
    """`configs`, the base first, each with its best values of `knobs` among `n_points`, which fill
    the range evenly (Halton, 1960: of a single knob the middle first, then those of the halves).
    All are trained as they are to be compared, with what is to be equal. And the twins of those
    whose values are not the base's: see `Variant.twin`.

    **Raises:** `UserError` if a value is out of its bounds, or a config diverges with all values;
    `NotJudgedError` if that takes longer than there is time.
    """
    places = qmc.Halton(len(knobs), scramble=False).random(n_points + 1)[1:].tolist()
    # A mistake is found before anything is trained.
    points = {
        name: [_point(name, config, knobs, place) for place in places]
        for name, config in configs.items()
    }
    base_name, base = next(iter(configs.items()))
    best, twins, of_base = {}, {}, {}
    clock = clock or Clock(None)
    left = len(configs) * n_points
    for name, config in configs.items():
        steps = config.training.steps
        if config is not base:
            steps = comparison.equal_steps(config, base, equal, len(SEEDS))
        of = comparison.untuned(config, base, equal)
        best[name], values = _best(comparison, name, points[name], steps, of, clock, left)
        left -= n_points
        of_base = of_base or values
        if values != of_base:
            turned = {knob: values[knob.name] for knob in knobs}
            config = _turned(base, turned)
            twin = f"{base_name}, {_told(values)}"
            if any(name == twin and other != config for name, other in twins.values()):
                twin = f"{base_name}, {_told(values, '.17g')}"  # rounded, it has another's name
            twins[name] = (twin, config)
    return best, twins


Point = tuple[Config, dict[str, float]]
"""A config, and the values of its knobs."""


def _point(name: str, config: Config, knobs: Sequence[Knob], place: Sequence[float]) -> Point:
    values = {}
    for knob, x in zip(knobs, place, strict=True):
        own = getattr(getattr(config, knob.section), knob.field)
        require(
            bool(own) or knob.bounds is not None,
            f"--tune {knob.name} needs a range, because its value in {name} is {own}: "
            f"{knob.name}=LOW,HIGH.",
        )
        values[knob] = knob.at(config, x)
    return _turned(config, values), {knob.name: value for knob, value in values.items()}


def _best(
    comparison: Comparison,
    name: str,
    points: Sequence[Point],
    steps: int,
    of: str,
    clock: Clock,
    left: int,
) -> Point:
    """The best of `points`, which are the first of what is `left` to be trained.

    **Raises:** `UserError` if it diverges with all of them.
    """
    found = []
    for number, (config, values) in enumerate(points, 1):
        what = f"{name} ({number} of {len(points)}: {_told(values)})"
        training = dataclasses.replace(config.training, steps=steps, eval_every=steps)
        short = dataclasses.replace(config, training=training)
        losses = comparison.tuning_losses(short, SEEDS)
        if losses is None:
            if not clock.has_time_for(what, len(SEEDS)):
                raise NotJudgedError(f"The {clock.minutes:g} minutes are used up by the tuning.")
            running = comparison.train_to_tune(name, short, values, SEEDS, of)
            progress = show(what, clock.checked(what, running, SEEDS, left), len(SEEDS))
            losses = progress and progress.val_losses
        left -= 1
        assert losses is not None
        mean = float(np.mean(losses))
        found.append((mean if math.isfinite(mean) else math.inf, number))
    loss, number = min(found)
    require(math.isfinite(loss), f"{name} diverged with all {len(points)} values of --tune.")
    config, values = points[number - 1]
    log(f"{name}: {_told(values)} is the best of {len(points)}, with a choice loss of {loss:.4f}")
    return config, values


def _told(values: dict[str, float], form: str = ".3g") -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())


def _turned(config: Config, values: dict[Knob, float]) -> Config:
    for knob, value in values.items():
        section: Any = dataclasses.replace(getattr(config, knob.section), **{knob.field: value})
        config = dataclasses.replace(config, **{knob.section: section})
    return config
