"""How often a comparison is wrong, how many seeds it takes, and what an eager agent gets through.

    python benchmarks/laboratory.py
    python benchmarks/laboratory.py --noise comparisons/NAME
    python benchmarks/laboratory.py --early comparisons/NAME

By simulation, with the bounds and the levels of `gptlite compare`.

The first table: losses are normal, with the same deviation for base and variants, of which all
share one base. One looks after each group of seeds and stops when a variant is decided. Beside it a
test of the usual kind: all seeds, then Student's paired t-test once, with p-values multiplied by
the number of variants (Bonferroni). For variants without a difference, the share of comparisons
that find one in any variant; for a variant with a gain, in standard deviations of its differences
to the base, the share that finds it and the mean number of seeds.

The second table, with --noise: an agent tries one variant after the other, keeps what looks better
as its new base, and at the end confirms what it kept, or else what looked best. Losses vary as
those of a real comparison do: its base and its base again, from the same batches, without their
means. Beside it the same agent with the rule of autoresearch: one run each, and keep what is lower.

With --early, which variants of a real comparison (with --no-early) would have been stopped in the
middle because they were behind, and where they were at the end.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from common import print_table

from gptlite.research.conduct import GROUP
from gptlite.research.ledger import Ledger, Variant
from gptlite.research.results import AGAIN, behind, results_of
from gptlite.research.statistics import LEVEL, bound, level, student

GAINS = (0.0, 1.0, 2.0, 4.0)


def t_statistics(differences: np.ndarray) -> np.ndarray:
    """Those of the first 1, 2, 3, ... of `[..., seeds]`; 0 for 1."""
    n = np.arange(1, differences.shape[-1] + 1)
    mean = np.cumsum(differences, -1) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        square = (np.cumsum(differences**2, -1) - n * mean**2) / (n - 1)
        return np.nan_to_num(mean * np.sqrt(n / square))


def differences(random: np.random.Generator, variants: int, gain: float, n: int) -> np.ndarray:
    """Of variants to a base that they share, `[variants, n]`. The last one is better by `gain`."""
    found = (random.normal(size=(variants, n)) - random.normal(size=n)) / np.sqrt(2)
    found[-1] -= gain
    return found


def decided(values: np.ndarray, levels: Sequence[float], looks: Sequence[int]) -> np.ndarray:
    """For each variant, the number of seeds after which it is decided, 0: never."""
    bounds = np.array([[bound(n, x) for n in looks] for x in levels])
    found = np.abs(t_statistics(values)[:, np.array(looks) - 1]) > bounds
    return np.where(found.any(-1), np.array(looks)[found.argmax(-1)], 0)


def test_table(repeats: int, n: int) -> None:
    looks, every = [*range(GROUP, n, GROUP), n], list(range(1, n + 1))
    rows = []
    for variants, portions in ((1, 1), (20, 20), (20, 1), (200, 200), (200, 1)):
        levels = [level(i - i % portions, portions) for i in range(variants)]
        row = [f"{variants}", "at once" if portions == variants else "one by one"]
        for gain in GAINS:
            random = np.random.default_rng(0)
            samples = [differences(random, variants, gain, n) for _ in range(repeats)]
            if gain == 0:
                for at in (looks, every):
                    fooled = [(decided(x, levels, at) > 0).any() for x in samples]
                    row.append(f"{np.mean(fooled):.1%}")
                continue
            seeds = np.array([decided(x, levels, looks)[-1] for x in samples])
            last = np.array([t_statistics(x)[-1, -1] for x in samples])
            once = np.abs(last) > student(n, LEVEL / variants)
            mean = np.where(seeds > 0, seeds, n).mean()
            row.append(f"{(seeds > 0).mean():.0%}, {mean:.1f} ({once.mean():.0%})")
        rows.append(row)
    false = f"false, a look after each {GROUP}"
    gains = [f"a gain of {GAINS[1]:.0f}", *(f"of {gain:.0f}" for gain in GAINS[2:])]
    print_table(["variants", "entered", false, "after each seed", *gains], rows)


def real_noise(folder: Path) -> np.ndarray:
    """How losses of the same batches vary: differences of the base and the base again, of which
    each has its half of the variance."""
    ledger = Ledger(folder / "ledger.jsonl")
    again = next(v for v in ledger.of(Variant) if v.name == AGAIN)
    base, *others = results_of(ledger, ledger.variants[str(again.base)])
    other = next(result for result in others if result.variant is again)
    seeds = base.losses.keys() & other.losses.keys()
    found = np.array([other.losses[seed] - base.losses[seed] for seed in seeds])
    return (found - found.mean()) / np.sqrt(2)


def laboratory(
    draw: Callable[[int], np.ndarray], gains: Sequence[float], n: int
) -> tuple[list[int], list[int]]:
    """The variants that an agent keeps, and those that are confirmed: it tries all, one by one,
    each against the last one that it kept, and then confirms what it kept. If that is nothing, it
    confirms what looked best."""
    looks = [*range(GROUP, n, GROUP), n]
    base, kept, best = draw(n), [], (np.inf, 0)
    for tried, gain in enumerate(gains):
        losses = draw(n)
        values = losses - gain - base
        seeds = int(decided(values[None], [level(tried)], looks)[0])
        mean = float(values[: seeds or n].mean())
        best = min(best, (mean, tried))
        if seeds and mean < 0:
            base = losses  # the same seeds give the same again
            kept.append(tried)
    confirmed = []
    for looked, tried in enumerate(kept or [best[1]]):
        values = draw(n) - gains[tried] - draw(n)
        if t_statistics(values[None])[0, -1] < -student(n, level(looked)):
            confirmed.append(tried)
    return kept, confirmed


def keep_if_lower(
    draw: Callable[[int], np.ndarray], gains: Sequence[float]
) -> tuple[list[int], float]:
    """The variants that an agent keeps by a run of each, and what it takes for their gain."""
    first = best = float(draw(1)[0])
    kept, gained = [], 0.0
    for tried, gain in enumerate(gains):
        loss = float(draw(1)[0]) - gained - gain
        if loss < best:
            best, gained = loss, gained + gain
            kept.append(tried)
    return kept, first - best


def agent_table(noise: np.ndarray, repeats: int, n: int) -> None:
    deviation = float(noise.std(ddof=1) * np.sqrt(2))
    print(
        f"{len(noise)} differences of {AGAIN}, with a standard deviation of {deviation:.4f} nats\n"
    )
    rows = []
    for variants, gain in ((200, 0.0), (20, 0.01), (20, 0.02)):
        random = np.random.default_rng(0)

        def draw(seeds: int, random: np.random.Generator = random) -> np.ndarray:
            return random.choice(noise, seeds)

        wrong_kept = wrong = right = lower_right = 0
        lower_wrong, claims = [], []
        for _ in range(repeats):
            gains = np.zeros(variants)
            place = int(random.integers(variants))
            gains[place] = gain
            nulls = set(range(variants)) - ({place} if gain else set())
            kept, confirmed = laboratory(draw, gains.tolist(), n)
            wrong_kept += bool(nulls & set(kept))
            wrong += bool(nulls & set(confirmed))
            right += place in confirmed
            lower, claim = keep_if_lower(draw, gains.tolist())
            lower_wrong.append(len(nulls & set(lower)))
            lower_right += place in lower
            claims.append(claim)
        found = f"{right / repeats:.0%}" if gain else ""
        lower_found = f"{lower_right / repeats:.0%}" if gain else ""
        rows.append(
            [
                f"{variants}, {f'one gains {gain}' if gain else 'none gains'}",
                f"{wrong_kept / repeats:.1%}",
                f"{wrong / repeats:.1%}",
                found,
                f"{np.mean(lower_wrong):.1f}",
                lower_found,
                f"{np.mean(claims):.3f}",
            ]
        )
    header = ["variants", "a false one kept", "confirmed", "the gain confirmed"]
    lower = ["if lower: false ones kept", "the gain kept", "claimed gain"]
    print_table([*header, *lower], rows)


def stopped_early(folder: Path) -> None:
    """The rule that stops variants, on those that were not stopped."""
    ledger = Ledger(folder / "ledger.jsonl")
    base = next(v for v in ledger.of(Variant) if v.base is None)
    first, *others = results_of(ledger, base)
    rows = []
    for result in others:
        for run in ledger.runs[result.variant.variant]:
            for place, step in enumerate(run.evaluated_at[:-1]):
                curves = zip(run.seeds, run.curves, strict=True)
                losses = {seed: float(curve[place] or np.nan) for seed, curve in curves}
                if (gap := behind(first, losses, step / run.steps)) is None:
                    continue
                verdict = result.verdict
                assert verdict is not None
                end = f"{verdict.difference.mean:+.4f} ± {verdict.difference.margin:.4f}"
                rows.append([result.name, str(step), f"{gap.mean:+.4f}", end, verdict.words])
                break
    n = sum(len(ledger.runs[result.variant.variant]) for result in others)
    print(f"{len(rows)} of {n} groups of seeds would have been stopped\n")
    print_table(["variant", "at step", "behind by", "at the end", "verdict"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=Path, help="the folder of a comparison")
    parser.add_argument("--early", type=Path, help="the folder of a comparison")
    parser.add_argument("--repeats", type=int, help="default: 1000, and 200 for the agent")
    parser.add_argument("--seeds", type=int, help="of a variant, at most: 20, and 12 for the agent")
    arguments = parser.parse_args()
    if arguments.early is not None:
        stopped_early(arguments.early)
    elif arguments.noise is None:
        test_table(arguments.repeats or 1000, arguments.seeds or 20)
    else:
        noise = real_noise(arguments.noise)
        agent_table(noise, arguments.repeats or 200, arguments.seeds or 12)


if __name__ == "__main__":
    main()
