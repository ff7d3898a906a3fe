"""The ledger of a comparison that was never trained."""

from pathlib import Path

from gptlite.research.ledger import (
    Confirmed,
    Confirming,
    Failed,
    Ledger,
    Look,
    Opened,
    Runs,
    Speed,
    Tuned,
    Variant,
)
from gptlite.research.results import AGAIN

BASE, SEEDS = "00" * 8, [0, 1, 2, 3, 4, 5]
HOSTILE = "mlp=<img src=x onerror=alert(1)>"


def write_ledger(folder: Path) -> Ledger:
    """With a base, the base again, and variants that are better, like it, stopped and failed."""
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.append(Opened("ab" * 32, "cd" * 8, 100, 120))
    ledger.append(
        Tuned("77" * 8, "66" * 8, "base", {"optimizer.learning_rate": 0.02}, [9], 8, [2.0])
    )
    names = ["base", AGAIN, "norm=layer", HOSTILE, "n-layers=9", "n-layers=99"]
    ids = [f"{place}{place}" * 8 for place in range(len(names))]
    for place, (name, key) in enumerate(zip(names, ids, strict=True)):
        base, equal = (BASE, "time" if place == 2 else "steps") if place else (None, None)
        share = 0.01 if place > 1 else None
        ledger.append(Variant(key, name, base, share, equal, {}, {}, 1000 + place, 6000))
    for place, gain in enumerate((0.0, 0.003, 0.1, -0.002)):
        ends = [2 + seed / 10 - gain + 0.001 * ((seed * (place + 2)) % 5) for seed in SEEDS]
        curves: list[list[float | None]] = [[end + 1, end] for end in ends]
        if place == 2:
            ledger.append(Speed(ids[place], 8, [1.0] * 11))
        ledger.append(Runs(ids[place], SEEDS, 8, [4, 8], curves, 3.0))
    stopped = "stopped at step 4 of 8, behind the base by 0.1000 ± 0.0200"
    ledger.append(Runs(ids[4], SEEDS, 8, [4], [[3.1] for _ in SEEDS], 1.5, stopped))
    ledger.append(Failed(ids[5], SEEDS, "RuntimeError: no memory"))
    ledger.append(Look(ids[2], 6, -0.1, 0.01, "better"))
    ledger.append(Confirming(ids[3], [300_000], 0.025, 4))
    ledger.append(Confirming(ids[2], [310_000, 310_001], 0.01, 4))
    ledger.append(Confirmed(ids[2], [1.9, 2.0], [2.0, None], [], None, None, "the base diverged"))
    return ledger
