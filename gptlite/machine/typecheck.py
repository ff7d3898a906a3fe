"""The checker that the import hook applies to every annotated function and module."""

import functools
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# The numeric tower: an int is accepted for a float, as in `dropout=0`.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checked by beartype. The check is made when `function` is first called: most are
    never called in a process, and to make all would take a third of a second of every start."""
    checker = None

    @functools.wraps(function)
    def check(*args, **kwargs):
        nonlocal checker
        if checker is None:
            checker = _check(function)
        return checker(*args, **kwargs)

    return check
