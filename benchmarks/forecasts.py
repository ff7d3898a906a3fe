"""How good forecasts are: `python benchmarks/forecasts.py forecasts/*`.

The arguments are folders of `gptlite forecast`, of different texts. Each model in them is forecast
from those with at most a tenth of its compute, with all seeds and with each seed alone, by what the
laws of the other texts are like; and what it reached is known. The last lines are what the laws of
all these texts are like, which `USUAL` in gptlite/planning/forecast.py is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gptlite.planning.forecast import fit_laws, powers_of
from gptlite.planning.journal import Begun, ForecastJournal, Trained
from gptlite.planning.ladder import FEWEST as TOKENS
from gptlite.planning.law import REFERENCE, Law, Points, Prior, fit_law

# Models that a forecast is made from, at least.
FEWEST = 4
# What is known of laws before any text was seen: hardly anything.
WEAK = Prior(0.5, 0.25, 0.12, np.log([0.3, 0.3, 10.0]), np.array([0.25, 0.35, 0.7]))
# Standard deviations below these would say that a few texts tell all.
LEAST, LEAST_LOG = 0.04, np.array([0.1, 0.2, 0.5])


def rungs_of(folder: Path) -> tuple[list[Trained], float]:
    """The models of a forecast, and the tokens of its text."""
    journal = ForecastJournal(folder / "ledger.jsonl")
    unique = next(journal.of(Begun)).unique
    # With fewer tokens, they would be no part of the law.
    return [x for x in journal.of(Trained) if x.asked >= TOKENS], float(unique)


def points_of(rungs: Sequence[Trained], unique: float, seeds: Sequence[int]) -> Points:
    """What they reached from these seeds."""
    each = [
        (x.parameters, x.tokens, unique, loss)
        for x in rungs
        for seed, loss in zip(x.seeds, x.losses, strict=True)
        if seed in seeds
    ]
    return Points(*np.array(each, float).T)


def shares_of(law: Law) -> tuple[float, float]:
    """Those of floor and tokens in the loss of the reference."""
    n, tokens = REFERENCE
    terms = np.array([law.floor, law.b * tokens**-law.beta, law.a * n**-law.alpha])
    floor, data, _ = terms / terms.sum()
    return float(floor), float(data)


def prior_of(texts: Sequence[Points]) -> Prior:
    """What the laws of these texts are like."""
    laws = [fit_law(points, WEAK) for points in texts]
    shares = np.array([shares_of(law) for law in laws])
    logs = np.log([powers_of(law) for law in laws])
    floor, data = shares.mean(axis=0)
    several = len(laws) > 1
    spread = float(np.sqrt(shares.var(axis=0, ddof=1).mean())) if several else WEAK.spread
    spreads = logs.std(axis=0, ddof=1) if several else WEAK.spreads
    return Prior(
        float(floor),
        float(data),
        max(LEAST, spread),
        logs.mean(axis=0),
        np.maximum(LEAST_LOG, spreads),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--times", type=float, default=10.0, help="compute beyond the fit")
    arguments = parser.parse_args()
    texts = {folder.name: rungs_of(folder) for folder in arguments.folders}
    everything = {
        name: points_of(rungs, unique, sorted({s for x in rungs for s in x.seeds}))
        for name, (rungs, unique) in texts.items()
    }
    print("| text | model | tokens | from | forecast | interval | reached | error | inside |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    errors, inside = [], []
    for name, (rungs, unique) in texts.items():
        prior = prior_of([p for other, p in everything.items() if other != name])
        seeds = sorted({seed for x in rungs for seed in x.seeds})
        for chosen in [seeds] if len(seeds) == 1 else [seeds, *([seed] for seed in seeds)]:
            for target in sorted(rungs, key=lambda x: x.parameters * x.tokens):
                most = target.parameters * target.tokens / arguments.times
                before = [x for x in rungs if x.parameters * x.tokens <= 1.01 * most]
                if len(before) < FEWEST or not set(chosen) <= set(target.seeds):
                    continue
                laws = fit_laws(points_of(before, unique, chosen), prior)
                found = laws.forecast(target.parameters, target.tokens, unique, len(chosen))
                reached = float(np.mean(points_of([target], unique, chosen).losses))
                errors.append(found.loss / reached - 1)
                inside.append(found.low <= reached <= found.high)
                print(
                    f"| {name} | {target.n_layers} x {target.d_model} | {target.tokens:,} | "
                    f"{len(before)} models, seed{'s' * (len(chosen) > 1)} "
                    f"{', '.join(map(str, chosen))} | {found.loss:.4f} | {found.low:.4f} to "
                    f"{found.high:.4f} | {reached:.4f} | {100 * errors[-1]:+.2f} % | "
                    f"{'yes' if inside[-1] else 'NO'} |",
                    flush=True,
                )
    print(
        f"\n{len(errors)} forecasts: the median error is {100 * np.median(np.abs(errors)):.2f} %, "
        f"the largest {100 * np.max(np.abs(errors)):.2f} %; {100 * np.mean(inside):.0f} % were "
        "inside"
    )
    prior = prior_of(list(everything.values()))
    print(
        f"\nUSUAL: floor {prior.floor:.3f}, data {prior.data:.3f}, spread {prior.spread:.3f}, "
        f"powers {np.round(np.exp(prior.powers), 3)}, spreads {np.round(prior.spreads, 3)}"
    )


if __name__ == "__main__":
    main()
