"""Names in the text of an option: of a block, with options of its own, by the package's name for it
or as FILE.py:CLASS; a byte-pair encoding; adapters."""

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from gptlite.errors import UserError, require
from gptlite.machine.fields import Between, Rule, annotations, check_fields, check_value

# The name of a block, with its own options; in Python, also the class of a custom block.
if TYPE_CHECKING:
    BlockChoice = str | type
else:
    BlockChoice = str
# Sizes of a byte-pair encoding that is trained on a text: the bytes, at least.
BPE_SIZES = (256, 2**20)

# The matrices that adapters may be beside.
MATRICES = ("query", "key", "value", "output", "up", "gate", "down")

# The fields of `ModelConfig` that take a custom block.
CUSTOM_FIELDS = ("block", "norm", "attention", "mlp")


@dataclass(frozen=True)
class BlockNames(Rule):
    """The names of blocks that a field may have, in `Annotated`; with `custom`, also the name of a
    custom block. The block's own options may follow the name: see `split_options`."""

    names: tuple[str, ...]
    custom: bool = True

    def check(self, name: str, value: Any) -> None:
        """**Raises:** `UserError` if `value` names none of these."""
        block, _ = split_options(value)
        custom = ", or FILE.py:CLASS for a custom block" if self.custom else ""
        require(
            block in self.names or (self.custom and is_custom(block)),
            f"{name} must be one of {', '.join(self.names)}{custom}, got {value!r}."
            f"{_hint(block, self.names)}",
        )

    @staticmethod
    def of(kind: type, field: str) -> tuple[str, ...]:
        """The names in the annotation of a field."""
        notes = annotations(kind)[field].__metadata__
        return next(note.names for note in notes if isinstance(note, BlockNames))


@dataclass(frozen=True)
class EveryNth(Rule):
    """A number of layers and one of the names of blocks, in `Annotated`: see
    `ModelConfig.attention_every`."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> None:
        """**Raises:** `UserError` if `value` is of another form."""
        number, _, block = value.partition(":")
        require(
            re.fullmatch(r"[2-9]|[1-9]\d{1,2}", number) is not None
            and split_options(block)[0] in self.names,
            f"{name} must be a number from 2 to 999, and one of {', '.join(self.names)}, as in "
            f"4:full, got {value!r}. (Only model.attention takes a custom block.)"
            f"{_hint(split_options(block)[0], self.names)}",
        )


def _hint(block: str, names: tuple[str, ...]) -> str:
    """For a block with what is no option."""
    first, _, _ = block.rpartition(":")
    known = first in names or is_custom(first)
    return " An option is written :NAME=VALUE." if known else ""


def check_every(value: str | None, n_layers: int) -> None:
    """**Raises:** `UserError` if no layer of `n_layers` is an Nth: see `EveryNth`."""
    number = "0" if value is None else value.partition(":")[0]
    require(
        int(number) <= n_layers,
        f"model.attention_every {value} needs a model.n_layers of {number} or more, got "
        f"{n_layers}.",
    )


def split_options(value: BlockChoice) -> tuple[str, Mapping[str, str]]:
    """A block and its own options: of `moe:n_experts=8:balance_loss=0.1`, `moe` and a dict of two
    strings; of `FILE.py:CLASS:rank=4`, `FILE.py:CLASS` and a dict of one.

    **Raises:** `UserError` if an option is there twice.
    """
    name, *options = re.split(r":(?=\w+=)", str(value))
    pairs: dict[str, str] = {}
    for option, _, text in (option.partition("=") for option in options):
        require(option not in pairs, f"{str(value)[:100]!r} has the option {option} twice.")
        pairs[option] = text
    return name, pairs


def with_options(name: str, options: Any) -> str:
    """The text that `split_options` and `parse_options` read: a block's name, and those of its
    options (a dataclass) that are not the defaults."""
    changed = {
        field.name: value
        for field in dataclasses.fields(options)
        if (value := getattr(options, field.name)) != field.default
    }
    return ":".join([name, *(f"{option}={str(x).lower()}" for option, x in changed.items())])


def parse_options(name: str, make: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The options of a block, in the types that the annotations of `make` name: of a dataclass of
    options, or of a custom block.

    **Raises:** `UserError`, with `name`, if `make` does not take an option or its value.
    """
    known = {
        option: parameter
        for option, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and option not in ("key", "causal", "layer")
    }
    options = {}
    for option, text in texts.items():
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise UserError(f"{name} has no option {option}: {has}.")
        options[option] = _parse(f"{option} in {name}", text, known[option].annotation)
    return options


