"""A trained model, with what belongs to it."""

from dataclasses import dataclass
from pathlib import Path

from gptlite.config import Config
from gptlite.models.gpt import GPT
from gptlite.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """A trained model, and the config and tokenizer of its run."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    model: GPT
