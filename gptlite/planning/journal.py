"""The journal of a forecast: what was trained, what was sealed, and what came of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gptlite.config import Config
from gptlite.custom import with_custom
from gptlite.errors import UserError, require
from gptlite.machine.fields import MAX_INT32
from gptlite.machine.files import MAX_NUMBER
from gptlite.machine.records import Natural, NotNegative
from gptlite.research.journal import Checksum, Entry, Journal
from gptlite.runs.saved_config import config_of

Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
Loss = Annotated[float, msgspec.Meta(gt=0, le=MAX_NUMBER)]


class Begun(Entry, tag="begun", frozen=True):
    """The first line: the text and all settings that the recipe does not choose."""

    text: Checksum
    tokenizer: Checksum
    settings: Checksum
    """Of `config`, and of the code that computes the losses."""
    config: dict[str, Any]
    unique: Count
    """Tokens of the training text."""


class Trained(Entry, tag="trained", frozen=True):
    """A rung that was trained."""

    n_layers: Small
    d_model: Small
    asked: Count
    """Tokens that it was to read."""
    parameters: Count
    """See `parameters_of`."""
    tokens: Count
    """That each seed read, in whole steps."""
    seeds: Annotated[list[Natural], msgspec.Meta(min_length=1)]
    losses: list[Loss]
    """Of each seed, at the end, on the validation text."""
    seconds: NotNegative
    """That steps took."""

    def __post_init__(self):
        if len(self.losses) != len(self.seeds):
            raise ValueError("its losses are wrong")


class Sealed(Entry, tag="sealed", frozen=True):
    """A forecast of a rung, written before it is trained."""

    n_layers: Small
    d_model: Small
    asked: Count
    seeds: Annotated[list[Natural], msgspec.Meta(min_length=1)]
    loss: Loss
    """The mean of the seeds that is expected."""
    low: Loss
    high: Loss
    """The ends of the interval that is to hold it."""


class Judged(Entry, tag="judged", frozen=True):
    """What came of the forecast before, whose rung is the entry before."""

    loss: Loss
    """The mean of the seeds."""
    is_inside: bool


Kind = Begun | Trained | Sealed | Judged


class ForecastJournal(Journal[Kind]):
    """The entries of a forecast."""

    def __init__(self, path: Path):
        """**Raises:** `UserError` if the file is damaged, or was changed."""
        super().__init__(path, Kind, "Give this forecast another --name, or move its folder away.")

    def config(self, custom: Sequence[str]) -> Config:
        """What all rungs have in common, with custom blocks of the files `custom`.

        **Raises:** `UserError` if there is none, or it is none of this version.
        """
        first = next(self.of(Begun), None)
        require(first is not None, f"{self.path} is empty: gptlite forecast begins one.")
        assert first is not None
        try:
            return with_custom(config_of(first.config), custom, read=True)
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.path} has no config: {error}.") from error

    @property
    def sealed(self) -> Sealed | None:
        """The forecast that was not judged yet."""
        entries = [x for x in self.entries if isinstance(x, Sealed | Judged)]
        return entries[-1] if entries and isinstance(entries[-1], Sealed) else None

    def trained(self, n_layers: int, d_model: int, asked: int) -> Trained | None:
        """What a rung has reached, if it was trained."""
        of = (n_layers, d_model, asked)
        found = (x for x in self.of(Trained) if (x.n_layers, x.d_model, x.asked) == of)
        return next(found, None)

    def _fits(self, entry: Kind) -> bool:
        if isinstance(entry, Judged):
            sealed = self.sealed
            return sealed is not None and bool(
                self.trained(sealed.n_layers, sealed.d_model, sealed.asked)
            )
        if isinstance(entry, Trained | Sealed):
            is_new = self.trained(entry.n_layers, entry.d_model, entry.asked) is None
            is_new &= isinstance(entry, Trained) or self.sealed is None
            return bool(self.entries) and is_new
        return not self.entries
