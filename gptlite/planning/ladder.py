"""A ladder: models of some sizes, trained with the recipe on a text for some lengths, from the
cheapest up. What they reach tells the law of the text.

All is kept in a journal, from which an interrupted ladder goes on.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gptlite.config import Config
from gptlite.errors import require
from gptlite.planning import recipe
from gptlite.planning.forecast import Laws, fit_laws
from gptlite.planning.journal import Begun, ForecastJournal, Judged, Sealed, Trained
from gptlite.planning.law import Points
from gptlite.planning.recipe import SHAPES, Rung, is_sensible, with_recipe
from gptlite.research.code import checksum_of, code_of, settings_of
from gptlite.research.seeds import SeedsProgress, fit_seeds
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split

# Settings follow from this file.
RECIPE = Path(recipe.__file__)
# The fewest rungs that a law of six numbers is fitted to.
FEWEST_RUNGS = 12
# The seeds of a rung.
SEEDS = (0, 1)
# The fewest tokens of a rung, and how many times those of the next longer one has.
FEWEST, TIMES = 2**20, 2
# A size is trained only if the longest length has so many tokens for each parameter, and not for
# more: no best size is to be expected beyond.
PER_PARAMETER = (3.0, 500.0)
# The share of the ladder's time that its longest rungs may take, each.
LONGEST = 1 / 8


def parameters_of(rung: Rung, vocab_size: int) -> int:
    """Those of the matrices of the blocks and of the head: what computes. (Counted so, the best
    size grows by one power of the compute from the smallest models on; with the embeddings, it
    does not: Kaplan et al., 2020, section 1.2.)"""
    return rung.parameters + rung.d_model * vocab_size


class Ladder:
    """The rungs of a text, in a folder."""

    def __init__(self, folder: Path, config: Config, tokenizer: Tokenizer, split: Split):
        """`config`: what all rungs have in common.

        **Raises:** `UserError` if the folder is of another text, or of other settings, or its
        journal is damaged.
        """
        self.journal = ForecastJournal(folder / "ledger.jsonl")
        self._config, self._tokenizer, self._split = config, tokenizer, split
        self.unique = float(len(split.train))
        """Tokens of the training text."""
        code = code_of(config.model)
        begun = Begun(
            text=split.sha256,
            tokenizer=checksum_of(tokenizer.to_json()),
            settings=checksum_of([settings_of(config), code, RECIPE.read_text()]),
            config=json.loads(json.dumps(dataclasses.asdict(config))),
            unique=len(split.train),
        )
        if not self.journal.entries:
            self.journal.append(begun)
        first = self.journal.entries[0]
        assert isinstance(first, Begun)
        for name in ("text", "tokenizer", "settings", "unique"):
            require(
                getattr(first, name) == getattr(begun, name),
                f"{folder} was begun with another {'code or other ' * (name == 'settings')}{name}: "
                "give this forecast another --name.",
            )

    def parameters(self, rung: Rung) -> int:
        """Those of a rung that compute: see `parameters_of`."""
        return parameters_of(rung, self._tokenizer.vocab_size)

    def train(self, rung: Rung, seeds: Sequence[int] = SEEDS) -> Iterator[SeedsProgress]:
        """Train a rung from each of `seeds`, and keep what it reaches."""
        config = with_recipe(self._config, rung, len(self._split.train))
        steps = config.training.steps
        training = dataclasses.replace(config.training, eval_every=steps)
        config = dataclasses.replace(config, training=training)
        losses, seconds = [], 0.0
        for progress in fit_seeds(config, self._tokenizer, seeds, self._split):
            losses, seconds = progress.val_losses or losses, progress.step_seconds
            yield progress
        entry = Trained(
            n_layers=rung.n_layers,
            d_model=rung.d_model,
            asked=rung.tokens,
            parameters=self.parameters(rung),
            tokens=steps * training.batch_size * config.model.context_length,
            seeds=list(seeds),
            losses=list(losses),
            seconds=seconds,
        )
        self.journal.append(entry)

    def points(self) -> Points:
        """What was measured: one for each rung and seed."""
        each = [(x, loss) for x in self.journal.of(Trained) for loss in x.losses]
        return Points(
            np.array([float(x.parameters) for x, _ in each]),
            np.array([float(x.tokens) for x, _ in each]),
            np.full(len(each), self.unique),
            np.array([loss for _, loss in each]),
        )

    def missing(self, seconds: float) -> Iterator[Rung]:
        """The rungs that are to be trained in so many seconds, one after the other: the next one
        depends on the speed of those before."""
        longest = LONGEST * seconds
        speed = math.nan  # of the size before: parameters times tokens a second
        for n_layers, d_model in SHAPES:
            first = Rung(n_layers, d_model, FEWEST)
            n = self.parameters(first)
            if speed * longest < PER_PARAMETER[0] * n * n:
                break
            fewest = max(0, math.ceil(math.log(n / FEWEST, TIMES)))
            for length in itertools.count(fewest):
                tokens = FEWEST * TIMES**length
                is_first = length == fewest
                if not is_first and tokens > min(speed * longest, PER_PARAMETER[1] * n * n) / n:
                    break
                if self.journal.trained(n_layers, d_model, tokens) is None:
                    yield dataclasses.replace(first, tokens=tokens)
                done = self.journal.trained(n_layers, d_model, tokens)
                assert done is not None
                speed = done.tokens * n / max(done.seconds, 1e-3)

    def laws(self) -> Laws:
        """The law of what was trained.

        **Raises:** `UserError` if that is too little.
        """
        rungs = len(list(self.journal.of(Trained)))
        require(
            rungs >= FEWEST_RUNGS,
            f"A law needs {FEWEST_RUNGS} rungs, and there are {rungs}: give more --minutes.",
        )
        return fit_laws(self.points())

    def seal(self, laws: Laws, times: float) -> tuple[Sealed, str]:
        """The forecast of a rung with `times` the compute of the largest one, of the size that is
        best by the law; and its checksum. It is written beside the journal, too."""
        compute = times * max(x.parameters * x.tokens for x in self.journal.of(Trained))
        rungs = [Rung(*shape, 1) for shape in SHAPES]
        rungs = [
            dataclasses.replace(x, tokens=math.ceil(compute / self.parameters(x))) for x in rungs
        ]
        rungs = [
            x
            for x in rungs
            if x.tokens >= FEWEST and is_sensible(self.parameters(x), x.tokens, self.unique)
        ] or rungs[:1]
        forecasts = [
            laws.forecast(self.parameters(x), x.tokens, self.unique, len(SEEDS)) for x in rungs
        ]
        rung, forecast = min(zip(rungs, forecasts, strict=True), key=lambda pair: pair[1].loss)
        sealed = Sealed(
            n_layers=rung.n_layers,
            d_model=rung.d_model,
            asked=rung.tokens,
            seeds=list(SEEDS),
            loss=forecast.loss,
            low=forecast.low,
            high=forecast.high,
        )
        self.journal.append(sealed)
        return sealed, self.journal.checksum

    def judge(self, sealed: Sealed) -> Judged:
        """The verdict on a forecast whose rung was trained."""
        trained = self.journal.trained(sealed.n_layers, sealed.d_model, sealed.asked)
        assert trained is not None
        loss = float(np.mean(trained.losses))
        judged = Judged(loss, sealed.low <= loss <= sealed.high)
        self.journal.append(judged)
        return judged

    def seconds_of(self, rung: Rung) -> float:
        """Seconds that a rung takes, by the largest one that was trained."""
        largest = max(self.journal.of(Trained), key=lambda x: x.parameters * x.tokens)
        operations = self.parameters(rung) * rung.tokens
        return largest.seconds * operations / (largest.parameters * largest.tokens)


def default_name(config: Config) -> str:
    """The name of a forecast: one for each choice of settings."""
    return f"forecast-{checksum_of(str(config))[:6]}"
