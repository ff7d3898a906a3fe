"""A run's folder: what is in it, written and read.

    config.json        every knob
    tokenizer.json     the tokenizer, whole
    metrics.jsonl      one object a line, one line a dispatch
    best.safetensors   weights at the best evaluation
    last.safetensors   weights at the last one
    loss.png           the curves
    result.json        at the end: what came of it

Plain data throughout: loading a run never executes anything from it.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import PyTree
from safetensors import SafetensorError

from gptlite.config import Config, UserError, load_config, save_config
from gptlite.files import write_atomically
from gptlite.models.gpt import GPT
from gptlite.text.tokenizer import Tokenizer, tokenizer_from_json, tokenizer_to_text

RUNS_FOLDER = Path("runs")


class RunFolder:
    """Writes a run."""

    def __init__(self, path: Path):
        """`path`: as returned by `create`."""
        self.path = path

    @classmethod
    def create(
        cls, path: Path, config: Config, tokenizer: Tokenizer, *, overwrite: bool = False
    ) -> "RunFolder":
        """Make the folder, with config and tokenizer in it.

        **Raises:** `UserError` if there is something at `path` (with `overwrite`: something that
        is not a run), or it cannot be written.
        """
        check_free(path, overwrite=overwrite)
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
            save_config(config, path / "config.json")
            write_atomically(path / "tokenizer.json", tokenizer_to_text(tokenizer))
        except OSError as error:
            raise UserError(f"The run folder {path} cannot be written: {error}.") from error
        return cls(path)

    def log(self, record: dict[str, Any]) -> None:
        """Add a line to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def save_weights(self, model: GPT, *, best: bool) -> None:
        """Write `last.safetensors`, and `best.safetensors` if it is that."""
        content = weights_to_bytes(model)
        for name in ("last", "best") if best else ("last",):
            write_atomically(self.path / f"{name}.safetensors", content)

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`."""
        write_atomically(self.path / "result.json", json.dumps(result, indent=2) + "\n")


def check_free(path: Path, *, overwrite: bool) -> None:
    """**Raises:** `UserError` if a new run may not be put at `path`."""
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long to be one
        raise UserError(f"A run cannot be named {path.name!r}: {error.strerror}.") from error
    if not exists:
        return
    if not overwrite:
        raise UserError(
            f"There is a run at {path} already: choose another name with --run, or replace it "
            "with --overwrite."
        )
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a run (it has no config.json), so it is not overwritten.")


@dataclass(frozen=True)
class Run:
    """A trained model and what belongs to it."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    model: GPT


def load_run(path: Path | str, which: Literal["best", "last"] = "best") -> Run:
    """Load a run's model, tokenizer and config.

    **Raises:** `UserError` if a file is missing, damaged or of another shape than the config says.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a run: it has no config.json.")
    config = load_config(path / "config.json")
    try:
        record = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'tokenizer.json'} cannot be read: {error}.") from error
    tokenizer = tokenizer_from_json(record)
    skeleton = eqx.filter_eval_shape(
        GPT,
        config.model,
        tokenizer.vocab_size,
        padded_vocab_size=tokenizer.padded_vocab_size,
        key=jax.random.key(0),
    )
    model = load_weights(path / f"{which}.safetensors", skeleton)
    return Run(path, config, tokenizer, model)


def find_run(name: str | None) -> Path:
    """The folder of the run with that path, or that name in `runs/`; of the newest one for None.

    **Raises:** `UserError` if there is none.
    """
    if name is None:
        return newest_run()
    for path in (Path(name), RUNS_FOLDER / name):
        if os.path.isfile(path / "config.json"):
            return path
    raise UserError(f"{name} is not a run: neither it nor {RUNS_FOLDER / name} has a config.json.")


def newest_run(folder: Path = RUNS_FOLDER) -> Path:
    """The run in `folder` that last had a best evaluation.

    **Raises:** `UserError` if there is none with weights.
    """
    weights = [path for path in folder.glob("*/best.safetensors") if path.is_file()]
    if not weights:
        raise UserError(
            f"There is no trained model in {folder}/ yet: run `python train.py` first, or name "
            "one with --run."
        )
    return max(weights, key=lambda path: path.stat().st_mtime).parent


def weights_to_bytes(model: PyTree) -> bytes:
    """All arrays of `model` in the safetensors format, each under its path in the tree, e.g.
    `stack.blocks.attention.query.weight`, in the layout that it has in the model."""
    named = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return safetensors.numpy.save({_name(path): np.asarray(leaf) for path, leaf in named})


def load_weights(path: Path, skeleton: GPT) -> GPT:
    """`skeleton` (a model, or `eqx.filter_eval_shape` of one) with the arrays in `path`.

    **Raises:** `UserError` if the file is no safetensors file or its names, shapes or dtypes are
    not the skeleton's.
    """
    try:
        arrays = safetensors.numpy.load(path.read_bytes())
    except (OSError, SafetensorError, KeyError) as error:  # KeyError: a dtype NumPy lacks
        raise UserError(f"The weights {path} cannot be read: {error}.") from error

    def fill(key_path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return leaf
        name = _name(key_path)
        array = arrays.pop(name, None)
        if array is None:
            raise UserError(f"The weights {path} lack {name}, which the config calls for.")
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise UserError(
                f"In the weights {path}, {name} is {array.dtype}{list(array.shape)} where the "
                f"config calls for {leaf.dtype}{list(leaf.shape)}."
            )
        return jnp.asarray(array)

    model = jax.tree_util.tree_map_with_path(fill, skeleton)
    if arrays:
        raise UserError(f"The weights {path} hold {min(arrays)}, which the config has no room for.")
    return model


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
