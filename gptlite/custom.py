"""Custom blocks: a user's classes, from files outside the package.

Where the config has a choice of blocks, it also takes `FILE.py:CLASS`, or in Python the class
itself. A block is built as `CLASS(config, key=key)`, from the `ModelConfig`; its other keyword
arguments are its options.

A file is executed only if the user names it: in such a field, or with `--custom FILE.py`. A run may
come from a stranger, so what its config names is found in the files of `--custom`. Only
`load_custom` and `load_class` execute a file.
"""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import os
import shlex
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptlite.config import Config, ModelConfig
from gptlite.errors import UserError, require, told
from gptlite.machine.names import (
    CUSTOM_FIELDS,
    BlockNames,
    CustomBlock,
    custom_name,
    is_custom,
    split_options,
)

# A file whose classes may be blocks; in Python, also the class itself; one of them, or several.
Source = str | Path | type
Custom = Source | Sequence[Source]

# The attribute of a loaded module that has its source as it was executed: its file may change.
_SOURCE = "__executed__"
# That source, for each loaded class: the module may be replaced.
_EXECUTED: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()


def custom_blocks(config: ModelConfig) -> dict[str, str]:
    """The custom blocks in `config`, with their options, by their field."""
    fields = {field: getattr(config, field) for field in CUSTOM_FIELDS}
    return {field: value for field, value in fields.items() if is_custom(split_options(value)[0])}


def custom_arguments(config: ModelConfig) -> list[str]:
    """The command-line arguments that name the files with the custom blocks of `config`."""
    names = (split_options(value)[0] for value in custom_blocks(config).values())
    files = dict.fromkeys(name.rpartition(":")[0] for name in names)
    return [word for file in files for word in ("--custom", file)]


def with_custom(config: Config, custom: Custom, *, read: bool = False) -> Config:
    """`config` with custom blocks that are named by their class alone as FILE.py:CLASS, with the
    file in `custom` that has the class. If it was `read` from a run, that holds for all of them:
    the run's own file name is only a name. Executes nothing.

    **Raises:** `UserError` if no file in `custom` has a class, or two have it.
    """
    check_files(custom)
    named = {}
    for field, value in custom_blocks(config.model).items():
        if isinstance(value, CustomBlock):
            continue
        name, _ = split_options(value)
        block = find_custom(name, custom, read=read, where=f"model.{field}")
        full = block + value.removeprefix(name)
        named[field] = CustomBlock(full, block.block) if isinstance(block, CustomBlock) else full
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **named))


def check_files(custom: Custom) -> None:
    """**Raises:** `UserError` if one of the files cannot be read: it may be mistyped, also where it
    is not needed."""
    for source in _sources(custom):
        if not isinstance(source, type):
            _classes(source)


def find_custom(name: str, custom: Custom, *, read: bool = False, where: str = "a block") -> str:
    """The FILE.py:CLASS that `name` stands for: see `with_custom`, also for the errors."""
    file, _, cls = name.rpartition(":")
    if file and not read:
        return name
    candidates = _files_with(cls, custom)
    # The file may be elsewhere.
    same = [x for x in candidates if Path(x.rpartition(":")[0]).name == Path(file).name]
    candidates = same or candidates
    require(len(candidates) == 1, _wrong_custom(name, where, candidates, custom, read))
    return candidates[0]


def _files_with(cls: str, custom: Custom) -> list[str]:
    """FILE.py:CLASS for each of `custom` that has a class of that name."""
    candidates = {}
    for source in _sources(custom):
        if isinstance(source, type):
            if source.__qualname__ == cls:
                candidates[source] = CustomBlock(custom_name(source), source)
        elif cls in _classes(source):
            candidates.setdefault(Path(source).resolve(), f"{source}:{cls}")
    return list(candidates.values())


def _sources(custom: Custom) -> Sequence[Source]:
    sources = [custom] if isinstance(custom, str | Path | type) else custom
    require(
        isinstance(sources, Sequence) and all(isinstance(x, str | Path | type) for x in sources),
        f"custom must be a file with custom blocks, a class, or a list of these, got {custom!r}.",
    )
    return sources


def _classes(file: str | Path) -> list[str]:
    """The classes of a file, which is not executed.

    **Raises:** `UserError` if it cannot be read as Python.
    """
    require(
        Path(file).suffix == ".py",
        f"--custom takes a file whose name ends in .py, got {str(file)!r}.",
    )
    try:
        pending: list[ast.AST] = [ast.parse(Path(file).read_bytes())]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"--custom {file} cannot be read as a file of Python: {error}.") from error
    names = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            pending += reversed(list(ast.iter_child_nodes(node)))  # also in an `if`, a `try`
    return names


