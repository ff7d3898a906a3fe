"""What computes a result: the code and the settings that it holds for."""

import ast
import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from gptlite.config import Config, ModelConfig
from gptlite.custom import custom_sources
from gptlite.machine.fields import settled
from gptlite.machine.names import CUSTOM_FIELDS, split_options

# What trains and judges a variant.
FIRST = Path(__file__).with_name("seeds.py")
# Packages whose version may change what is computed.
PACKAGES = ("jax", "jaxlib", "equinox", "optax", "numpy")


def code_of(config: ModelConfig) -> dict[str, str]:
    """What computes the results of a config whose custom blocks are loaded: the checksum of each
    module of gptlite that takes part, of each file with custom blocks as it was executed, and of
    each module that these import; the versions of packages.

    Modules are found by the `import` lines. Those that are imported otherwise (as `gptlite.NAME`,
    too, if training itself does not import it), and what a module reads from files, are not seen.
    Their files are read once, at the first call, which so must follow the import: an edit while the
    program runs changes nothing in it.
    """
    code = {name: importlib.metadata.version(name) for name in PACKAGES} | _ours()
    for name, source in custom_sources(config).items():
        stem = name.removesuffix(".py")
        code |= _imported(stem, Path(str(sys.modules[stem].__file__)), source, _ours().keys())
    return code


def settings_of(config: Config) -> dict[str, Any]:
    """Everything in a config that decides what is learned. A custom block's file is known by its
    checksum, wherever it lies."""
    found = dict(settled(config, "comparison"))
    for name in CUSTOM_FIELDS:
        value = str(found[f"model.{name}"])
        block = split_options(value)[0]  # an option may have slashes, too
        found[f"model.{name}"] = Path(block).name + value[len(block) :]
    return found


def checksum_of(of: Any) -> str:
    """Of plain data."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def _read(file: Path) -> bytes:
    return file.read_bytes()


@functools.cache
def _ours() -> dict[str, str]:
    return _imported("gptlite.research.seeds", FIRST, FIRST.read_bytes())


def _imported(
    module: str, file: Path, source: bytes, known: Collection[str] = ()
) -> dict[str, str]:
    """A module and all that it imports, except for Python's own and those that are `known`:
    checksums, and versions of packages that are installed. Of a module of gptlite, its own
    alone."""
    is_ours, found = module.startswith("gptlite."), {}
    root = file.parents[module.count(".")]
    pending = [(module, file, source)]
    while pending:
        module, file, source = pending.pop()
        found[module] = hashlib.sha256(source).hexdigest()[:16]
        for name in _imports(module, file, source):
            top = name.partition(".")[0]
            if name in found or name in known or top in sys.stdlib_module_names:
                continue
            if is_ours and top != "gptlite":
                continue
            origin = _origin(name, root)
            if origin is None:  # no module: a name in one
                continue
            if top != "gptlite" and {"site-packages", "dist-packages"} & set(origin.parts):
                found |= _version(top)
            else:
                pending.append((name, origin, _read(origin)))
    return found


def _imports(module: str, file: Path, source: bytes) -> Iterator[str]:
    """The names that may be modules which `source` imports, and the packages that these are in."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package itself, each further one the package around it.
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            start = [*(above if node.level else []), *([node.module] if node.module else [])]
            names = [".".join([*start, name.name]) for name in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _origin(name: str, root: Path) -> Path | None:
    """The file of a module, which is not executed. `root`: a folder to look in first."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None:
        return Path(loaded) if loaded.endswith(".py") else None
    places: list[str] | None = [str(root), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


@functools.cache
def _version(package: str) -> dict[str, str]:
    # A package may be installed under another name than it is imported by.
    names = importlib.metadata.packages_distributions().get(package, [])
    return {name: importlib.metadata.version(name) for name in names}
