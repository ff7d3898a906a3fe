"""What the text of an option names: a block, with options of its own, by the package's name for it
or as FILE.py:CLASS; a byte-pair encoding; adapters."""

import inspect
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from gptlite.errors import UserError, require
from gptlite.machine.fields import Between, Rule, check_fields

# The name of a block, with its own options; in Python, also the class of a custom block.
if TYPE_CHECKING:
    BlockChoice = str | type
else:
    BlockChoice = str
# Loaded custom blocks, by their name in a config.
CUSTOM: dict[str, type] = {}

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
        more = ", or FILE.py:CLASS for a custom block" if self.custom else ""
        require(
            block in self.names or (self.custom and is_custom(block)),
            f"{name} must be one of {', '.join(self.names)}{more}, got {value!r}.",
        )


def split_options(value: BlockChoice) -> tuple[str, Mapping[str, str]]:
    """A block and its own options: of `moe:n_experts=8:balance_loss=0.1`, `moe` and a dict of two
    strings; of `FILE.py:CLASS:rank=4`, `FILE.py:CLASS` and a dict of one."""
    name, *options = re.split(r":(?=\w+=)", str(value))
    return name, dict(option.split("=", 1) for option in options)


def is_custom(value: str) -> bool:
    """Whether `value` names a custom block: `FILE.py:CLASS`, or `CLASS` alone, which begins with a
    capital letter and is in one of the files that `--custom` names."""
    # A class that is not at the top of its file has dots in its name.
    pattern = r".+\.py:[A-Za-z_][\w.<>]*|[A-Z]\w*"
    return value.isprintable() and re.fullmatch(pattern, value) is not None


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
