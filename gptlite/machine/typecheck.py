"""The checker that the import hook applies to every annotated function and module."""

import functools
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# The numeric tower: an int is accepted for a float, as in `dropout=0`.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecker(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checked by beartype. The check is made when `function` is first called: most are
    never called in a process, and to make all would take a third of a second of every start."""
    checked = None

    @functools.wraps(function)
    def check(*args, **kwargs):
        nonlocal checked
        if checked is None:
            checked = _check(function)
        return checked(*args, **kwargs)

    return check
