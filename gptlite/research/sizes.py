"""Numbers that a block holds, in its fields and in its code: windows, rings, chunks, tables."""

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gptlite.research.subject import modules_in

# Code of these packages is tested elsewhere, and reads its sizes from fields.
PACKAGES = {"gptlite", "equinox", "jax", "jaxtyping", "numpy", "builtins"}


def sizes_of(block: Any) -> set[int]:
    """Whole numbers in fields of the modules in `block`, in their classes, and in the functions and
    globals that these name, if they do not come from a package."""
    parts = list(modules_in(block))
    things = [value for part in parts for value in vars(part).values()]
    classes = {base for part in parts for base in type(part).__mro__ if _is_own(base)}
    for base in classes:
        # By `getattr`, a method is a function again, which Equinox wraps.
        own = {name: getattr(base, name, None) for name in vars(base)}
        # Python's own numbers are no sizes: `__firstlineno__` is a line of the source.
        things += [x for name, x in own.items() if callable(x) or not name.startswith("__")]
    return set(_numbers(things, set()))


def _is_own(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return str(name or "builtins").partition(".")[0] not in PACKAGES | sys.stdlib_module_names


def _numbers(things: Any, seen: set[CodeType]) -> Iterator[int]:
    """The whole numbers among `things`, and in the code of those that are functions."""
    for thing in things:
        if type(thing) is int:
            yield thing
        elif isinstance(thing, tuple | list | frozenset):
            yield from _numbers(thing, seen)
        elif isinstance(thing, functools.partial):
            yield from _numbers([thing.func, *thing.args, *thing.keywords.values()], seen)
        elif isinstance(thing, CodeType):
            yield from _numbers(thing.co_consts, seen)
        elif callable(thing):
            # A custom_vjp also has functions for the way there and back.
            for function in (thing, getattr(thing, "fwd", None), getattr(thing, "bwd", None)):
                yield from _in_function(inspect.unwrap(function) if function else None, seen)


def _in_function(function: Any, seen: set[CodeType]) -> Iterator[int]:
    if not isinstance(function, FunctionType) or not _is_own(function):
        return
    code, names = function.__code__, function.__globals__
    if code in seen:
        return
    seen.add(code)
    # Names of attributes are among these, too: of `sizes.WINDOW`.
    used = {name for part in _codes(code) for name in part.co_names}
    named = [names[name] for name in used if name in names]
    for thing in named:  # which grows: a module may be in another one
        if isinstance(thing, ModuleType) and _is_own(thing):
            named += [getattr(thing, name) for name in used if hasattr(thing, name)]
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from _numbers([code, *named, *cells, *defaults], seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """`code`, and that of functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
