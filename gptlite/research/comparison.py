"""Variants trained from several seeds. Each is kept, so that nothing is trained twice."""

import dataclasses
import functools
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import msgspec

from gptlite.config import Config
from gptlite.custom import custom_sources
from gptlite.errors import UserError, require
from gptlite.inspect.summary import activation_bytes, flops_per_token
from gptlite.machine.fields import MAX_INT32, settled
from gptlite.machine.files import write_json
from gptlite.machine.memory import free_memory
from gptlite.machine.pytrees import count_parameters
from gptlite.machine.records import NotNegative, read_record
from gptlite.research.seeds import SeedsProgress, fit_seeds
from gptlite.research.statistics import Verdict, judge
from gptlite.runs.frozen import trainable
from gptlite.runs.model import abstract_model
from gptlite.text.batches import Batches
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split
from gptlite.training.optimizer import make_optimizer

# Interleaved dispatches that time a variant against the base.
TIMED_DISPATCHES = 5
# Share of the free memory that seeds may fill together.
MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Result:
    """A trained variant. Losses are in nats per token."""

    name: str
    steps: int
    parameters: int
    flops_per_token: int
    """Those of training."""
    evaluated_at: Sequence[int]
    """The steps with an evaluation."""
    curves: dict[int, Sequence[float]]
    """For each seed, the validation loss at each of `evaluated_at`."""
    seconds: float
    """A seed's share of the time that steps took."""

    @property
    def losses(self) -> list[float]:
        """The last validation loss of each seed."""
        return [curve[-1] for curve in self.curves.values()]


def verdicts(results: Sequence[Result]) -> dict[str, Verdict]:
    """Each variant's verdict against the first result, the base."""
    base, *others = results
    return judge(base.losses, {result.name: result.losses for result in others})


# Folders of the package that decide what a model learns.
LEARNS = ("models", "nn", "text", "training")


class _Record(msgspec.Struct):
    """The record of a variant."""

    settings: dict[str, Any]
    """Everything that decides what it learns."""
    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)]
    evaluated_at: list[Annotated[int, msgspec.Meta(ge=1)]]
    curves: dict[str, list[NotNegative | None]]
    """By the seed; None: not finite."""
    seconds: dict[str, NotNegative]

    def __post_init__(self):
        in_order = [0, *sorted(set(self.evaluated_at))]
        if [0, *self.evaluated_at] != in_order or in_order[-1] != self.steps:
            raise ValueError("its evaluated_at is wrong")
        if any(len(curve) != len(self.evaluated_at) for curve in self.curves.values()):
            raise ValueError("its curves are wrong")
        if self.seconds.keys() != self.curves.keys():
            raise ValueError("its seconds are wrong")


