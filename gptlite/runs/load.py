"""A finished run, or what there is of one, read: its model, tokenizer and config.

Plain data throughout (folder.py lists the files): nothing in a run is ever executed.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import equinox as eqx
import jax

from gptlite.config import Config, UserError, Variant
from gptlite.custom import load_custom, name_again
from gptlite.files import read_json
from gptlite.models.gpt import GPT
from gptlite.runs.saved_config import load_config
from gptlite.runs.sources import changed_sources
from gptlite.runs.weights import load_weights
from gptlite.text.corpus import Corpus, load_corpus
from gptlite.text.tokenizer import Tokenizer, tokenizer_from_json


@dataclass(frozen=True)
class Run:
    """A trained model and what belongs to it."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    model: GPT


def load_run(
    path: Path | str,
    which: Literal["best", "last"] = "best",
    *,
    custom: Mapping[str, Variant] = MappingProxyType({}),
    say: Callable[[str], Any] = warnings.warn,
) -> Run:
    """Load a run's model, tokenizer and config.

    `custom`: the custom blocks that it was made with, named again by their field, as in
    `{"mlp": SineMLP}` or `{"mlp": "my_blocks.py:SineMLP"}`; the file is then executed. `say` is
    called with a sentence if one has changed.

    **Raises:** `UserError` if a file is missing, damaged or of another shape than the config says,
    or a custom block is not named.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a run: it has no config.json.")
    config = name_again(load_config(path / "config.json"), custom)
    load_custom(config.model)
    for changed in changed_sources(path, config.model):
        say(f"{changed} has changed since {path} began.")
    tokenizer = load_tokenizer(path)
    skeleton = eqx.filter_eval_shape(
        GPT,
        config.model,
        tokenizer.vocab_size,
        padded_vocab_size=tokenizer.padded_vocab_size,
        key=jax.random.key(0),
    )
    if which == "best" and not (path / "best.safetensors").exists():
        raise UserError(
            f"The run {path} has no best weights, for it has not been evaluated yet: take its last "
            "ones (sample.py --weights last), or let it train on (train.py --resume)."
        )
    model = load_weights(path / f"{which}.safetensors", skeleton)
    return Run(path, config, tokenizer, model)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the run in the folder `path`.

    **Raises:** `UserError` if it is missing or damaged.
    """
    try:
        return tokenizer_from_json(read_json(path / "tokenizer.json"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error


def load_corpus_again(name: str) -> Corpus:
    """The corpus `name` of a run that is resumed.

    **Raises:** `UserError` if it cannot be had.
    """
    try:
        return load_corpus(name)
    except UserError as error:
        raise UserError(f"{error} --data.corpus may say where the run's text is now.") from error
