"""The config in a run's folder, and copies of the files with its custom blocks.

The copies are for people to read. They are never executed.
"""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, get_type_hints

from gptlite.config import Config, DataConfig, ModelConfig
from gptlite.custom import custom_sources
from gptlite.errors import UserError, require
from gptlite.machine.files import read_bounded, write_atomically, write_json
from gptlite.machine.progress import log


def save_config(config: Config, path: Path) -> None:
    """Write `config` as JSON."""
    write_json(path, dataclasses.asdict(config))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    **Raises:** `UserError` if the file is no config of this version.
    """
    from gptlite.machine.records import read_record  # `--help` need not wait for msgspec

    try:
        fields = read_record(path, dict[str, Any])
        config = None if "model_type" in fields else config_of(fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable gptlite config: {error}") from error
    if config is None:
        raise UserError(
            f"{path.parent} is a model in Hugging Face's format: name it as hf:{path.parent}."
        )
    return config


def config_of(fields: dict[str, Any]) -> Config:
    """The config that `dataclasses.asdict` made `fields` of.

    **Raises:** `KeyError`, `TypeError` and `UserError` if they are not those of a config.
    """
    fields = dict(fields)
    sections = {name: kind(**fields.pop(name)) for name, kind in get_type_hints(Config).items()}
    return Config(**sections, **fields)


def corpus_arguments(data: DataConfig) -> list[str]:
    """The command-line arguments that name the text of a run; none for gptlite's own texts."""
    ours = ("auto", "shakespeare", "pydoc")
    return [] if data.corpus in ours else ["--data.corpus", data.corpus]


def with_corpus(config: Config, corpus: str | None, owner: str) -> Config:
    """A config that was read from `owner`, with its text as the command names it. (What is read may
    come from a stranger: only the user decides which files are read.)

    **Raises:** `UserError` if it is not gptlite's own, and the command does not name it.
    """
    saved = config.data.corpus
    require(
        corpus is not None or not corpus_arguments(config.data),
        f"{owner} was trained on {saved}, which is not gptlite's own text and is read only if "
        f"the command names it: {shlex.join(corpus_arguments(config.data))}.",
    )
    data = dataclasses.replace(config.data, corpus=saved if corpus is None else corpus)
    return dataclasses.replace(config, data=data)


def save_sources(run: Path, config: ModelConfig) -> None:
    """Copy the files with the custom blocks of `config` into the run, unless there is a copy of
    that name."""
    for name, source in custom_sources(config).items():
        (run / "custom").mkdir(exist_ok=True)
        if not (run / "custom" / name).exists():
            write_atomically(run / "custom" / name, source)


def changed_sources(run: Path, config: ModelConfig) -> list[str]:
    """The names of those files that none of the copies in the run is like. (A file may have another
    name now.)"""
    folder = run / "custom"
    copies = [] if folder.is_symlink() else sorted(folder.glob("*"))
    return [
        name
        for name, source in custom_sources(config).items()
        if copies and not any(_holds(copy, source) for copy in copies)
    ]


def tell_changed_sources(run: Path, config: ModelConfig) -> None:
    """A line on standard output for each file of `changed_sources`."""
    for changed in changed_sources(run, config):
        log(
            f"{changed} has changed since {run} began, so the weights may not fit it any more. As "
            f"it was, it is in {run / 'custom'}."
        )


def _holds(path: Path, content: bytes) -> bool:
    try:
        return read_bounded(path, len(content)) == content
    except OSError:
        return False
