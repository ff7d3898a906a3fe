"""What a command of several trainings needs before the first one: configs, the text, its folder."""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptlite.config import Config, DataConfig
from gptlite.custom import custom_arguments, load_custom
from gptlite.errors import UserError
from gptlite.machine.files import lock
from gptlite.machine.progress import log
from gptlite.machine.runtime import with_chosen_dtype
from gptlite.research.code import code_of
from gptlite.research.conduct import NotJudgedError
from gptlite.runs.corpora import load_corpus, require_documents
from gptlite.runs.model import separator_of
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split, split_corpus


def loaded(config: Config) -> Config:
    """With its custom blocks, the number format of this machine, and a note of its code."""
    config = dataclasses.replace(config, model=load_custom(config.model))
    code_of(config.model)  # before its files can be edited
    return with_chosen_dtype(config)


@contextlib.contextmanager
def held(
    folder: Path, data: DataConfig, configs: Iterable[Config], kind: str = "comparison"
) -> Iterator[tuple[Tokenizer, Split]]:
    """The text of all of `configs`, while no other process uses `folder`, which is of a `kind`.

    **Raises:** `UserError` if there is no such text, or it does not fit a config, or the folder
    cannot be written; `NotJudgedError` if another process uses it.
    """
    corpus = load_corpus(data.corpus)
    tokenizer = make_tokenizer(data.tokenizer, corpus)
    for config in configs:
        if config.model.separate_documents:
            require_documents(corpus)
            separator_of(config.model, tokenizer)  # or an error
    split = split_corpus(corpus, tokenizer, data.validation_tokens, data.max_tokens)
    for custom in {shlex.join(custom_arguments(config.model)): None for config in configs}:
        if custom:
            log(f"custom blocks: {custom}")
    try:
        locked = lock(folder / ".lock", f"The {kind} {folder} is being run by another process.")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error
    except UserError as error:
        raise NotJudgedError(str(error)) from None
    with locked:
        yield tokenizer, split
