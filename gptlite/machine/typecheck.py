"""Shapes and types are checked while JAX traces: the import hook, and what it applies."""

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class CheckedModules:
    """Lets jaxtyping's import hook check some modules and packages. The hook is made when the first
    of them is imported, because jaxtyping and beartype take a fifth of a second."""

    def __init__(self, names: Sequence[str]):
        self._names, self._lock = names, threading.Lock()
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{name}.") for name in self._names):
            return None
        with self._lock:
            if self in sys.meta_path:
                import jaxtyping

                jaxtyping.install_import_hook(self._names, f"{__name__}.checked")
                sys.meta_path.remove(self)
        return importlib.util.find_spec(fullname)


@functools.cache
def _checker() -> Callable[..., Any]:
    from beartype import BeartypeConf, beartype

    # The numeric tower: an int is accepted for a float, as in `dropout=0`.
    return beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checked by beartype. The check is made when `function` is first called: most are
    never called in a process, and to make all would take a third of a second of every start."""
    checker = None

    @functools.wraps(function)
    def check(*args, **kwargs):
        nonlocal checker
        if checker is None:
            checker = _checker()(function)
        return checker(*args, **kwargs)

    return check
