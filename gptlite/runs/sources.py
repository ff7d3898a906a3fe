"""Copies of custom blocks' files in a run, to be read; they are never executed."""

from pathlib import Path

from gptlite.config import ModelConfig
from gptlite.custom import custom_sources
from gptlite.files import write_atomically

FOLDER = "custom"


def save_sources(run: Path, config: ModelConfig) -> None:
    """Copy the files that the custom blocks of `config` are in."""
    for name, source in custom_sources(config).items():
        (run / FOLDER).mkdir(exist_ok=True)
        write_atomically(run / FOLDER / name, source)


def changed_sources(run: Path, config: ModelConfig) -> list[str]:
    """The names of those files that are no longer as they were copied."""
    return [
        name
        for name, content in custom_sources(config).items()
        if (run / FOLDER / name).is_file() and (run / FOLDER / name).read_bytes() != content
    ]
