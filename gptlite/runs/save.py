"""A model that was trained in Python, kept as a run."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np

from gptlite.config import Config, DataConfig, MeshConfig, TrainingConfig
from gptlite.errors import require
from gptlite.machine.files import remove
from gptlite.machine.pytrees import count_parameters
from gptlite.models.gpt import GPT
from gptlite.runs.checkpoints import Record, describe_devices
from gptlite.runs.find import check_free, new_run
from gptlite.runs.folder import RunFolder
from gptlite.runs.model import abstract_model, separator_of
from gptlite.runs.run import Run
from gptlite.runs.saving import Checkpoints
from gptlite.runs.weights import fill, named_arrays, named_leaves
from gptlite.text.tokenizer import Tokenizer
from gptlite.training.fit import Position
from gptlite.training.step import TrainState


def save_run(
    name: str,
    model: GPT,
    tokenizer: Tokenizer,
    training: TrainingConfig | None = None,
    *,
    overwrite: bool = False,
) -> Run:
    """Keep a model that was trained in Python as the run `runs/NAME`, which `gptlite.load`,
    the commands `sample`, `serve`, `export` and `train --init-from` take. There is no state of an
    optimizer in it, so that it cannot be resumed. Adapters are added to their matrices.

    **Arguments:**

    - `name`: the run's. Its folder is `runs/NAME`.
    - `model`: what has been trained.
    - `tokenizer`: the one of the ids that the model was trained on.
    - `training`: what it was trained with, for the run's config.
    - `overwrite`: replace the run of that name, if there is one.

    **Raises:** `UserError` if the model is no `GPT` for the ids of the tokenizer, a number in it is
    NaN, there is a run of that name, or it cannot be written.
    """
    require(isinstance(model, GPT), f"A run is of a GPT, got {type(model).__name__}.")
    require(isinstance(tokenizer, Tokenizer), f"A run has a tokenizer, got {tokenizer!r:.100}.")
    if model.config.lora is not None:
        from gptlite.adapters import merged

        model = merged(model)
    require(
        model.vocab_size == tokenizer.vocab_size,
        f"The model has {model.vocab_size:,} ids, and the tokenizer {tokenizer.vocab_size:,}.",
    )
    separator = separator_of(model.config, tokenizer)
    require(
        model.separator == separator,
        f"The model's documents begin with the id {model.separator}, and the tokenizer's with "
        f"{separator}.",
    )
    # Nothing is frozen in a run whose checkpoint has all parameters.
    training = dataclasses.replace(training or TrainingConfig(), freeze="")
    shape = dataclasses.replace(model.config, lora=None)
    config = Config(data=DataConfig(tokenizer=_name_of(tokenizer)), model=shape, training=training)
    whole = _padded(model, abstract_model(shape, tokenizer))
    step = training.steps
    record = Record(
        {"step": step}, count_parameters(whole), Position(step), 0.0, "", "", describe_devices(MESH)
    )
    path = new_run(name)
    part = path.with_name(f".{name}.part")
    with RunFolder(path) as folder:
        check_free(path, overwrite=overwrite)
        folder.lock()
        remove(part)  # of a call that was killed
        try:
            # The checkpoint first: where it cannot be written, no run is replaced.
            with contextlib.closing(Checkpoints(part, 1)) as checkpoints:
                checkpoints.save(TrainState(whole, (), jnp.asarray(step, jnp.int32)), record)
                checkpoints.wait()
            folder.create(config, tokenizer, overwrite=overwrite, checkpoints=part)
        finally:
            remove(part)
    return Run(path, config, tokenizer, whole)


MESH = MeshConfig()


def _name_of(tokenizer: Tokenizer) -> str:
    """What `--data.tokenizer` would have been, as far as it is known."""
    record = tokenizer.to_json()
    name = str(record.get("name", ""))
    if record["kind"] == "tiktoken":
        return name if name.startswith("bpe:") else f"tiktoken:{name}"
    return "hf:" if record["kind"] == "hf" else record["kind"]


def _padded(model: GPT, abstract: GPT) -> GPT:
    """The model with as many rows of the embedding and the head as a run's has: the tokenizer may
    ask for more than it has ids."""
    arrays = named_arrays(model)
    for name, leaf in named_leaves(abstract).items():
        array = arrays.get(name)
        if array is not None and array.ndim and array.shape[1:] == leaf.shape[1:]:
            missing = max(0, leaf.shape[0] - array.shape[0])
            arrays[name] = np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)])
    return fill(abstract, arrays, "The arrays of the model")
