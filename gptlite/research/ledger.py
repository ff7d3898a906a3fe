"""The ledger of a comparison: everything that was tried, in the order in which it was tried."""

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gptlite.machine.fields import MAX_INT32
from gptlite.machine.files import MAX_NUMBER
from gptlite.machine.records import Natural, NotNegative, Number
from gptlite.research.equal import Equal
from gptlite.research.journal import MAX_JOURNAL, Checksum, Entry, Journal, require_plain

Steps = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Loss = NotNegative | None
"""None: not finite, for which JSON has no number."""


class Opened(Entry, tag="opened", frozen=True):
    """The first line: the texts, which stay the same."""

    text: Checksum
    tokenizer: Checksum
    choice_tokens: Steps
    validation_tokens: Steps


class Variant(Entry, tag="variant", frozen=True):
    """A variant, with one config and one version of the code, before anything is known of it."""

    variant: Checksum
    """Of everything that decides what it learns."""
    name: str
    base: Checksum | None
    """None: it is one itself."""
    level: Share | None
    """That of its test. None: it is a base, or one once more."""
    equal: Equal | None
    """What it has in common with the base. None: it is a base."""
    config: dict[str, Any]
    code: dict[str, str]
    """See `code_of`."""
    parameters: Natural
    operations_per_token: Annotated[int, msgspec.Meta(ge=0)]
    """Floating-point operations of training."""
    twin: Checksum | None = None
    """The base with the values that were tuned for this variant, if its own are others. What is
    better must be better than both."""

    def __post_init__(self):
        require_plain(self.name)


class Runs(Entry, tag="runs", frozen=True):
    """Seeds that were trained at the same time."""

    variant: Checksum
    seeds: list[Natural]
    steps: Steps
    """That it was to be trained for."""
    evaluated_at: list[Steps]
    curves: list[list[Loss]]
    """For each seed, the loss on the choice text at each of `evaluated_at`."""
    seconds: NotNegative
    """That steps took."""
    stopped: str = ""
    """Why it ended before its last step, if it did."""

    def __post_init__(self):
        require_plain(self.stopped)
        in_order = [0, *sorted(set(self.evaluated_at))]
        if [0, *self.evaluated_at] != in_order or in_order[-1] > self.steps:
            raise ValueError("its evaluated_at is wrong")
        if not self.stopped and in_order[-1] != self.steps:
            raise ValueError("its evaluated_at is wrong")
        if len(self.curves) != len(self.seeds) or len(set(self.seeds)) != len(self.seeds):
            raise ValueError("its curves are wrong")
        if any(len(curve) != len(self.evaluated_at) for curve in self.curves):
            raise ValueError("its curves are wrong")


class Tuned(Entry, tag="tuned", frozen=True):
    """A variant, or a base, that was trained with other values of its knobs, to choose them."""

    variant: Checksum
    """Of everything that decides what it learns, with these values."""
    of: Checksum
    """Of what it is before it is tuned, and of its base."""
    name: str
    values: dict[str, Number]
    seeds: list[Natural]
    steps: Steps
    losses: list[Loss]
    """Of each seed, on the choice text."""

    def __post_init__(self):
        require_plain(self.name, *self.values)


class Speed(Entry, tag="speed", frozen=True):
    """How fast a variant is, measured before seeds of it are trained for as long as the base is."""

    variant: Checksum
    steps: Steps
    """That it is trained for in that time."""
    ratios: Annotated[
        list[Annotated[float, msgspec.Meta(gt=0, le=MAX_NUMBER)]], msgspec.Meta(min_length=1)
    ]
    """The base's seconds per step over the variant's, measured one after the other."""


class Failed(Entry, tag="failed", frozen=True):
    """A variant whose training was not finished."""

    variant: Checksum
    seeds: list[Natural]
    reason: str

    def __post_init__(self):
        require_plain(self.reason)


class Look(Entry, tag="look", frozen=True):
    """The verdict on the choice text, after so many seeds."""

    variant: Checksum
    seeds: Natural
    difference: Number | None
    margin: NotNegative | None
    words: str

    def __post_init__(self):
        require_plain(self.words)


class Confirming(Entry, tag="confirming", frozen=True):
    """A variant is to be judged on the validation text. Written before it is trained for that, so
    that it counts as a look also if it is stopped."""

    variant: Checksum
    seeds: list[Natural]
    """Which nothing has been trained from before."""
    level: Share
    tried: Natural
    """The variants that had been tried."""


class Confirmed(Entry, tag="confirmed", frozen=True):
    """The verdict on the validation text."""

    variant: Checksum
    losses: list[Loss]
    """Of each seed."""
    base_losses: list[Loss]
    twin_losses: list[Loss]
    """Empty: it has no twin."""
    difference: Number | None
    margin: NotNegative | None
    words: str

    def __post_init__(self):
        require_plain(self.words)


Kind = Opened | Tuned | Variant | Speed | Runs | Failed | Look | Confirming | Confirmed


class Ledger(Journal[Kind]):
    """The entries in a file."""

    def __init__(self, path: Path, limit: int = MAX_JOURNAL):
        """`limit`: bytes that the file may have.

        **Raises:** `UserError` if the file is damaged, or was changed."""
        self.variants: dict[str, Variant] = {}
        """By their checksum."""
        self.runs: defaultdict[str, list[Runs]] = defaultdict(list)
        """By the checksum of the variant, in the order in which they were trained."""
        self.speeds: defaultdict[str, list[Speed]] = defaultdict(list)
        """By the checksum of the variant, in the order in which they were measured."""
        remedy = "Give this comparison another --name, or move its folder away."
        super().__init__(path, Kind, remedy, limit)

    def _fits(self, entry: Kind) -> bool:
        """Whether runs, and what else is of a variant, are of one that was entered, and have its
        steps and the evaluations of its other runs; and whether a variant has a base that is one,
        and a twin that is not judged."""
        if isinstance(entry, Opened | Tuned | Failed):  # a variant that is tuned is not entered
            return True
        if isinstance(entry, Variant):
            is_new = entry.variant not in self.variants
            if entry.base is None:
                return is_new and (entry.level, entry.equal, entry.twin) == (None, None, None)
            base, twin = self.variants.get(entry.base), self.variants.get(str(entry.twin))
            is_right = base is not None and base.base is None and entry.equal is not None
            if entry.twin is None:
                return is_new and is_right
            is_right &= twin is not None and (twin.base, twin.level) == (entry.base, None)
            return is_new and is_right and entry.level is not None
        if isinstance(entry, Look | Confirming | Confirmed):
            known = self.variants.get(entry.variant)
            return known is not None and known.base is not None
        if not isinstance(entry, Runs):
            return entry.variant in self.variants
        before = self.runs[entry.variant]
        # Seeds that were stopped may be trained again.
        seeds = {seed for run in before for seed in run.seeds if not run.stopped}
        n = len(entry.evaluated_at)
        return (
            entry.variant in self.variants
            and not seeds & set(entry.seeds)
            and all(run.steps == entry.steps for run in before)
            and all(
                run.evaluated_at[:n] == entry.evaluated_at[: len(run.evaluated_at)]
                for run in before
            )
        )

    def _took(self, entry: Kind) -> None:
        match entry:
            case Variant():
                self.variants[entry.variant] = entry
            case Runs():
                self.runs[entry.variant].append(entry)
            case Speed():
                self.speeds[entry.variant].append(entry)
