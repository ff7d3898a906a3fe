"""What a model will reach that was not trained yet, by the law of its text, and how sure it is."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from gptlite.planning.law import NOISE, Law, Points, Prior, fit_law

# Laws of the bootstrap, and the share of them that an interval holds.
DRAWS, SHARE = 200, 0.95
# Those of a single pilot, for which a run waits.
PILOT_DRAWS = 60
# Standard deviation of the loss of a run of fewer than a million tokens around the law of longer
# ones, as a share of it.
PILOT_NOISE = 0.02
# What the laws of four texts were like: the last line of benchmarks/forecasts.py.
USUAL = Prior(
    floor=0.507,
    data=0.206,
    spread=0.059,
    powers=np.log([0.276, 0.37, 9.25]),
    spreads=np.array([0.21, 0.51, 0.5]),
)


@dataclass(frozen=True)
class Forecast:
    """Of a loss, in nats per token."""

    loss: float
    low: float
    high: float
    """The two ends of the interval that holds the loss with a probability of `SHARE`."""


@dataclass(frozen=True)
class Laws:
    """The law of a text, and others that are as possible."""

    law: Law
    drawn: list[Law]
    noise: float
    """Standard deviation of a single run around the law, as a share of its loss."""

    def forecast(self, parameters: float, tokens: float, unique: float, seeds: int = 1) -> Forecast:
        """Of the mean loss of so many seeds."""
        losses = np.array([law.loss(parameters, tokens, unique) for law in self.drawn])
        chance = np.random.default_rng(1).normal(size=losses.size) * self.noise / math.sqrt(seeds)
        tail = (1 - SHARE) / 2
        low, high = np.quantile(losses * (1 + chance), [tail, 1 - tail])
        loss = self.law.loss(parameters, tokens, unique)
        return Forecast(loss, float(low), float(high))


def fit_laws(points: Points, prior: Prior = USUAL, draws: int = DRAWS) -> Laws:
    """Fit the law of a text, and others that are as possible: by the Bayesian bootstrap over rungs
    and seeds (Rubin, 1981; with few rungs, drawing them again would leave too few different ones),
    with losses that are moved by their noise, and a prior by what is not known of it. Points of the
    same parameters and tokens are the seeds of a rung."""
    law, rng = fit_law(points, prior), np.random.default_rng(0)
    errors = points.losses / law(points.parameters, points.tokens, points.unique) - 1
    noise = max(NOISE, float(np.sqrt(np.mean(errors**2))))
    of = np.stack([points.parameters, points.tokens])
    _, rung = np.unique(of, axis=1, return_inverse=True)
    drawn = []
    for _ in range(draws):
        weights = rng.exponential(size=rung.max() + 1)[rung] * rng.exponential(size=len(points))
        losses = points.losses * (1 + noise * rng.normal(size=len(points)))
        moved = dataclasses.replace(points, losses=losses)
        drawn.append(fit_law(moved, prior.drawn(rng), weights, powers_of(law)))
    return Laws(law, drawn, noise)


def fit_pilot(point: Points, prior: Prior = USUAL) -> Laws:
    """The laws of a text of which one short run is known."""
    law = fit_law(point, prior, np.array([(NOISE / PILOT_NOISE) ** 2]))
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(PILOT_DRAWS):
        losses = point.losses * (1 + PILOT_NOISE * rng.normal(size=1))
        moved = dataclasses.replace(point, losses=losses)
        drawn.append(fit_law(moved, prior.drawn(rng), start=powers_of(law)))
    return Laws(law, drawn, NOISE)


def powers_of(law: Law) -> tuple[float, float, float]:
    """What of a law is searched for."""
    return law.alpha, law.beta, law.repeats


def best_parameters(law: Law, operations: float, unique: float) -> float:
    """The parameters with which so many floating-point operations of training, six for each token
    and parameter, reach the lowest loss."""
    sizes = np.geomspace(1e3, 1e12, 2000)
    losses = law(sizes, operations / (6 * sizes), np.full_like(sizes, unique))
    return float(sizes[np.argmin(losses)])