def _wrong_custom(name: str, where: str, candidates: list[str], custom: Custom, read: bool) -> str:
    file, _, cls = name.rpartition(":")
    if candidates:
        return f"There are several classes {cls}: {', '.join(candidates)}. Leave all but one out."
    sources = _sources(custom)
    files = ", ".join(x.__qualname__ if isinstance(x, type) else str(x) for x in sources)
    if read:
        but = f" (there is none in {files})" if files else ""
        return (
            f"The run was made with {name}, which is not gptlite's own code and is executed only "
            f"if the command names a file with that class{but}: "
            f"{shlex.join(['--custom', file or 'FILE.py'])} (in Python: custom=)."
        )
    field = where.removeprefix("model.")
    names = BlockNames.of(ModelConfig, field) if field in CUSTOM_FIELDS else ()
    one_of = f" {where} must be one of {', '.join(names)}, or a custom block." if names else ""
    if files:
        known = [x for source in sources if not isinstance(source, type) for x in _classes(source)]
        has = ", ".join(known) or "none"
        return f"There is no class {cls} for {where} in {files}: it has {has}.{one_of}"
    return (
        f"There is no class {cls} for {where}: name it as FILE.py:{cls}, or give its file with "
        f"--custom.{one_of}"
    )


def load_custom(config: ModelConfig) -> ModelConfig:
    """`config` with its custom blocks loaded, so that a model can be built from it. Executes the
    files that they are in.

    **Raises:** `UserError` if a file cannot be executed or has no such class, or a class is not
    built from `(config, *, key)`.
    """
    loaded = {}
    for field, value in custom_blocks(config).items():
        name, _ = split_options(value)
        if isinstance(value, CustomBlock):
            block = value.block
        else:
            require(":" in name, _wrong_custom(name, "a block", [], (), False))
            block = load_class(name)
        loaded[field] = CustomBlock(value, block)
    return dataclasses.replace(config, **loaded)


def custom_sources(config: ModelConfig) -> dict[str, bytes]:
    """The source files of the loaded custom blocks of `config`, by file name, as they were
    executed."""
    sources = {}
    for value in custom_blocks(config).values():
        # There is no file for a class that was typed at a prompt.
        with contextlib.suppress(TypeError, OSError):
            if isinstance(value, CustomBlock):
                file = Path(inspect.getfile(value.block))
                executed = _EXECUTED.get(value.block)
                sources[file.name] = file.read_bytes() if executed is None else executed
    return sources


def _is_run(folder: Path) -> bool:
    from gptlite.machine.records import read_record  # `--help` need not wait for msgspec

    try:
        record = read_record(folder / "config.json", dict[str, object])
        return {"data", "model", "training"} <= record.keys()
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
    """The class `FILE.py:CLASS`. Executes the file, unless it was, and has not changed since.

    **Raises:** `UserError` if that fails, there is no such class, or the file is in a run's folder,
    which may come from a stranger: the file could import others that lie beside it.
    """
    import jaxtyping

    file, _, cls = name.rpartition(":")
    try:
        path = Path(file).resolve()
        exists = path.is_file()
    except (OSError, RuntimeError):  # a name that is too long, a loop of links
        path, exists = Path(), False
    require(exists, f"There is no file {file} with the class {cls}.")
    # As typed, too: in a run, a link may lead out of it.
    for folder in (*path.parents, *Path(file).absolute().parents):
        require(
            not _is_run(folder),
            f"{file} is in the folder of a run, from which nothing is executed: read it, and copy "
            "it to another folder.",
        )
    stem = path.stem
    require(
        "." not in stem,
        f"{file} cannot be loaded: Python imports no file with a dot in its name before .py.",
    )
    with told(f"{file} cannot be read"):
        source = path.read_bytes()
    module = sys.modules.get(stem)
    if getattr(module, _SOURCE, source) != source:
        del sys.modules[stem]
        module = None
    if module is None:
        sys.path.insert(0, str(path.parent))
        try:
            # Its annotations are checked as the package's are.
            hook = jaxtyping.install_import_hook(stem, "gptlite.machine.typecheck.checked")
            with hook, _source_only():
                module = importlib.import_module(stem)
            setattr(module, _SOURCE, source)
        except Exception as error:
            sys.modules.pop(stem, None)
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{file} cannot be loaded: {what} (--debug shows where).") from error
        finally:
            sys.path.remove(str(path.parent))
        require(path.read_bytes() == source, f"{file} changed while it was loaded: try again.")
    require(
        getattr(module, "__file__", None) == str(path),
        f"{file} cannot be loaded: a module {stem} is loaded already; rename it.",
    )
    loaded = getattr(module, cls, None)
    if not isinstance(loaded, type):
        classes = [
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and (v.__module__, v.__qualname__) == (stem, n)
        ]
        has = f"it has {', '.join(classes)}" if classes else "it has none"
        raise UserError(f"There is no class {cls} in {file}: {has}.")
    require(
        (loaded.__module__, loaded.__qualname__) == (stem, cls),
        f"{cls} in {file} is another name for {custom_name(loaded)}: name a class where it is "
        "defined, at the top of its file.",
    )
    if hasattr(module, _SOURCE):
        _EXECUTED[loaded] = getattr(module, _SOURCE)
    return loaded
