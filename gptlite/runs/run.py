"""A trained model, with what belongs to it."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from gptlite.config import Config, SamplingConfig
from gptlite.errors import require
from gptlite.generation.generate import PreparedModel, prepare
from gptlite.generation.text import TextStream, prompt_ids, stream_texts
from gptlite.machine.fields import MAX_INT32, Between, Seed, check_value
from gptlite.models.gpt import GPT
from gptlite.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """A trained model, and the config and tokenizer of its run."""

    path: Path
    """The run's folder."""
    config: Config
    """The settings that it was trained with."""
    tokenizer: Tokenizer
    """The tokenizer of its text."""
    model: GPT
    """The trained model."""

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 500,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        greedy: bool = False,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str:
        """The text that follows a prompt. The arguments are those of `stream`.

        **Raises:** `UserError` as `stream` does.
        """
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, greedy)
        return "".join(self._pieces(prompt, max_new_tokens, sampling, seed, stop))

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 500,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        greedy: bool = False,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """The text that follows a prompt, piece by piece, as it is generated.

        **Arguments:**

        - `prompt`: of one that is longer than the model's context, the model reads the end.
        - `max_new_tokens`: tokens to generate, at most.
        - `temperature`, `top_k`, `top_p`, `min_p`, `greedy`: see `gptlite.SamplingConfig`.
        - `seed`: the same seed gives the same text, which is that of `gptlite sample`.
        - `stop`: the text ends before any of these strings.

        **Raises:** `UserError` if the prompt is empty, a character of it is not in the vocabulary,
        an argument is out of range, or memory is too small.
        """
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, greedy)
        return self._pieces(prompt, max_new_tokens, sampling, seed, stop)

    def _pieces(
        self, prompt: str, tokens: int, sampling: SamplingConfig, seed: int, stop: Sequence[str]
    ) -> Iterator[str]:
        check_value("max_new_tokens", tokens, Annotated[int, Between(1, MAX_INT32)])
        check_value("seed", seed, Seed)
        TextStream(self.tokenizer, stop)  # raises here, and not at the first piece, as does:
        require(all(stop), f"stop must be strings of at least one character, got {stop!r}.")
        prompt_ids(self.tokenizer, prompt)
        options = {"max_new_tokens": tokens, "sampling": sampling, "seed": seed, "stop": stop}
        texts = stream_texts(self._prepared, self.tokenizer, prompt, **options)
        return (piece for (piece,) in texts)

    @functools.cached_property
    def _prepared(self) -> PreparedModel:
        return prepare(self.model, 1)
