"""How often a comparison is wrong, and how many seeds it takes, by simulation.

    python benchmarks/laboratory.py

Losses are normal, with the same deviation for base and variants, of which all share one base. One
looks after each group of seeds, as `gptlite compare` does, and stops when a variant is decided.
Beside it a test of the usual kind: all seeds, then Student's paired t-test once, with p-values
multiplied by the number of variants (Bonferroni).

Prints, for variants without a difference, the share of comparisons that find one in any variant;
for a variant with a gain, in standard deviations of its differences to the base, the share that
finds it and the mean number of seeds.
"""

import argparse

import numpy as np
from common import print_table
from scipy import stats

from gptlite.research.conduct import GROUP
from gptlite.research.statistics import LEVEL, bound, level


def t_statistics(differences: np.ndarray) -> np.ndarray:
    """Those of the first 1, 2, 3, ... of `[..., seeds]`; 0 for 1."""
    n = np.arange(1, differences.shape[-1] + 1)
    mean = np.cumsum(differences, -1) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        square = (np.cumsum(differences**2, -1) - n * mean**2) / (n - 1)
        return np.nan_to_num(mean * np.sqrt(n / square))


def simulate(
    random: np.random.Generator, levels: list[float], gain: float, n: int, looks: list[int]
) -> np.ndarray:
    """For each of `levels`, the number of seeds after which it is decided, 0: never. The last
    variant is better by `gain`, the others are like the base."""
    base = random.normal(size=n)
    differences = (random.normal(size=(len(levels), n)) - base) / np.sqrt(2)
    differences[-1] -= gain
    t = np.abs(t_statistics(differences))
    bounds = np.array([[bound(k, x) for k in looks] for x in levels])
    decided = t[:, np.array(looks) - 1] > bounds
    return np.where(decided.any(-1), np.array(looks)[decided.argmax(-1)], 0)


def fixed(random: np.random.Generator, variants: int, gain: float, n: int) -> np.ndarray:
    """Whether each variant is found after all `n` seeds."""
    base = random.normal(size=n)
    differences = (random.normal(size=(variants, n)) - base) / np.sqrt(2)
    differences[-1] -= gain
    return np.abs(t_statistics(differences)[:, -1]) > stats.t.ppf(1 - LEVEL / 2 / variants, n - 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=20, help="of a variant, at most")
    arguments = parser.parse_args()
    n, repeats = arguments.seeds, arguments.repeats
    groups = [*range(GROUP, n, GROUP), n]
    rows = []
    for variants, portions in ((1, 1), (20, 20), (20, 1), (200, 200), (200, 1)):
        levels = [level(i - i % portions, portions) for i in range(variants)]
        row = [f"{variants}", "at once" if portions > 1 or variants == 1 else "one by one"]
        for gain in (0.0, 1.0, 2.0, 4.0):
            random = np.random.default_rng(0)
            found = np.array([simulate(random, levels, gain, n, groups) for _ in range(repeats)])
            if not gain:
                each = [
                    simulate(random, levels, 0.0, n, list(range(1, n + 1))) for _ in range(repeats)
                ]
                row += [
                    f"{(found > 0).any(-1).mean():.1%}",
                    f"{(np.array(each) > 0).any(-1).mean():.1%}",
                ]
                continue
            once = np.array([fixed(random, variants, gain, n)[-1] for _ in range(repeats)])
            seeds = np.where(found[:, -1] > 0, found[:, -1], n).mean()
            row.append(f"{(found[:, -1] > 0).mean():.0%}, {seeds:.1f} ({once.mean():.0%})")
        rows.append(row)
    print_table(
        [
            "variants",
            "entered",
            f"false, a look after each {GROUP}",
            "after each seed",
            "a gain of 1",
            "of 2",
            "of 4",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
