"""A trained model, read from its run's folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from gptlite.custom import load_custom, resolve_custom
from gptlite.errors import UserError, require
from gptlite.machine.block_names import BlockChoice
from gptlite.machine.progress import log
from gptlite.runs.find import find_run
from gptlite.runs.model import abstract_model
from gptlite.runs.run import Run
from gptlite.runs.saved_config import changed_sources, load_config
from gptlite.runs.tokenizers import load_tokenizer
from gptlite.runs.weights import fill, load_weights, named_arrays
from gptlite.training.frozen import frozen_in


def load_run(
    path: Path | str,
    which: Literal["best", "last"] = "best",
    *,
    custom: Mapping[str, BlockChoice] = MappingProxyType({}),
) -> Run:
    """Load a run's model, tokenizer and config. Adapters are added to their matrices.

    `custom`: the custom blocks that the run was made with, named again by their field, as in
    `{"mlp": SineMLP}` or `{"mlp": "my_blocks.py:SineMLP"}`; the file is then executed. A line on
    standard output says which of them have changed since.

    **Raises:** `UserError` if a file is missing, damaged or of another shape than the config says,
    or a custom block is not named.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a run: it has no config.json.")
    config = resolve_custom(load_config(path / "config.json"), custom)
    load_custom(config.model)
    for changed in changed_sources(path, config.model):
        log(f"{changed} has changed since {path} began.")
    tokenizer = load_tokenizer(path)

    if which == "best" and not (path / "best.safetensors").exists():
        raise UserError(
            f"The run {path} has no best weights. (The first evaluation saves them.) Use its "
            "last ones (sample.py --weights last), or resume it (train.py --resume)."
        )
    file = path / f"{which}.safetensors"
    model = load_weights(file, abstract_model(config.model, tokenizer), frozen_in(config))
    if config.model.lora is not None:
        from gptlite.adapters import merged

        config = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None))
        model = fill(
            abstract_model(config.model, tokenizer),
            named_arrays(merged(model)),
            f"The weights {file}",
        )
    return Run(path, config, tokenizer, model)


def load_any(
    name: str | None,
    which: Literal["best", "last"] = "best",
    custom: Mapping[str, BlockChoice] = MappingProxyType({}),
) -> Run:
    """The run in a folder or of a name in `runs/`; for `hf:NAME`, a model of Hugging Face."""
    if name is not None and name.startswith("hf:"):
        from gptlite.hugging_face.folder import load_hf  # its imports take time

        require(which == "best", f"{name} has one set of weights: leave --weights last out.")
        return load_hf(name.removeprefix("hf:"))
    return load_run(find_run(name, which), which, custom=custom)
