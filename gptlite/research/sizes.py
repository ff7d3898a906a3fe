"""Numbers that a block holds, in its fields and in its code: windows, rings, chunks, tables."""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from gptlite.research.subject import modules_in

# Code of these packages is tested elsewhere, and reads its sizes from fields.
PACKAGES = ("gptlite", "equinox", "jax", "jaxtyping", "builtins")


def sizes_of(block: Any) -> set[int]:
    """Whole numbers in fields of the modules in `block`, in the methods of their classes, and in
    functions and globals that these name, if they do not come from a package."""
    parts = list(modules_in(block))
    values = [value for part in parts for value in vars(part).values()]
    classes = {base for part in parts for base in type(part).__mro__ if _is_own(base)}
    methods = [getattr(base, name, None) for base in classes for name in vars(base)]
    seen: set[CodeType] = set()
    return {x for x in [*values, *_numbers([*methods, *values], seen)] if type(x) is int}


def _is_own(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "builtins")).partition(".")[0] not in PACKAGES


def _numbers(things: list[Any], seen: set[CodeType]) -> Iterator[Any]:
    """The constants in the code of those of `things` that are functions."""
    for thing in things:
        # A custom_vjp also has a function for the way back.
        for function in (thing, getattr(thing, "bwd", None)):
            function = inspect.unwrap(function) if callable(function) else None
            if isinstance(function, FunctionType) and _is_own(function):
                yield from _in_code(function.__code__, function.__globals__, seen)


def _in_code(code: CodeType, names: dict[str, Any], seen: set[CodeType]) -> Iterator[Any]:
    if code in seen:
        return
    seen.add(code)
    for constant in code.co_consts:
        yield constant
        if isinstance(constant, CodeType):
            yield from _in_code(constant, names, seen)
    named = [names[name] for name in code.co_names if name in names]
    yield from named
    yield from _numbers(named, seen)
