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
from gptlite.research.conduct import show
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
) -> dict[str, Config]:
    """`configs`, the base first, each with its best values of `knobs`. All are trained as they are
    to be compared, with what is to be equal.

    **Raises:** `UserError` if one diverges with all values.
    """
    for config in configs.values():  # for its errors, before anything is trained
        comparison.check(config)
    base = next(iter(configs.values()))
    best = {}
    for name, config in configs.items():
        steps = config.training.steps
        if config is not base:
            steps = comparison.equal_steps(config, base, equal, len(SEEDS))
        best[name] = _best(comparison, name, config, knobs, n_points, steps)
    return best


def _best(
    comparison: Comparison,
    name: str,
    config: Config,
    knobs: Sequence[Knob],
    n_points: int,
    steps: int,
) -> Config:
    """`config` with the best values among `n_points`, which fill the range evenly (Halton, 1960: of
    a single knob the middle first, then those of the halves).

    **Raises:** `UserError` if it diverges with all of them.
    """
    places = qmc.Halton(len(knobs), scramble=False).random(n_points + 1)[1:]
    found = []
    for number, place in enumerate(places.tolist(), 1):
        values = {knob: knob.at(config, x) for knob, x in zip(knobs, place, strict=True)}
        said = {knob.name: value for knob, value in values.items()}
        what = f"{name} ({number} of {n_points}: {_told(said)})"
        turned = _turned(config, values)
        short = dataclasses.replace(
            turned, training=dataclasses.replace(turned.training, steps=steps, eval_every=steps)
        )
        losses = comparison.tuning_losses(short, SEEDS)
        if losses is None:
            training = comparison.train_to_tune(name, short, said, SEEDS)
            progress = show(what, training, len(SEEDS))
            losses = progress and progress.val_losses
        assert losses is not None
        mean = float(np.mean(losses))
        found.append((mean if math.isfinite(mean) else math.inf, number, turned, said))
    loss, _, best, said = min(found, key=lambda x: x[:2])
    require(math.isfinite(loss), f"{name} diverged with all {n_points} values of --tune.")
    log(f"{name}: {_told(said)} is the best of {n_points}, with a choice loss of {loss:.4f}")
    return best


def _told(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())


def _turned(config: Config, values: dict[Knob, float]) -> Config:
    for knob, value in values.items():
        section: Any = dataclasses.replace(getattr(config, knob.section), **{knob.field: value})
        config = dataclasses.replace(config, **{knob.section: section})
    return config
