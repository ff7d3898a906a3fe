"""Calls of a model's modules, reported."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from gptlite.machine.pytrees import path_name

M = TypeVar("M", bound=eqx.Module)


# `on_call(name, module, arguments, options, out)`: a module's place, the module, what it was called
# with and what came out.
OnCall = Callable[[str, Any, tuple[Any, ...], dict[str, Any], Any], None]


def with_call_hook(model: M, is_hooked: Callable[[Any], bool], on_call: OnCall) -> M:
    """A copy of `model` that calls `on_call` at every call of a module that `is_hooked`. If
    such modules are inside each other, only the outermost counts."""

    def hook(path, node):
        if not is_hooked(node):
            return node
        return _Hooked(node, path_name(path), on_call)

    return jax.tree_util.tree_map_with_path(hook, model, is_leaf=is_hooked)


class _Hooked(eqx.Module):
    """Replaces a module, and reports its calls."""

    wrapped: Any
    name: str = eqx.field(static=True)
    on_call: OnCall = eqx.field(static=True)

    def __call__(self, *arguments, **options):
        out = self.wrapped(*arguments, **options)
        self.on_call(self.name, self.wrapped, arguments, options, out)
        return out

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.wrapped, attribute)
