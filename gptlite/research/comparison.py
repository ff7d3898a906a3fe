"""Variants of a base, trained from several seeds on the same texts, with a ledger of all of them.

**Texts.** The validation text is looked at by `confirm` alone. The *choice* text, by which one
chooses, takes its place: the last part of the training text, as long as the validation text, which
no variant is trained on.

**Variants.** A variant is all that decides what it learns: its config, the code that computes it,
its base, and what it has in common with the base. After an edit of a custom block, or of the
package, there is another variant of the same name, and the ledger has both.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import msgspec
import numpy as np

from gptlite.config import Config
from gptlite.errors import UserError, require
from gptlite.inspect.flops import operations_per_token
from gptlite.inspect.summary import activation_bytes
from gptlite.machine.fields import settled
from gptlite.machine.memory import free_memory
from gptlite.machine.names import CUSTOM_FIELDS
from gptlite.machine.pytrees import count_parameters
from gptlite.research.code import code_of
from gptlite.research.equal import Equal, steps_of, with_parameters
from gptlite.research.ledger import (
    Confirmed,
    Confirming,
    Failed,
    Ledger,
    Look,
    Opened,
    Runs,
    Speed,
    Tuned,
    Variant,
)
from gptlite.research.seeds import SeedsProgress, fit_seeds
from gptlite.research.speed import ratio_of, seconds_per_step, speed_ratios, tolerance
from gptlite.research.statistics import LEVEL, Verdict, judge, level, sequence
from gptlite.runs.frozen import trainable
from gptlite.runs.model import abstract_model
from gptlite.runs.saved_config import config_of
from gptlite.text.batches import Batches
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split
from gptlite.training.optimizer import make_optimizer

# The base once more, from other first parameters: what chance alone does.
AGAIN = "base again"
# Where its first parameters come from: a seed, and this.
AGAIN_SEED = 200_000
# The first seed of a confirmation, and how far those of the next one are.
CONFIRM_SEED, APART = 300_000, 10_000
# The share of a run before which no variant is stopped because it is behind.
EARLY = 0.5
# Dispatches after which the speed is known well enough for a plan.
MEASURED = 5
# Share of the free memory that seeds may fill together.
MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Result:
    """What is known of a variant. Losses are those on the choice text, in nats per token."""

    name: str
    is_base: bool
    parameters: int
    operations_per_token: int
    """Floating-point operations of training."""
    steps: int
    """0: nothing has been trained."""
    evaluated_at: Sequence[int]
    """The steps with an evaluation."""
    curves: Mapping[int, Sequence[float]]
    """For each seed that was trained to its end, the loss at each of `evaluated_at`."""
    seconds: float
    """A seed's share of the time that steps took."""
    verdict: Verdict | None
    """None: it is the base, or the base again before it is trained."""

    @property
    def losses(self) -> dict[int, float]:
        """The last loss of each seed."""
        return {seed: curve[-1] for seed, curve in self.curves.items()}


