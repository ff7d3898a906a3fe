"""The recipe: the settings with which a model of some size is trained on so many tokens.

What the law of `gptlite/planning/law.py` is about are models with these settings. Where a figure
comes from is said beside it; `benchmarks/recipe.py` measures them again.
"""

import dataclasses
import math
from dataclasses import dataclass

from gptlite.config import Config
from gptlite.errors import require
from gptlite.machine.fields import settled

# Layers and widths, from the smallest: each has two to four times the parameters of the one before.
SHAPES = (
    (2, 32),
    (2, 64),
    (3, 96),
    (3, 128),
    (4, 192),
    (6, 256),
    (8, 384),
    (10, 512),
    (12, 768),
    (16, 1024),
    (20, 1536),
    (24, 2048),
)
# Width of a head, or that of the model, if it is smaller.
HEAD_SIZE = 64
# Width inside the MLP, over that of the model.
MLP_WIDTH = 2
# A model reads at least so many tokens for each parameter, and has at most so many parameters for
# each token of its text.
TOKENS_PER_PARAMETER, PARAMETERS_PER_TOKEN = 2, 4
# The fields that the recipe chooses.
CHOSEN = (
    "model.n_layers",
    "model.n_heads",
    "model.d_model",
    "model.d_ff",
    "model.dropout",
    "optimizer.learning_rate",
    "optimizer.adam_learning_rate",
    "optimizer.weight_decay",
    "training.steps",
    "training.batch_size",
    "training.eval_every",
)


@dataclass(frozen=True)
class Rung:
    """A model of some size, and for how long it is trained."""

    n_layers: int
    d_model: int
    tokens: int
    """That it reads; text that is read again counts again."""

    @property
    def parameters(self) -> int:
        """Those of the matrices inside the blocks."""
        return (4 + 2 * MLP_WIDTH) * self.n_layers * self.d_model**2


def with_recipe(config: Config, rung: Rung, unique: int, rows: int = 1) -> Config:
    """`config`, with the settings for a rung. `unique`: tokens of the training text. `rows`: of
    which the batch is to have a multiple, because so many devices share it."""
    context = config.model.context_length
    # With half of it, the loss is up to 1.4 % lower, and a token takes up to half as long again (a
    # CPU, 0.5 M and 1 M tokens). Below a million, there are always a thousand steps: with 500
    # of them, the loss is up to 2 % above the law of longer runs.
    millions = rung.tokens / 1_000_000
    batch = 1024 * (millions if millions < 1 else math.sqrt(millions))
    batch_size = rows * max(1, round(batch / context / rows))
    steps = max(1, round(rung.tokens / (batch_size * context)))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            n_layers=rung.n_layers,
            n_heads=max(1, rung.d_model // HEAD_SIZE),
            d_model=rung.d_model,
            d_ff=MLP_WIDTH * rung.d_model,
        ),
        optimizer=dataclasses.replace(
            config.optimizer,
            learning_rate=0.02 * (200 / max(steps, 200)) ** 0.3,
            adam_learning_rate=0.02,
            weight_decay=decay_for(rung.tokens / unique),
        ),
        training=dataclasses.replace(
            config.training,
            steps=steps,
            batch_size=batch_size,
            eval_every=eval_every(steps),
        ),
    )


def is_sensible(parameters: int, tokens: int, unique: float) -> bool:
    """Whether a model of so many parameters is to read so many tokens of a text of `unique`."""
    return (
        TOKENS_PER_PARAMETER * parameters <= tokens and parameters <= PARAMETERS_PER_TOKEN * unique
    )


def eval_every(steps: int) -> int:
    """After how many steps to evaluate: not near the end, which may come a bit earlier or later."""
    return max(1, round(steps / 2.5))


def decay_for(rounds: float) -> float:
    """Weight decay for a text that is read so many times. What is read again and again is not to be
    learned by heart: of 0, 0.1, 0.3, 1 and 3, with one round, 0 is best, with 5, 0.3, with 10 and
    15, 1, with 30, 3. (Dropout beside it helps nothing.)"""
    return 0.1 * max(0.0, rounds - 1)


def check_free(config: Config) -> None:
    """**Raises:** `UserError` if `config` says what the recipe chooses."""
    given = [f"--{name.replace('_', '-')}" for name in chosen_by_hand(config)]
    require(not given, f"{', '.join(given)} is chosen for each model: leave it out.")


def chosen_by_hand(config: Config, base: Config | None = None) -> list[str]:
    """The fields of `CHOSEN` that are not as in `base`, by default `Config()`."""
    plain = dict(settled(base or Config(), None))
    return [x for x, value in settled(config, None) if x in CHOSEN and value != plain[x]]