def _parse(name: str, text: str, kind: Any) -> Any:
    """An option's value, in the annotated type.

    **Raises:** `UserError` if `text` is no such value.
    """
    # With `from __future__ import annotations`, an annotation is its text.
    kind = {"bool": bool, "int": int, "float": float, "str": str}.get(kind, kind)
    kind = _without_none(kind)
    plain = _without_none(get_args(kind)[0] if hasattr(kind, "__metadata__") else kind)
    require(
        plain in (bool, int, float, str),
        f"{name} must be annotated as bool, int, float or str, to be set by name.",
    )
    value: Any = text
    try:
        if plain is bool:
            value = {"true": True, "false": False}[text.lower()]
        elif plain in (int, float):
            value = plain(text)
    except (ValueError, KeyError):
        wanted = "true or false" if plain is bool else plain.__name__
        raise UserError(f"{name} must be {wanted}, got {text!r}.") from None
    return check_value(name, value, kind)


def _without_none(kind: Any) -> Any:
    """A type, of an annotation that also takes None."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return next(k for k in get_args(kind) if k is not NoneType)


def is_custom(value: str) -> bool:
    """Whether `value` names a custom block: `FILE.py:CLASS`, or `CLASS` alone, which begins with a
    capital letter and is in one of the files that `--custom` names."""
    # A class that is not at the top of its file has dots in its name.
    pattern = r".+\.py:[A-Za-z_][\w.<>]*|[A-Z]\w*"
    return re.fullmatch(pattern, value) is not None


class CustomBlock(str):
    """The name of a custom block in a config, with its options; and the class itself.

    **Raises:** `UserError` if the class is not built from `(config, *, key)`, and perhaps `causal`
    and `layer`.
    """

    block: type

    def __new__(cls, name: str, block: type):
        try:
            signature = inspect.signature(block)
            facts = {name: None for name in ("causal", "layer") if name in signature.parameters}
            signature.bind(None, key=None, **facts)
        except (TypeError, ValueError) as error:  # ValueError: a class that is built in
            raise UserError(
                f"{name} must be built from (config, *, key), with a ModelConfig: {error}."
            ) from error
        self = super().__new__(cls, name)
        self.block = block
        return self

    def __eq__(self, other: object) -> bool:
        # A class that is defined again has the same name.
        same = not isinstance(other, CustomBlock) or self.block is other.block
        return str.__eq__(self, other) is True and same

    def __ne__(self, other: object) -> bool:  # that of `str` compares the texts alone
        return not self == other

    __hash__ = str.__hash__

    def __getnewargs__(self) -> Any:  # for `copy.deepcopy`
        return str(self), self.block


def custom_name(block: type) -> str:
    """`FILE.py:CLASS`."""
    try:
        file = os.path.relpath(inspect.getfile(block))
    except (TypeError, OSError, ValueError):  # typed at a prompt; on another drive
        file = f"{block.__module__}.py"
    return f"{file}:{block.__qualname__}"


def parse_bpe(name: str) -> int:
    """The size in `bpe:SIZE`.

    **Raises:** `UserError` if there is none, or it is out of range.
    """
    size = re.fullmatch(r"bpe:([1-9]\d{2,6})", name)
    low, high = BPE_SIZES
    if size is None or not low <= int(size[1]) <= high:
        raise UserError(
            f"data.tokenizer bpe:SIZE needs a size from {low} to {high}, such as bpe:4096, got "
            f"{name!r}."
        )
    return int(size[1])


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters, as `model.lora` describes them."""

    rank: Annotated[int, Between(1, 10_000)]
    alpha: Annotated[float, Between(0.0, above=True)]
    matrices: tuple[str, ...]

    def __post_init__(self):
        check_fields("model.lora ", self)
        require(
            set(self.matrices) <= set(MATRICES) and len(set(self.matrices)) == len(self.matrices),
            f"model.lora matrices must be some of {'+'.join(MATRICES)}, got "
            f"{'+'.join(self.matrices)}.",
        )


def parse_lora(value: str) -> LoRA:
    """The adapters that `model.lora` describes: `8:alpha=16:matrices=query+value`.

    **Raises:** `UserError` if it is not of this form, or out of range.
    """
    rank, options = split_options(value)
    number = r"[0-9.e+-]{1,20}"
    require(
        re.fullmatch(r"-?\d{1,9}", rank) is not None
        and options.keys() <= {"alpha", "matrices"}
        and re.fullmatch(number, options.get("alpha", "1")) is not None,
        "model.lora must be a rank, which alpha and matrices may follow, as in 8 or "
        f"8:alpha=16:matrices=query+value, got {value[:100]!r}.",
    )
    try:
        alpha = float(options.get("alpha", 2 * int(rank)))
    except ValueError:  # such as 1-2
        alpha = math.nan
    matrices = tuple(options["matrices"].split("+")) if "matrices" in options else MATRICES
    return LoRA(rank=int(rank), alpha=alpha, matrices=matrices)