class Comparison:
    """A folder with a ledger."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, split: Split):
        """**Raises:** `UserError` if the folder is of other texts, or its ledger is damaged."""
        self.ledger = Ledger(folder / "ledger.jsonl")
        self._tokenizer = tokenizer
        held_out = len(split.validation)
        choice = np.asarray(split.train[-held_out:], np.int32)
        self._confirming = dataclasses.replace(split, train=split.train[:-held_out])
        self._split = dataclasses.replace(self._confirming, validation=choice)
        opened = Opened(
            text=split.sha256,
            tokenizer=_checksum(tokenizer.to_json()),
            choice_tokens=len(choice),
            validation_tokens=held_out,
        )
        if not self.ledger.entries:
            self.ledger.append(opened)
        require(
            self.ledger.entries[0] == opened,
            f"{folder} is a comparison on another text, or with another tokenizer or another "
            "data.validation_tokens: choose another --name for this one.",
        )
        self._entered: dict[str, tuple[Variant, Config]] = {}
        self._equal: Equal = "steps"

    @property
    def tried(self) -> int:
        """The variants that were ever tried in this folder."""
        return sum(variant.level is not None for variant in self.ledger.of(Variant))

    @property
    def names(self) -> list[str]:
        """Those that were entered, the base first."""
        return list(self._entered)

    def enter(
        self, configs: Mapping[str, Config], equal: Equal, *, again: bool, known: bool = False
    ) -> None:
        """Write variants into the ledger, the base first, unless they are there. Their custom
        blocks are loaded. `again`: also the base, once more. `known`: they must be there.

        **Raises:** `UserError` if one of them cannot be built, or not be made equal to the base.
        """
        (base_name, base), *others = configs.items()
        half = base.training.steps // 2
        require(
            equal != "time" or base.training.eval_every <= half,
            "--equal time needs an evaluation in the first half of training: "
            f"--training.eval-every must be at most {half}, got {base.training.eval_every}.",
        )
        self._equal = equal
        first = self._described(base_name, base, None, equal)
        entered = {base_name: (first, base)}
        if again:
            entered[AGAIN] = (self._described(AGAIN, base, first, equal), base)
        for name, config in others:
            if equal == "parameters":
                config = with_parameters(name, config, first.parameters, self._parameters)
            entered[name] = (self._described(name, config, first, equal), config)
        before = {variant.variant: variant for variant in self.ledger.of(Variant)}
        new = {name: v for name, (v, _) in entered.items() if v.variant not in before}
        for variant in new.values() if known else ():
            raise UserError(self._changed(variant))
        judged = [name for name, variant in new.items() if variant.base and name != AGAIN]
        share = level(self.tried, len(judged)) if judged else None
        for name, (variant, config) in entered.items():
            if name in new:
                variant = msgspec.structs.replace(variant, level=share if name in judged else None)
                self.ledger.append(variant)
            self._entered[name] = (before.get(variant.variant, variant), config)

    def missing(self, name: str, seeds: Sequence[int]) -> list[int]:
        """Those of `seeds` that have not been trained, unless the variant was stopped."""
        runs = self._runs(self._entered[name][0])
        trained = {seed for run in runs for seed in run.seeds}
        return [] if any(run.stopped for run in runs) else [s for s in seeds if s not in trained]

    def train(self, name: str, seeds: Sequence[int]) -> Iterator[SeedsProgress]:
        """Train a variant from `seeds`, at the same time, and keep what it gives. It is stopped
        when its curve is behind that of the base.

        **Raises:** `UserError` if the ledger cannot be written.
        """
        variant, config = self._entered[name]
        steps = self._steps(variant, config, len(seeds))
        training = dataclasses.replace(config.training, steps=steps)
        config = dataclasses.replace(config, training=training)
        drawn_from = [seed + AGAIN_SEED for seed in seeds] if name == AGAIN else seeds
        evaluated_at, curves, seconds, stopped = [], [], 0.0, ""
        with self._told(variant, seeds):
            for progress in fit_seeds(
                config, self._tokenizer, seeds, self._split, drawn_from=drawn_from
            ):
                seconds = progress.step_seconds
                if progress.val_losses is not None:
                    evaluated_at.append(progress.step)
                    curves.append(_finite(progress.val_losses))
                    stopped = self._behind(variant, seeds, progress)
                yield progress
                if stopped:
                    break
        by_seed = [list(curve) for curve in zip(*curves, strict=True)]
        entry = Runs(variant.variant, list(seeds), steps, evaluated_at, by_seed, seconds, stopped)
        self.ledger.append(entry)

    def check(self, config: Config) -> None:
        """**Raises:** `UserError` if a config cannot be built and trained."""
        self._described("", config, None, None)

    def steps_of_base(self, config: Config) -> int | None:
        """The steps of the newest base that is like `config` but for its steps and evaluations, and
        for what was tuned; None if there is none."""
        free = {"training.steps", "training.eval_every"}
        free |= {name for entry in self.ledger.of(Tuned) for name in entry.values}

        def fixed(config: Config) -> dict[str, Any]:
            return {name: x for name, x in _settings(config).items() if name not in free}

        for entry in reversed(list(self.ledger.of(Variant))):
            if entry.base is None and fixed(config_of(entry.config)) == fixed(config):
                return entry.config["training"]["steps"]
        return None

    def seconds_of(self, config: Config, at_once: int) -> tuple[float, float]:
        """Seconds before the first step of `at_once` seeds, and seconds of a step."""
        began = time.perf_counter()
        steps = seconds_per_step(config, self._tokenizer, self._split, at_once)
        next(steps)
        before = time.perf_counter() - began
        return before, float(np.median([next(steps) for _ in range(MEASURED)]))

    def equal_steps(self, config: Config, base: Config, equal: Equal, at_once: int) -> int:
        """The steps that make `config` equal to `base`, before both are entered."""
        if equal == "time":
            ratios = speed_ratios(base, config, self._tokenizer, self._split, at_once)
            return max(1, round(base.training.steps * ratio_of(ratios)[0]))
        operations = (
            self._described("", x, None, equal).operations_per_token for x in (base, config)
        )
        return steps_of(config, base, equal, *operations)

    def tuning_losses(self, config: Config, seeds: Sequence[int]) -> list[float] | None:
        """The losses of a config that was trained to tune it, None if it was not."""
        variant = self._described("", config, None, None).variant
        for entry in self.ledger.of(Tuned):
            if entry.variant == variant and entry.seeds == list(seeds):
                return [math.nan if x is None else x for x in entry.losses]
        return None

    def train_to_tune(
        self, name: str, config: Config, values: Mapping[str, float], seeds: Sequence[int]
    ) -> Iterator[SeedsProgress]:
        """Train a config to tune it, and keep its losses."""
        variant, steps = self._described(name, config, None, None), config.training.steps
        losses = []
        with self._told(variant, seeds):
            for progress in fit_seeds(config, self._tokenizer, seeds, self._split):
                losses = progress.val_losses or losses
                yield progress
        kept = _finite(losses)
        entry = Tuned(variant.variant, name, dict(values), list(seeds), steps, kept)
        self.ledger.append(entry)

    def begin_to_confirm(self, name: str, n_seeds: int) -> Confirming:
        """Write down that a variant is to be judged on the validation text, and from which seeds:
        others than all before.

        **Raises:** `UserError` if it has been, or was not trained before.
        """
        variant, _ = self._entered[name]
        before = list(self.ledger.of(Confirming))
        for confirmed in self.ledger.of(Confirmed):
            require(
                confirmed.variant != variant.variant,
                f"{name} was judged on the validation text before: {confirmed.words}.",
            )
        require(bool(self._runs(variant)), f"{name} was not trained on the choice text before.")
        first = CONFIRM_SEED + APART * len(before)
        seeds = list(range(first, first + n_seeds))
        entry = Confirming(variant.variant, seeds, level(len(before)), self.tried)
        self.ledger.append(entry)
        return entry

    def train_to_confirm(self, name: str, seeds: Sequence[int]) -> Iterator[SeedsProgress]:
        """Train a variant, with as many steps as before. The losses of the last step are those on
        the validation text. None are kept."""
        variant, config = self._entered[name]
        steps = next((run.steps for run in self._runs(variant)), config.training.steps)
        training = dataclasses.replace(config.training, steps=steps, eval_every=steps)
        config = dataclasses.replace(config, training=training)
        with self._told(variant, seeds):
            yield from fit_seeds(config, self._tokenizer, seeds, self._confirming)

    def confirm(
        self, name: str, entry: Confirming, losses: Sequence[float], base_losses: Sequence[float]
    ) -> Confirmed:
        """The verdict by the losses of the seeds of `entry`: a single look, and so Student's
        test."""
        variant, _ = self._entered[name]
        of_time = self._tolerance(variant, self._result(self._base, ""))
        base = dict(zip(entry.seeds, base_losses, strict=True))
        own = dict(zip(entry.seeds, losses, strict=True))
        verdict = judge(base, own, entry.level, of_time, once=True)
        mean, margin = _finite([verdict.difference.mean, verdict.difference.margin])
        kept = _finite(losses), _finite(base_losses)
        confirmed = Confirmed(variant.variant, *kept, mean, margin, verdict.words)
        self.ledger.append(confirmed)
        return confirmed

    @contextlib.contextmanager
    def _told(self, variant: Variant, seeds: Sequence[int]) -> Iterator[None]:
        """What fails inside is written down."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:1000]
            self.ledger.append(Failed(variant.variant, list(seeds), reason))
            raise

    def _changed(self, variant: Variant) -> str:
        """Why a variant is not in the ledger."""
        same = [v for v in self.ledger.of(Variant) if v.name == variant.name]
        if not same:
            return f"{self.ledger.path} has no variant {variant.name}."
        old, new = same[-1].code, variant.code
        files = sorted(x for x in old.keys() | new.keys() if old.get(x) != new.get(x))
        what = f": {', '.join(files[:5])}{' ...' * (len(files) > 5)}" if files else ""
        return f"{variant.name} is not as it was tried any more{what}. Try it again first."

    @property
    def _base(self) -> Variant:
        return next(iter(self._entered.values()))[0]

    def look(self, name: str) -> Result:
        """The result of a variant, with its verdict, which is written into the ledger."""
        variant, _ = self._entered[name]
        result = self._result(variant, variant.name)
        verdict = result.verdict
        if verdict is not None and verdict.seeds:
            mean, margin = _finite([verdict.difference.mean, verdict.difference.margin])
            look = Look(variant.variant, verdict.seeds, mean, margin, verdict.words)
            if look not in self.ledger.of(Look):
                self.ledger.append(look)
        return result

    def results(self) -> list[Result]:
        """Of the base, and of all variants of it in the ledger, in the order in which they were
        entered. Of a name whose code or config has changed, the older ones say so."""
        base = self._base
        variants = [base, *(v for v in self.ledger.of(Variant) if v.base == base.variant)]
        entered = [variant for variant, _ in self._entered.values()]
        newest = {(v.name, v.equal): v.variant for v in [*variants, *entered]}

        def shown(variant: Variant) -> str:
            is_newest = newest[variant.name, variant.equal] == variant.variant
            other = "" if variant.equal in (None, self._equal) else f" (equal {variant.equal})"
            return f"{variant.name}{other}{'' if is_newest else ' (an earlier version)'}"

        return [self._result(variant, shown(variant)) for variant in variants]

    def seeds_that_fit(self, name: str) -> int:
        """How many seeds of a variant fit into memory."""
        config = self._entered[name][1]
        model = abstract_model(config.model, self._tokenizer)
        trained = trainable(config, model)
        rows = config.training.batch_size // (config.training.accumulation or 1)
        # In float32, parameters, and for those that are trained gradients and two moments.
        state = count_parameters(model) + 3 * count_parameters(eqx.filter(model, trained))
        each = 4 * state + activation_bytes(model, rows)
        seeds = max(1, int(MEMORY_SHARE * free_memory() / each))
        return max(seeds - seeds % jax.device_count(), 1)

    def _described(
        self, name: str, config: Config, base: Variant | None, equal: Equal | None
    ) -> Variant:
        """The entry of a variant, without its level."""
        model = abstract_model(config.model, self._tokenizer)
        trained = trainable(config, model)
        # For its errors: the optimizer may not fit what is trained.
        make_optimizer(config.optimizer, config.training.steps, eqx.filter(model, trained))
        training = config.training
        Batches(self._split.train, training.batch_size, config.model.context_length, 0)
        common, code = None if base is None else equal, code_of(config.model)
        of = [_settings(config), code, base and base.variant, common, name == AGAIN]
        return Variant(
            variant=_checksum(of),
            name=name,
            base=base and base.variant,
            level=None,
            equal=common,
            config=json.loads(json.dumps(dataclasses.asdict(config))),
            code=code,
            parameters=count_parameters(model),
            operations_per_token=operations_per_token(model, trained),
        )

    def _parameters(self, config: Config) -> int:
        return count_parameters(abstract_model(config.model, self._tokenizer))

    def _runs(self, variant: Variant) -> list[Runs]:
        return [run for run in self.ledger.of(Runs) if run.variant == variant.variant]

    def _steps(self, variant: Variant, config: Config, at_once: int) -> int:
        """The steps that a variant is trained for: those with which it was begun, or else those
        that make it equal to the base."""
        base, base_config = next(iter(self._entered.values()))
        before = [*self._runs(variant), *self._speeds(variant)]
        if variant.equal != "time" or variant.name == AGAIN:
            of_both = base.operations_per_token, variant.operations_per_token
            return steps_of(config, base_config, variant.equal, *of_both)
        # Measured before each group of seeds: all that was measured tells how wrong it may be.
        ratios = speed_ratios(base_config, config, self._tokenizer, self._split, at_once)
        chosen = max(1, round(base_config.training.steps * ratio_of(ratios)[0]))
        steps = before[0].steps if before else chosen
        self.ledger.append(Speed(variant.variant, steps, ratios))
        return steps

    def _speeds(self, variant: Variant) -> list[Speed]:
        return [speed for speed in self.ledger.of(Speed) if speed.variant == variant.variant]

    def _tolerance(self, variant: Variant, base: Result) -> float:
        """The difference that a wrong number of steps may make, where a measured speed chose it."""
        speeds = self._speeds(variant)
        if not speeds or not base.curves:
            return 0.0
        ratios = [ratio for speed in speeds for ratio in speed.ratios]
        mean = np.mean(list(base.curves.values()), axis=0)
        half, end = np.interp([base.steps / 2, base.steps], base.evaluated_at, mean)
        return tolerance(ratios, speeds[0].steps / base.steps, half - end)

    def _behind(self, variant: Variant, seeds: Sequence[int], progress: SeedsProgress) -> str:
        """Why a variant is stopped, if it is: where the base was after the same share of its steps,
        it is worse, as a test finds that has as many seeds."""
        share = progress.step / progress.steps
        if variant.level is None or not EARLY <= share < 1 or progress.val_losses is None:
            return ""
        base = self._result(self._base, "")
        if not base.curves.keys() >= set(seeds):
            return ""
        at = share * base.steps
        then = [np.interp(at, base.evaluated_at, base.curves[seed]) for seed in seeds]
        gap = sequence(np.subtract(progress.val_losses, then), LEVEL)
        if not gap.mean - gap.margin > 0:
            return ""
        return (
            f"stopped at step {progress.step} of {progress.steps}, behind the base by "
            f"{gap.mean:.4f} ± {gap.margin:.4f}"
        )

    def _result(self, variant: Variant, name: str) -> Result:
        runs = self._runs(variant)
        whole = [run for run in runs if not run.stopped]
        count = sum(len(run.seeds) for run in whole)
        result = Result(
            name=name,
            is_base=variant.base is None,
            parameters=variant.parameters,
            operations_per_token=variant.operations_per_token,
            steps=runs[0].steps if runs else 0,
            evaluated_at=whole[0].evaluated_at if whole else [],
            curves={
                seed: [math.nan if x is None else x for x in curve]
                for run in whole
                for seed, curve in zip(run.seeds, run.curves, strict=True)
            },
            seconds=sum(run.seconds for run in whole) / count if count else 0.0,
            verdict=None,
        )
        if variant.base is None:
            return result
        base = self._result(self._base, "")
        of_time = self._tolerance(variant, base)
        verdict = judge(base.losses, result.losses, variant.level or LEVEL, of_time)
        if stopped := [run.stopped for run in runs if run.stopped]:
            verdict = dataclasses.replace(verdict, words=stopped[0])
        return dataclasses.replace(result, verdict=verdict)


def _finite(values: Iterable[float]) -> list[float | None]:
    """JSON has no NaN and no infinity."""
    return [x if math.isfinite(x) else None for x in values]


def _settings(config: Config) -> dict[str, Any]:
    """Everything in a config that decides what is learned. A custom block's file is known by its
    checksum, wherever it lies."""
    custom = {f"model.{name}" for name in CUSTOM_FIELDS}
    return {
        name: Path(value).name if name in custom else value
        for name, value in settled(config, "comparison")
    }


def _checksum(of: Any) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def default_name(base: str, config: Config) -> str:
    """The name of a comparison: another one for each base, so that more variants and more seeds can
    be added."""
    settings = {name: str(value) for name, value in settled(config, "comparison")}
    return f"{base}-{_checksum(settings | {'data': str(config.data)})[:6]}"
