"""Blocks of a user's own, from a file outside the package.

Where the config has a choice of blocks, it also takes `FILE.py:CLASS`, or in Python the class
itself. A block is built as `CLASS(config, key=key)`, from the `ModelConfig`. To parse a config
executes nothing: `load_own` does, and nothing else.
"""

import contextlib
import dataclasses
import importlib
import inspect
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptlite.config import OWN_KNOBS, Config, ModelConfig, UserError, block_name, is_own, require

# In a run: a copy of the files, to be read.
OWN_FOLDER = "own"


def own_blocks(config: ModelConfig) -> dict[str, Any]:
    """The blocks in `config` that are not the package's, by their knob."""
    return {knob: value for knob in OWN_KNOBS if is_own(value := getattr(config, knob))}


def own_options(config: ModelConfig) -> list[str]:
    """The words of a command line that name them."""
    named = own_blocks(config).items()
    return [word for k, v in named for word in (f"--model.{k}", block_name(v))]


def load_own(config: Config) -> Config:
    """`config` with classes in place of their names. Executes the files that they are in.

    **Raises:** `UserError` if a file cannot be executed or has no such class, or a class is not
    built from `(config, *, key)`.
    """
    loaded = {
        knob: load_class(value) if isinstance(value, str) else value
        for knob, value in own_blocks(config.model).items()
    }
    for block in loaded.values():
        try:
            inspect.signature(block).bind(config.model, key=None)
        except TypeError as error:
            raise UserError(
                f"{block_name(block)} must be built from (config, *, key), with a ModelConfig: "
                f"{error}."
            ) from error
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **loaded))


def named_again(config: Config, names: Mapping[str, Any]) -> Config:
    """`config`, as it was read from a run, with its own blocks as they are named in `names`. (A run
    may come from anywhere: which code is executed is for the user alone to say.)

    **Raises:** `UserError` if one of the run's is not named, or one is named that is not the run's.
    """
    made_with = own_blocks(config.model)
    for knob, value in made_with.items():
        again = names.get(knob)
        if again is None or _class_of(again) != _class_of(value):
            but = "" if again is None else f" instead of {block_name(again)}"
            raise UserError(
                f"The run was made with {_class_of(value)}, which is not gptlite's own code and is "
                f"only executed if you name it again: {shlex.join(own_options(config.model))}{but}."
            )
    for knob in names.keys() - made_with.keys():
        raise UserError(
            f"The run was made with model.{knob} {getattr(config.model, knob)}, got "
            f"{block_name(names[knob])}."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **names))


def own_sources(config: ModelConfig) -> dict[str, bytes]:
    """The files that the own blocks of `config`, loaded, are in, by name."""
    found = {}
    for value in own_blocks(config).values():
        with contextlib.suppress(TypeError, OSError):  # typed at a prompt: there is no file
            file = Path(inspect.getfile(value))
            found[file.name] = file.read_bytes()
    return found


def changed_sources(folder: Path, config: ModelConfig) -> list[str]:
    """Which of `own_sources` are not what was kept of them in `folder`."""
    return [
        name
        for name, content in own_sources(config).items()
        if (folder / name).is_file() and (folder / name).read_bytes() != content
    ]


def _class_of(value: Any) -> str:
    return block_name(value).rpartition(":")[2]


def load_class(name: str) -> type:
    """The class `FILE.py:CLASS`. Executes the file.

    **Raises:** `UserError` if that fails, or there is no such class.
    """
    import jaxtyping

    file, _, cls = name.rpartition(":")
    path = Path(file).resolve()
    require(path.is_file(), f"There is no file {file}, of which {cls} was to be taken.")
    stem = path.stem
    known = sys.modules.get(stem)
    if known is None:
        sys.path.insert(0, str(path.parent))
        try:
            # Its annotations are checked as the package's are.
            with jaxtyping.install_import_hook(stem, "gptlite.typecheck.typechecker"):
                known = importlib.import_module(stem)
        except Exception as error:
            sys.modules.pop(stem, None)
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{file} cannot be loaded: {what} (--debug shows where).") from error
        finally:
            sys.path.remove(str(path.parent))
    if getattr(known, "__file__", None) != str(path):
        raise UserError(f"{file} cannot be loaded: a module {stem} is loaded already; rename it.")
    found = getattr(known, cls, None)
    if not isinstance(found, type):
        classes = [
            n
            for n, v in vars(known).items()
            if inspect.isclass(v) and (v.__module__, v.__qualname__) == (stem, n)
        ]
        has = f"it has {', '.join(classes)}" if classes else "it has none"
        raise UserError(f"There is no class {cls} in {file}: {has}.")
    if (found.__module__, found.__qualname__) != (stem, cls):
        raise UserError(
            f"{cls} in {file} is another name for {found.__qualname__} of {found.__module__}: name "
            "a class where it is defined, at the top of its file."
        )
    return found
