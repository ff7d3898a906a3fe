"""A run's config as a file, and what of it may change when the run is resumed."""

import dataclasses
from pathlib import Path
from typing import Any

from gptlite.config import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    UserError,
    require,
)
from gptlite.files import read_json, write_json

# What `--resume` may change, besides the name of the same text.
RESUMABLE = {
    "data": ("corpus",),
    "training": (
        "steps",
        "eval_every",
        "sample_tokens",
        "save_seconds",
        "keep",
        "on_nonfinite",
        "cpu_devices",
    ),
    "mesh": ("fsdp", "tensor"),
}


def save_config(config: Config, path: Path) -> None:
    """Write `config` as JSON."""
    write_json(path, dataclasses.asdict(config))


def load_config(path: Path) -> Config:
    """Read what `save_config` wrote.

    **Raises:** `UserError` if the file is no config of this version.
    """
    try:
        sections: dict[str, dict[str, Any]] = read_json(path)
        return Config(
            data=DataConfig(**sections.pop("data")),
            model=ModelConfig(**sections.pop("model")),
            optimizer=OptimizerConfig(**sections.pop("optimizer")),
            training=TrainingConfig(**sections.pop("training")),
            mesh=MeshConfig(**sections.pop("mesh")),
            **sections,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a readable gptlite config: {error}") from error


def require_resumable(before: Config, after: Config) -> None:
    """Raise `UserError`, naming every field, if `after` changes what `--resume` may not change."""
    changed = [
        f"{section}.{name} (the run has {old}, got {new})"
        for section, fields in dataclasses.asdict(before).items()
        for name, old in fields.items()
        if name not in RESUMABLE.get(section, ())
        and (new := getattr(getattr(after, section), name)) != old
    ]
    require(not changed, f"These may not change on --resume: {'; '.join(changed)}.")
