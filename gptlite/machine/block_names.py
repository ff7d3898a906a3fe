"""How a config names a block: by the package's name for it, or as FILE.py:CLASS, with options."""

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptlite.errors import require
from gptlite.machine.fields import Rule

# The name of a block, with its own options; in Python, also the class of a custom block.
if TYPE_CHECKING:
    BlockChoice = str | type
else:
    BlockChoice = str
# Loaded custom blocks, by their name in a config.
CUSTOM: dict[str, type] = {}

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