class Comparison:
    """A folder with a JSON file for each variant, all trained on the same text."""

    def __init__(
        self,
        folder: Path,
        base: Config,
        equal: str,
        tokenizer: Tokenizer,
        split: Split,
        corpus_sha256: str,
    ):
        """`equal`: what variants have in common with `base`, `steps`, `flops` or `time`."""
        self._folder, self._base, self._equal = folder, base, equal
        self._tokenizer, self._split, self._corpus_sha256 = tokenizer, split, corpus_sha256
        self._cost = functools.cache(self._count_cost)  # traces the model, forward and backward

    def trained(self, name: str, config: Config, seeds: Sequence[int]) -> list[int]:
        """Those of `seeds` that have been trained.

        **Raises:** `UserError` if the file of that name is of another variant, or damaged, or the
        variant cannot be built.
        """
        self._cost(config)
        curves = self._read(name, config)["curves"]
        return [seed for seed in seeds if str(seed) in curves]

    def result(self, name: str, config: Config, seeds: Sequence[int]) -> Result:
        """The result of a variant, all `seeds` of which have been trained."""
        record = self._read(name, config)
        parameters, flops = self._cost(config)
        return Result(
            name=name,
            steps=record["steps"],
            parameters=parameters,
            flops_per_token=flops,
            evaluated_at=record["evaluated_at"],
            curves={
                seed: [math.nan if x is None else x for x in record["curves"][str(seed)]]
                for seed in seeds
            },
            seconds=statistics.fmean(record["seconds"][str(seed)] for seed in seeds),
        )

    def train(
        self, name: str, config: Config, seeds: Sequence[int], at_once: int | None = None
    ) -> Iterator[SeedsProgress]:
        """Train those of `seeds` that have not been trained, `at_once` at a time (default: as many
        as fit into memory), and keep them.

        **Raises:** `UserError` as `trained` does, or if the folder cannot be written.
        """
        record = self._read(name, config)
        missing = [seed for seed in seeds if str(seed) not in record["curves"]]
        if not missing:
            return
        at_once = self._seeds_that_fit(config) if at_once is None else at_once
        if record["steps"] is None:
            record["steps"] = self._choose_steps(config, min(at_once, len(missing)))
        config = _with_steps(config, record["steps"])
        for first in range(0, len(missing), at_once):
            group = missing[first : first + at_once]
            steps, curves, progress = [], [], None
            for progress in fit_seeds(config, self._tokenizer, group, self._split):
                if progress.val_losses is not None:
                    steps.append(progress.step)
                    curves.append(progress.val_losses)
                yield progress
            assert progress is not None
            record["evaluated_at"] = steps
            for seed, curve in zip(group, zip(*curves, strict=True), strict=True):
                # JSON has no NaN and no infinity.
                record["curves"][str(seed)] = [x if math.isfinite(x) else None for x in curve]
                record["seconds"][str(seed)] = progress.step_seconds / len(group)
            path = self._path(name)
            try:
                write_json(path, record)
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error.strerror}.") from error

    def _path(self, name: str) -> Path:
        # Characters and a length that any file system takes, and different for different names.
        readable = re.sub(r"[^A-Za-z0-9=._+-]", "_", name)[:80]
        return self._folder / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"

    def _read(self, name: str, config: Config) -> dict[str, Any]:
        """The record of a variant, or an empty one."""
        settings = self._settings(config)
        path = self._path(name)
        if not path.exists():
            empty = {"steps": None, "evaluated_at": [], "curves": {}, "seconds": {}}
            return {"settings": settings, **empty}
        try:
            record = msgspec.to_builtins(read_record(path, _Record))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}. Delete it to train it again.") from error
        before = record["settings"]
        names = sorted(settings.keys() | before.keys())
        changed = [name for name in names if settings.get(name) != before.get(name)]
        if "--equal" in changed:  # which decides if there are fields of the base
            changed = ["--equal"]
        require(
            not changed,
            f"{path} was trained with another {', another '.join(changed)}: choose another "
            "--name for this comparison, or delete that file.",
        )
        require(
            not self._has_given_steps(config) or record["steps"] == config.training.steps,
            f"{path} is damaged: its steps are {record['steps']}, and were to be "
            f"{config.training.steps}. Delete it to train it again.",
        )
        return record

    def _settings(self, config: Config) -> dict[str, Any]:
        """Everything that decides what a variant learns."""
        settings = {
            **dict(settled(config, "comparison")),
            "--equal": self._equal,
            "tokenizer": hashlib.sha256(json.dumps(self._tokenizer.to_json()).encode()).hexdigest(),
            "text": self._corpus_sha256,
        }
        if self._equal != "steps":  # then the base decides the number of steps
            settings |= {f"{name} of the base": x for name, x in settled(self._base, "comparison")}
        for file, source in custom_sources(config.model).items():
            settings[f"version of {file}"] = hashlib.sha256(source).hexdigest()
        settings["version of gptlite"] = package_sha256()
        return settings

    def _has_given_steps(self, config: Config) -> bool:
        """Whether it is trained for `training.steps`."""
        return self._equal == "steps" or config == self._base

    def _choose_steps(self, config: Config, at_once: int) -> int:
        """The steps that make the variant equal to the base, with `at_once` seeds at once."""
        steps = self._base.training.steps
        if self._has_given_steps(config):
            return config.training.steps
        if self._equal == "flops":
            ratio = self._flops_per_step(self._base) / self._flops_per_step(config)
        else:
            ratio = self._relative_speed(config, at_once)
        return max(1, round(steps * ratio))

    def _flops_per_step(self, config: Config) -> int:
        return self._cost(config)[1] * config.training.batch_size * config.model.context_length

    def _count_cost(self, config: Config) -> tuple[int, int]:
        """Parameters, and training FLOPs per token."""
        model = self._abstract_model(config)
        trained = trainable(config, model)
        # For its errors: the optimizer may not fit what is trained.
        make_optimizer(config.optimizer, config.training.steps, eqx.filter(model, trained))
        Batches(self._split.train, config.training.batch_size, config.model.context_length, 0)
        flops = flops_per_token(model, trained)[1]
        return count_parameters(model), flops

    def _abstract_model(self, config: Config) -> Any:
        return abstract_model(config.model, self._tokenizer)

    def _relative_speed(self, config: Config, at_once: int) -> float:
        """The base's seconds per step over the variant's, in short interleaved runs of both."""
        runs = []
        for timed in (self._base, config):
            steps = timed.training.log_every * (TIMED_DISPATCHES + 1)
            short = dataclasses.replace(timed.training, steps=steps, eval_every=steps)
            timed = dataclasses.replace(timed, training=short)
            runs.append(fit_seeds(timed, self._tokenizer, range(at_once), self._split))
        ratios, before = [], [next(run) for run in runs]
        for _ in range(TIMED_DISPATCHES):
            now = [next(run) for run in runs]
            base, variant = (
                (n.step_seconds - b.step_seconds) / (n.step - b.step)
                for n, b in zip(now, before, strict=True)
            )
            ratios.append(base / variant)
            before = now
        return statistics.median(ratios)

    def _seeds_that_fit(self, config: Config) -> int:
        """How many seeds fit into memory."""
        model = self._abstract_model(config)
        trained = trainable(config, model)
        rows = config.training.batch_size // (config.training.accumulation or 1)
        # In float32, parameters, and for those that are trained gradients and two moments.
        state = count_parameters(model) + 3 * count_parameters(eqx.filter(model, trained))
        each = 4 * state + activation_bytes(model, rows)
        seeds = max(1, int(MEMORY_SHARE * free_memory() / each))
        return max(seeds - seeds % jax.device_count(), 1)


@functools.cache
def package_sha256() -> str:
    """Changes with every file of the package that decides what a model learns."""
    root = Path(__file__).resolve().parents[1]
    checksum = hashlib.sha256()
    for file in sorted(file for name in LEARNS for file in (root / name).rglob("*.py")):
        content = file.read_bytes()
        checksum.update(f"{file.relative_to(root).as_posix()} {len(content)} ".encode() + content)
    return checksum.hexdigest()


def default_name(base: str, config: Config, equal: str) -> str:
    """The name of a comparison: another one for each base and what is the same for all variants, so
    that more variants and more seeds can be added."""
    settings = dict(settled(config, "comparison")) | {"--equal": equal, "data": config.data}
    text = json.dumps({name: str(value) for name, value in settings.items()}, sort_keys=True)
    return f"{base}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _with_steps(config: Config, steps: int) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
