"""Custom blocks: a user's classes, from files outside the package.

Where the config has a choice of blocks, it also takes `FILE.py:CLASS`, or in Python the class
itself. A block is built as `CLASS(config, key=key)`, from the `ModelConfig`; its other keyword
arguments are its options. Parsing a config executes nothing. Only `load_custom` and `load_class`
execute a file.
"""

import contextlib
import dataclasses
import importlib
import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gptlite.config import Config, ModelConfig
from gptlite.errors import UserError, require
from gptlite.machine.block_names import (
    CUSTOM,
    CUSTOM_FIELDS,
    BlockChoice,
    custom_name,
    is_custom,
    split_options,
)
from gptlite.machine.files import read_json


def custom_blocks(config: ModelConfig) -> dict[str, str]:
    """The custom blocks in `config`, with their options, by their field."""
    fields = {field: str(getattr(config, field)) for field in CUSTOM_FIELDS}
    return {field: value for field, value in fields.items() if is_custom(split_options(value)[0])}


def custom_arguments(config: ModelConfig) -> list[str]:
    """The command-line arguments that name the custom blocks of `config`."""
    named = custom_blocks(config).items()
    return [word for field, value in named for word in (f"--model.{field}", value)]


def load_custom(config: ModelConfig) -> None:
    """Load the custom blocks in `config`, so that a model can be built from it. Executes the files
    that they are in.

    **Raises:** `UserError` if a file cannot be executed or has no such class, or a class is not
    built from `(config, *, key)`.
    """
    for value in custom_blocks(config).values():
        name, _ = split_options(value)
        block = CUSTOM[name] if name in CUSTOM else load_class(name)
        try:
            inspect.signature(block).bind(config, key=None)
        except TypeError as error:
            raise UserError(
                f"{name} must be built from (config, *, key), with a ModelConfig: {error}."
            ) from error
        CUSTOM[name] = block


def resolve_custom(config: Config, names: Mapping[str, BlockChoice]) -> Config:
    """`config`, read from a run, with its custom blocks as named in `names`. A run may come from a
    stranger, so only the user decides which code is executed.

    **Raises:** `UserError` if a block of the run is not named, or another one is.
    """
    given = dataclasses.replace(config.model, **names)
    made_with, named = custom_blocks(config.model), {}
    for field, value in made_with.items():
        again = str(getattr(given, field)) if field in names else ""
        name, options = split_options(again)
        old_name, old_options = split_options(value)
        # The file may be elsewhere, and the options need not be repeated.
        same_class = name.rpartition(":")[2] == old_name.rpartition(":")[2]
        if not again or not same_class or (options and options != old_options):
            but = f" instead of {again}" if again else ""
            raise UserError(
                f"The run was made with {value}, which is not gptlite's own code and is executed "
                f"only if the command names it: {shlex.join(custom_arguments(config.model))}{but}."
            )
        named[field] = name + value.removeprefix(old_name)
    for field in names.keys() - made_with.keys():
        raise UserError(
            f"The run has no custom block for model.{field}, which is "
            f"{getattr(config.model, field)}: leave {names[field]} out."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **named))


def custom_sources(config: ModelConfig) -> dict[str, bytes]:
    """The source files of the loaded custom blocks of `config`, by file name."""
    found = {}
    for value in custom_blocks(config).values():
        with contextlib.suppress(TypeError, OSError):  # no file: the class was typed at a prompt
            file = Path(inspect.getfile(CUSTOM[split_options(value)[0]]))
            found[file.name] = file.read_bytes()
    return found


def _is_run(folder: Path) -> bool:
    try:
        return {"data", "model", "training"} <= read_json(folder / "config.json").keys()
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _source_only() -> Iterator[None]:
    """Imports inside neither read nor write compiled files, which need not be of the source beside
    them."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def load_class(name: str) -> type:
    """The class `FILE.py:CLASS`. Executes the file.

    **Raises:** `UserError` if that fails, there is no such class, or the file is in a run's folder,
    which may come from a stranger: the file could import others that lie beside it.
    """
    import jaxtyping

    file, _, cls = name.rpartition(":")
    try:
        path = Path(file).resolve()
        found = path.is_file()
    except (OSError, RuntimeError):  # a name that is too long, a loop of links
        path, found = Path(), False
    require(found, f"There is no file {file} with the class {cls}.")
    # As typed, too: in a run, a link may lead out of it.
    for folder in (*path.parents, *Path(file).absolute().parents):
        require(
            not _is_run(folder),
            f"{file} is in the folder of a run, from which nothing is executed: read it, and copy "
            "it to another folder.",
        )
    stem = path.stem
    module = sys.modules.get(stem)
    if module is None:
        sys.path.insert(0, str(path.parent))
        try:
            # Its annotations are checked as the package's are.
            hook = jaxtyping.install_import_hook(stem, "gptlite.machine.typecheck.typechecker")
            with hook, _source_only():
                module = importlib.import_module(stem)
        except Exception as error:
            sys.modules.pop(stem, None)
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{file} cannot be loaded: {what} (--debug shows where).") from error
        finally:
            sys.path.remove(str(path.parent))
    if getattr(module, "__file__", None) != str(path):
        raise UserError(f"{file} cannot be loaded: a module {stem} is loaded already; rename it.")
    found = getattr(module, cls, None)
    if not isinstance(found, type):
        classes = [
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and (v.__module__, v.__qualname__) == (stem, n)
        ]
        has = f"it has {', '.join(classes)}" if classes else "it has none"
        raise UserError(f"There is no class {cls} in {file}: {has}.")
    if (found.__module__, found.__qualname__) != (stem, cls):
        raise UserError(
            f"{cls} in {file} is another name for {custom_name(found)}: name a class where it is "
            "defined, at the top of its file."
        )
    return found
