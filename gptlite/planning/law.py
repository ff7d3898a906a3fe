"""A law of losses: what a model reaches, by its parameters and by the tokens that it reads.

    loss = floor + a / parameters^alpha + b / fresh^beta

`fresh` are the tokens that it reads; of a text that is read several times, fewer (Muennighoff et
al., 2023, "Scaling Data-Constrained Language Models", section 3: a token's worth falls by e in
`repeats` rounds). Without that, it is the third approach of Hoffmann et al., 2022, "Training
Compute-Optimal Large Language Models".

The fit is by variable projection (Golub and Pereyra, 1973): floor, a and b follow from the other
three by linear least squares that are not negative, so that only three are searched for. (Parabolas
through runs of equal compute, the other usual way, are wrong even without noise wherever the runs
are not centred on the best size.)

A few runs of small models do not tell a law of six numbers. So what the laws of other texts are
like is known beforehand (`Prior`), and counts as much as it is sure.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize, nnls

Numbers = Float[np.ndarray, " n"]

# The exponents that are searched, and the rounds. Beyond: what no text has shown.
POWERS = (0.05, 1.5)
ROUNDS = (1.0, 1000.0)
# Parameters and tokens of the model whose loss is divided into the three terms of the law.
REFERENCE = (100_000.0, 2_000_000.0)
# Standard deviation of the loss of a run around the law, as a share of it.
NOISE = 0.003


@dataclass(frozen=True)
class Points:
    """Losses that were measured."""

    parameters: Numbers
    tokens: Numbers
    """Read in training."""
    unique: Numbers
    """Tokens of the text."""
    losses: Numbers
    """Nats per token."""

    def __len__(self) -> int:
        return len(self.losses)

    def __getitem__(self, which: np.ndarray) -> "Points":
        return Points(*(column[which] for column in vars(self).values()))


@dataclass(frozen=True)
class Law:
    """The law of a text."""

    floor: float
    a: float
    b: float
    alpha: float
    beta: float
    repeats: float

    def __call__(self, parameters: Numbers, tokens: Numbers, unique: Numbers) -> Numbers:
        """The losses."""
        powers = np.array([self.alpha, self.beta, self.repeats])
        terms = _terms(powers, parameters, tokens, unique)
        return terms @ np.array([self.floor, self.a, self.b])

    def loss(self, parameters: float, tokens: float, unique: float) -> float:
        """That of one model."""
        return float(self(*(np.array([float(x)]) for x in (parameters, tokens, unique)))[0])


@dataclass(frozen=True)
class Prior:
    """What laws are like: normal distributions, with their means and standard deviations."""

    floor: float
    """Its share of the loss of the model `REFERENCE`."""
    data: float
    """The share of the term of the tokens."""
    spread: float
    """Standard deviation of a share."""
    powers: Float[np.ndarray, "3"]
    """alpha, beta and repeats: the means of their logarithms."""
    spreads: Float[np.ndarray, "3"]
    """The standard deviations of these."""

    def drawn(self, rng: np.random.Generator) -> "Prior":
        """Another one, whose means are what this one deems possible."""
        floor, data = rng.normal([self.floor, self.data], self.spread).clip(0, 1)
        powers = rng.normal(self.powers, self.spreads)
        return dataclasses.replace(self, floor=floor, data=data, powers=powers)


def fresh_tokens(tokens: Numbers, unique: Numbers, repeats: float) -> Numbers:
    """The tokens of a text without end that teach as much."""
    again = np.maximum(tokens / unique - 1.0, 0.0)
    return np.minimum(tokens, unique) - unique * repeats * np.expm1(-again / repeats)


def _terms(
    powers: Float[np.ndarray, "3"], parameters: Numbers, tokens: Numbers, unique: Numbers
) -> Float[np.ndarray, "n 3"]:
    alpha, beta, repeats = powers
    fresh = fresh_tokens(tokens, unique, repeats)
    return np.stack([np.ones_like(fresh), parameters**-alpha, fresh**-beta], 1)


def fit_law(
    points: Points,
    prior: Prior,
    weights: Numbers | None = None,
    start: Sequence[float] | None = None,
) -> Law:
    """The most probable law: the relative errors are normal, with the standard deviation `NOISE`.
    `weights`: how often each point counts. `start`: alpha, beta and repeats, where the search
    begins. Default: at the best of a grid."""
    root = np.sqrt(np.ones(len(points)) if weights is None else weights) / NOISE
    bounds = np.array([POWERS, POWERS, ROUNDS]).T
    typical = float(np.median(points.losses))

    def solved(powers: np.ndarray) -> tuple[np.ndarray, float]:
        terms = _terms(powers, points.parameters, points.tokens, points.unique)
        # Two more equations: the shares of floor and tokens in the loss of the reference, whose
        # errors are shares of the typical loss.
        n, tokens = REFERENCE
        reference = np.array([1.0, n ** -powers[0], tokens ** -powers[1]])
        shares = np.diag(reference)[[0, 2]] - np.outer([prior.floor, prior.data], reference)
        rows = [terms * (root / points.losses)[:, None], shares / (prior.spread * typical)]
        return nnls(np.concatenate(rows), np.concatenate([root, np.zeros(2)]))

    def misfit(logs: np.ndarray) -> float:
        powers = np.exp(logs)
        inside = np.clip(powers, *bounds)
        unlikely = np.sum(((logs - prior.powers) / prior.spreads) ** 2)
        outside = np.sum(np.log(powers / inside) ** 2)
        return (solved(inside)[1] ** 2 + unlikely) * (1 + outside) + outside

    if start is None:
        steps = np.array([-1.0, 0.0, 1.0])
        grid = (prior.powers + prior.spreads * x for x in itertools.product(steps, repeat=3))
        begin = min(grid, key=misfit)
    else:
        begin = np.log(start)
    found = minimize(misfit, begin, method="Nelder-Mead", options={"maxiter": 500})
    powers = np.clip(np.exp(found.x), *bounds)
    floor, a, b = solved(powers)[0]
    return Law(float(floor), float(a), float(b), *map(float, powers))
