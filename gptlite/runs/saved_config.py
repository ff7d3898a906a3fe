"""The config in a run's folder, and copies of the files with its custom blocks.

The copies are for people to read. They are never executed.
"""

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

from gptlite.config import Config, DataConfig, ModelConfig
from gptlite.custom import custom_sources
from gptlite.errors import UserError
from gptlite.machine.files import read_bounded, read_json, write_atomically, write_json


def save_config(config: Config, path: Path) -> None:
    """Write `config` as JSON."""
    write_json(path, dataclasses.asdict(config))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    **Raises:** `UserError` if the file is no config of this version.
    """
    try:
        fields: dict[str, Any] = read_json(path)
        sections = {name: kind(**fields.pop(name)) for name, kind in get_type_hints(Config).items()}
        return Config(**sections, **fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable gptlite config: {error}") from error


def corpus_arguments(data: DataConfig) -> list[str]:
    """The command-line arguments that name the text of a run; none for gptlite's own texts."""
    ours = ("auto", "shakespeare", "pydoc")
    return [] if data.corpus in ours else ["--data.corpus", data.corpus]


def save_sources(run: Path, config: ModelConfig) -> None:
    """Copy the files with the custom blocks of `config` into the run."""
    for name, source in custom_sources(config).items():
        (run / "custom").mkdir(exist_ok=True)
        write_atomically(run / "custom" / name, source)


def changed_sources(run: Path, config: ModelConfig) -> list[str]:
    """The names of those files that differ from their copies in the run."""
    if (run / "custom").is_symlink():
        return []
    return [
        name
        for name, source in custom_sources(config).items()
        if (copy := run / "custom" / name).exists() and not _holds(copy, source)
    ]


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_bounded(path, len(content)) == content
    except OSError:
        return False
