"""Annotations of fields: their bounds, and when they may change."""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gptlite.errors import require
from gptlite.machine.printed import CONTROL

# Array sizes and counts: JAX indexes with 32 bits.
MAX_INT32 = 2**31 - 1
# The largest number in float32, and the smallest that XLA does not take for 0.
MAX_FLOAT32 = 3.4e38
MIN_FLOAT32 = 1.2e-38


class Rule(abc.ABC):
    """A note in `Annotated` that a value must keep to."""

    @abc.abstractmethod
    def check(self, name: str, value: Any) -> None:
        """**Raises:** `UserError`, which names the field, if `value` breaks the rule."""


@dataclass(frozen=True)
class Between(Rule):
    """Bounds of a number, for `Annotated`: `low <= value <= high`, with `above` `low < value`. NaN
    is out of bounds. What must be above 0 must be so in float32."""

    low: float
    high: float = MAX_FLOAT32
    above: bool = False

    def check(self, name: str, value: Any) -> None:
        """**Raises:** `UserError` if `value` is out of bounds."""
        low = "above" if self.above else "at least"
        is_plain = self.high == MAX_FLOAT32 and value <= self.high
        high = "" if is_plain else f" and at most {self.high}"
        require(
            self.low <= value <= self.high and not (self.above and value == self.low),
            f"{name} must be {low} {self.low}{high}, got {value}.",
        )
        require(
            not (self.above and self.low == 0 and value < MIN_FLOAT32),
            f"{name} must be at least {MIN_FLOAT32}, got {value}: in float32, that is 0.",
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a block, which keep to their annotations.

    **Raises:** `UserError` if they do not.
    """

    def __post_init__(self):
        check_fields(f"{type(self).__name__}.", self)


# How many of something there are, and what keeps a division from being one by zero.
Count = Annotated[int, Between(1, 10_000_000)]
Seed = Annotated[int, Between(0, MAX_INT32)]
Epsilon = Annotated[float, Between(0.0, 1.0, above=True)]


# When a config takes the place of another one: a run is resumed, a model keeps its weights
# (`--init-from`), a comparison has trained a variant already.
Occasion = Literal["resume", "weights", "comparison"]


class Free:
    """A note in `Annotated`: the occasions on which the field may change. A section's
    holds for all of its fields."""

    def __init__(self, *on: Occasion):
        self.on = on


def settled(config: Any, occasion: Occasion | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a config that may not change on an occasion (None: all), by name, with their
    values."""
    for name, kind in annotations(type(config)).items():
        notes = getattr(kind, "__metadata__", ())
        if any(isinstance(note, Free) and occasion in note.on for note in notes):
            continue
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from settled(value, occasion, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def free(config: Any, occasion: Occasion) -> list[str]:
    """The names of the fields of a config that may change on an occasion."""
    fixed = dict(settled(config, occasion))
    return [name for name, _ in settled(config, None) if name not in fixed]


def changed(before: Any, after: Any, occasion: Occasion) -> list[str]:
    """The fields that have changed from one config to another one and may not, with what they were
    and are."""
    new = dict(settled(after, occasion))
    return [
        f"{name} ({old!r}, got {new[name]!r})"
        for name, old in settled(before, occasion)
        if new[name] != old
    ]


def check_value(name: str, value: Any, kind: Any) -> Any:
    """`value`, checked against an annotation: its type (an int is made a float, a bool does not
    pass as an int), the choices of a `Literal`, and the bounds in an `Annotated`.

    **Raises:** `UserError`, which names what would be right.
    """
    kind, *notes = (
        (kind.__origin__, *kind.__metadata__) if get_origin(kind) is Annotated else [kind]
    )
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}.")
        return value
    union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    kinds = tuple(get_origin(k) or k for k in union)
    if value is None and NoneType in kinds:
        return value
    accepted = (*kinds, int) if float in kinds else kinds
    words = " or ".join("None" if k is NoneType else k.__name__ for k in kinds)
    require(
        isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool)),
        f"{name} must be {words}, got {value!r}.",
    )
    for note in notes:  # tyro's are no rules
        if isinstance(note, Rule):
            note.check(name, value)
    if float in kinds and type(value) is int and int not in kinds:
        # JAX has no integers as large as a float may be.
        Between(-MAX_FLOAT32).check(name, value)
        return float(value)
    return value


@functools.cache
def annotations(kind: type) -> Mapping[str, Any]:
    """The annotations of the fields of a class, with their `Annotated`."""
    return get_type_hints(kind, include_extras=True)


def check_fields(section: str, config: Any) -> None:
    """`check_value` for every field of the dataclass `config`. The texts of a section, which are
    names, may have no control characters: a config may come from a stranger, and is printed."""
    for name, kind in annotations(type(config)).items():
        value = getattr(config, name)
        object.__setattr__(config, name, check_value(f"{section}{name}", value, kind))
        is_plain = not section or not isinstance(value, str) or CONTROL.search(value) is None
        require(is_plain, f"{section}{name} may have no control characters, got {value!r}.")
