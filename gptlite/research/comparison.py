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
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import msgspec
import numpy as np

from gptlite.config import Config, TrainingConfig
from gptlite.errors import UserError, require
from gptlite.inspect.flops import operations_per_token
from gptlite.inspect.summary import activation_bytes
from gptlite.machine.memory import free_memory
from gptlite.machine.printed import printable
from gptlite.machine.pytrees import count_parameters
from gptlite.research.code import checksum_of, code_of, settings_of
from gptlite.research.equal import Equal, steps_of, tokens_per_step, with_parameters
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
from gptlite.research.results import (
    AGAIN,
    Result,
    behind,
    finite,
    missed_of,
    of_both,
    result_of,
    results_of,
    tolerance_of,
)
from gptlite.research.seeds import SeedsProgress, fit_seeds
from gptlite.research.speed import MISSED, ratio_of, seconds_per_step, speed_ratios
from gptlite.research.statistics import judge, level
from gptlite.runs.frozen import trainable
from gptlite.runs.model import abstract_model
from gptlite.runs.saved_config import config_of
from gptlite.text.batches import Batches
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split
from gptlite.training.optimizer import make_optimizer

# Where the first parameters of the base again come from: a seed, and this.
AGAIN_SEED = 200_000
# The first seed of a confirmation, and how far those of the next one are.
CONFIRM_SEED, APART = 300_000, 10_000
# Dispatches after which the speed is known well enough for a plan.
MEASURED = 5
# Share of the free memory that seeds may fill together.
MEMORY_SHARE = 0.6


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
            tokenizer=checksum_of(tokenizer.to_json()),
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
    def choice_tokens(self) -> int:
        """The tokens of the choice text."""
        return len(self._split.validation)

    @property
    def tried(self) -> int:
        """The variants that were ever tried in this folder."""
        return sum(variant.level is not None for variant in self.ledger.variants.values())

    @property
    def judged(self) -> list[str]:
        """The names of those that are judged."""
        return [name for name, (variant, _) in self._entered.items() if variant.level is not None]

    @property
    def names(self) -> list[str]:
        """Those that were entered, the base first."""
        return list(self._entered)

    def enter(
        self,
        configs: Mapping[str, Config],
        equal: Equal,
        *,
        again: bool,
        twins: Mapping[str, tuple[str, Config]] = MappingProxyType({}),
        known: str = "",
    ) -> None:
        """Name the variants that are compared, the base first. Their custom blocks are loaded. Each
        has its level from now on. All are written into the ledger as soon as one variant was
        evaluated.

        `again`: also the base, once more. `twins`: for variants that were tuned, the name and the
        config of the base with their values. `known`: the checksum that the last one must have, and
        all must be in the ledger.

        **Raises:** `UserError` if one of them cannot be built, cannot be made equal to the base, or
        is the same as another one.
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
            entered[AGAIN] = (self._described(AGAIN, base, first, "steps"), base)
        for name, config in others:
            twin = None
            if name in twins:
                twin_name, of_twin = twins[name]
                twin = self._described(twin_name, of_twin, first, "steps", is_twin=True)
                entered[twin_name] = (twin, of_twin)
            entered[name] = (self._described(name, config, first, equal, twin), config)
        self._require_different(configs)
        ledger = self.ledger.variants
        if known:
            all_of_them = [v for v, _ in entered.values()]
            new = [v for v in all_of_them if v.variant not in ledger]
            if new or all_of_them[-1].variant != known:
                raise UserError(self._changed([*new, all_of_them[-1]][0], known))
        judged = [entered[name][0] for name, _ in others]
        judged = [v.variant for v in judged if v.variant not in ledger]
        share = level(self.tried, len(judged)) if judged else None
        self._entered = {}
        for name, (variant, config) in entered.items():
            if variant.variant in judged:
                variant = msgspec.structs.replace(variant, level=share)
            self._entered[name] = (ledger.get(variant.variant, variant), config)

    def made_equal(self, configs: Mapping[str, Config], equal: Equal) -> dict[str, Config]:
        """`configs`, the base first, with what makes their models equal to the base's.

        **Raises:** `UserError` if one of them cannot be built, or not be made equal, or is the same
        as another one.
        """
        for config in configs.values():
            self._described("", config, None, None)
        self._require_different(configs)
        (base_name, base), *others = configs.items()
        if equal != "parameters":
            return dict(configs)
        wanted = self._parameters(base)
        equals = {n: with_parameters(n, config, wanted, self._parameters) for n, config in others}
        return {base_name: base} | equals

    def _require_different(self, configs: Mapping[str, Config]) -> None:
        """**Raises:** `UserError` if two of them are trained alike: fields may differ that decide
        nothing."""
        seen: dict[str, str] = {}
        for name, config in configs.items():
            key = checksum_of([settings_of(config), code_of(config.model)])
            require(key not in seen, f"{name} is trained just as {seen.get(key)}: leave it out.")
            seen[key] = name

    def more_tokens(self) -> dict[str, float]:
        """The variants that read another number of tokens than the base in their steps, where that
        is not by design, and how many times as many."""
        (_, base), *_ = self._entered.values()
        tokens = base.training.steps * tokens_per_step(base)
        if self._equal not in ("steps", "parameters"):
            return {}
        ratios = {
            name: config.training.steps * tokens_per_step(config) / tokens
            for name, (_, config) in self._entered.items()
        }
        return {name: ratio for name, ratio in ratios.items() if ratio != 1}

    def missing(self, name: str, seeds: Sequence[int], early: bool = True) -> list[int]:
        """Those of `seeds` that have not been trained. With `early`, none of a variant that was
        stopped."""
        if early and self.result(name).is_stopped:
            return []
        runs = self.ledger.runs[self._entered[name][0].variant]
        trained = {seed for run in runs for seed in run.seeds if not run.stopped}
        return [seed for seed in seeds if seed not in trained]

    def train(self, name: str, seeds: Sequence[int], early: bool = True) -> Iterator[SeedsProgress]:
        """Train a variant from `seeds`, at the same time, and keep what it gives. With `early`, it
        is stopped when its curve is behind that of the base. As soon as one variant was evaluated,
        or failed, all that were entered count as tried.

        **Raises:** `UserError` if the ledger cannot be written.
        """
        variant, config = self._entered[name]
        with self._told(variant, seeds):
            steps, speed = self._steps(variant, config, len(seeds))
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
                    if not evaluated_at:
                        self._tried(variant, speed)
                    evaluated_at.append(progress.step)
                    curves.append(finite(progress.val_losses))
                    stopped = self._behind(variant, seeds, progress) if early else ""
                yield progress
                if stopped:
                    break
        by_seed = [list(curve) for curve in zip(*curves, strict=True)]
        entry = Runs(variant.variant, list(seeds), steps, evaluated_at, by_seed, seconds, stopped)
        self.ledger.append(entry)

    def like_before(self, config: Config) -> TrainingConfig | None:
        """How the newest base was trained, to its end, that is like `config` but for its steps and
        evaluations, and for what was tuned; None if there is none."""
        free = {"training.steps", "training.eval_every"}
        free |= {name for entry in self.ledger.of(Tuned) for name in entry.values}

        def fixed(config: Config) -> dict[str, Any]:
            return {name: x for name, x in settings_of(config).items() if name not in free}

        for entry in reversed(self.ledger.variants.values()):
            with contextlib.suppress(KeyError, TypeError, UserError):  # of another version
                before = config_of(entry.config)
                is_trained = entry.base is None and bool(self.ledger.runs[entry.variant])
                if is_trained and fixed(before) == fixed(config):
                    return before.training
        return None

    def seconds_of(self, config: Config, n_seeds: int, at_once: int) -> tuple[float, float]:
        """Seconds before the first step, and seconds of a step of `n_seeds`, of which `at_once` are
        trained at the same time, or as many as fit into memory."""
        at_once = min(n_seeds, at_once, self._that_fit(config))
        began = time.perf_counter()
        steps = seconds_per_step(config, self._tokenizer, self._split, at_once)
        next(steps)
        before = time.perf_counter() - began
        of_step = float(np.median([next(steps) for _ in range(MEASURED)]))
        return before, n_seeds / at_once * of_step

    def untuned(self, config: Config, base: Config, equal: Equal) -> str:
        """What a config is before it is tuned, beside its base."""
        return checksum_of([settings_of(config), code_of(config.model), settings_of(base), equal])

    def equal_steps(self, config: Config, base: Config, equal: Equal, at_once: int) -> int:
        """The steps that make `config` equal to `base`, before both are entered: those with which
        it was tuned before, if it was."""
        of = self.untuned(config, base, equal)
        for entry in self.ledger.of(Tuned):
            if entry.of == of:
                return entry.steps
        if equal == "time":
            ratios = self._ratios(base, config, at_once, MISSED)
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
        self,
        name: str,
        config: Config,
        values: Mapping[str, float],
        seeds: Sequence[int],
        of: str,
    ) -> Iterator[SeedsProgress]:
        """Train a config to tune it, and keep its losses. `of`: see `untuned`."""
        variant, steps = self._described(name, config, None, None), config.training.steps
        losses = []
        with self._told(variant, seeds):
            for progress in fit_seeds(config, self._tokenizer, seeds, self._split):
                losses = progress.val_losses or losses
                yield progress
        kept = finite(losses)
        entry = Tuned(variant.variant, of, name, dict(values), list(seeds), steps, kept)
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
        require(
            bool(self.ledger.runs[variant.variant]),
            f"{name} was not trained on the choice text before.",
        )
        first = CONFIRM_SEED + APART * len(before)
        seeds = list(range(first, first + n_seeds))
        entry = Confirming(variant.variant, seeds, level(len(before)), self.tried)
        self.ledger.append(entry)
        return entry

    def train_to_confirm(self, name: str, seeds: Sequence[int]) -> Iterator[SeedsProgress]:
        """Train a variant, with as many steps as before. The losses of the last step are those on
        the validation text. None are kept."""
        variant, config = self._entered[name]
        steps = next(
            (run.steps for run in self.ledger.runs[variant.variant]), config.training.steps
        )
        training = dataclasses.replace(config.training, steps=steps, eval_every=steps)
        config = dataclasses.replace(config, training=training)
        with self._told(variant, seeds):
            yield from fit_seeds(config, self._tokenizer, seeds, self._confirming)

    def confirm(
        self, name: str, entry: Confirming, losses: Mapping[str, Sequence[float]]
    ) -> Confirmed:
        """The verdict by the losses of all that were entered, of the seeds of `entry`: a single
        look, and so Student's test."""
        variant, _ = self._entered[name]
        by_seed = {n: dict(zip(entry.seeds, x, strict=True)) for n, x in losses.items()}
        by_variant = {v.variant: by_seed[n] for n, (v, _) in self._entered.items()}
        own, base = by_seed[name], by_variant[self._base.variant]
        of_time = tolerance_of(self.ledger, variant, result_of(self.ledger, self._base, self._base))
        verdict = judge(base, own, entry.level, of_time, once=True)
        twin = by_variant.get(variant.twin or "", {})
        if twin:
            verdict = of_both(verdict, twin, own, entry.level, of_time, once=True)
        mean, margin = finite([verdict.difference.mean, verdict.difference.margin])
        confirmed = Confirmed(
            variant=variant.variant,
            losses=finite(own.values()),
            base_losses=finite(base.values()),
            twin_losses=finite(twin.values()),
            difference=mean,
            margin=margin,
            words=verdict.words,
        )
        self.ledger.append(confirmed)
        return confirmed

    def _tried(self, variant: Variant, speed: Speed | None = None) -> None:
        """Something is known of a variant: from now on it counts, and with it all that were
        entered, whose levels depend on how many these are. A command that is interrupted goes on
        with the same ones."""
        entered = [v for v, _ in self._entered.values()]
        for new in (self._base, variant) if variant.level is None else entered:
            if new.variant not in self.ledger.variants:
                self.ledger.append(new)
        if speed is not None:
            self.ledger.append(speed)

    @contextlib.contextmanager
    def _told(self, variant: Variant, seeds: Sequence[int]) -> Iterator[None]:
        """What fails inside is written down."""
        try:
            yield
        except Exception as error:
            if any(variant.variant == v.variant for v, _ in self._entered.values()):
                self._tried(variant)
            reason = " ".join(f"{type(error).__name__}: {error}"[:1000].split())
            reason = printable(reason)
            self.ledger.append(Failed(variant.variant, list(seeds), reason))
            raise

    def _changed(self, variant: Variant, known: str) -> str:
        """Why a variant is not the one in the ledger whose checksum is `known`, or the base or the
        twin of that."""
        entry = self.ledger.variants[known]
        beside = {entry.variant, entry.base, entry.twin}
        same = [v for v in self.ledger.variants.values() if v.name == variant.name]
        same = [v for v in same if v.variant in beside]
        if not same:
            return f"{self.ledger.path} has no variant {variant.name}."
        old, new = same[-1].code, variant.code
        files = sorted(x for x in old.keys() | new.keys() if old.get(x) != new.get(x))
        what = f": {', '.join(files[:5])}{' ...' * (len(files) > 5)}" if files else ""
        return f"{variant.name} is not as it was tried any more{what}. Try it again first."

    @property
    def _base(self) -> Variant:
        return next(iter(self._entered.values()))[0]

    def result(self, name: str) -> Result:
        """The result of a variant."""
        return result_of(self.ledger, self._entered[name][0], self._base)

    def look(self, name: str) -> Result:
        """The result of a variant, with its verdict, which is written into the ledger."""
        variant, _ = self._entered[name]
        result = self.result(name)
        verdict = result.verdict
        if verdict is not None and verdict.seeds:
            mean, margin = finite([verdict.difference.mean, verdict.difference.margin])
            look = Look(variant.variant, verdict.seeds, mean, margin, verdict.words)
            if look not in self.ledger.of(Look):
                self.ledger.append(look)
        return result

    def results(self) -> list[Result]:
        """Of the base, and of all variants of it in the ledger."""
        newest = [variant for variant, _ in self._entered.values()]
        return results_of(self.ledger, self._base, newest, self._equal)

    def seeds_that_fit(self, name: str) -> int:
        """How many seeds of a variant fit into memory."""
        return self._that_fit(self._entered[name][1])

    def _that_fit(self, *configs: Config) -> int:
        """How many seeds of all these fit into memory together."""
        each = 0
        for config in configs:
            model = abstract_model(config.model, self._tokenizer)
            trained = trainable(config, model)
            rows = config.training.batch_size // (config.training.accumulation or 1)
            # In float32, parameters, and for those that are trained gradients and two moments.
            state = count_parameters(model) + 3 * count_parameters(eqx.filter(model, trained))
            each += 4 * state + activation_bytes(model, rows)
        seeds = max(1, int(MEMORY_SHARE * free_memory() / each))
        return max(seeds - seeds % jax.device_count(), 1)

    def _described(
        self,
        name: str,
        config: Config,
        base: Variant | None,
        equal: Equal | None,
        twin: Variant | None = None,
        *,
        is_twin: bool = False,
    ) -> Variant:
        """The entry of a variant, without its level."""
        model = abstract_model(config.model, self._tokenizer)
        trained = trainable(config, model)
        # For its errors: the optimizer may not fit what is trained.
        make_optimizer(config.optimizer, eqx.filter(model, trained))
        training = config.training
        Batches(self._split.train, training.batch_size, config.model.context_length, 0)
        common, code = None if base is None else equal, code_of(config.model)
        beside = [base and base.variant, twin and twin.variant]
        # What is not judged is another one than the same config as a variant.
        of = [settings_of(config), code, *beside, common, name == AGAIN, is_twin]
        return Variant(
            variant=checksum_of(of),
            name=name,
            base=base and base.variant,
            level=None,
            equal=common,
            config=json.loads(json.dumps(dataclasses.asdict(config))),
            code=code,
            parameters=count_parameters(model),
            operations_per_token=operations_per_token(model, trained),
            twin=twin and twin.variant,
        )

    def _parameters(self, config: Config) -> int:
        return count_parameters(abstract_model(config.model, self._tokenizer))

    def _steps(self, variant: Variant, config: Config, at_once: int) -> tuple[int, Speed | None]:
        """The steps that a variant is trained for, those that make it equal to the base; and what
        was measured for that."""
        base, base_config = next(iter(self._entered.values()))
        if variant.equal != "time":
            of_both = base.operations_per_token, variant.operations_per_token
            return steps_of(config, base_config, variant.equal, *of_both), None
        # Measured before each group of seeds: all that was measured tells how wrong it may be.
        ratios = self._ratios(base_config, config, at_once, missed_of(variant))
        chosen = max(1, round(base_config.training.steps * ratio_of(ratios)[0]))
        before = self.ledger.speeds[variant.variant]
        steps = before[0].steps if before else chosen
        return steps, Speed(variant.variant, steps, ratios)

    def _ratios(self, base: Config, config: Config, at_once: int, missed: float) -> list[float]:
        at_once = min(at_once, self._that_fit(base, config))
        return speed_ratios(base, config, self._tokenizer, self._split, at_once, missed)

    def _behind(self, variant: Variant, seeds: Sequence[int], progress: SeedsProgress) -> str:
        """Why a variant is stopped, if it is."""
        losses, share = progress.val_losses, progress.step / progress.steps
        if variant.level is None or losses is None or share == 1:
            return ""
        base = result_of(self.ledger, self._base, self._base)
        gap = behind(base, dict(zip(seeds, losses, strict=True)), share)
        if gap is None:
            return ""
        return (
            f"stopped at step {progress.step} of {progress.steps}, behind the base by "
            f"{gap.mean:.4f} ± {gap.margin:.4f}"
        )


def default_name(base: str, config: Config) -> str:
    """The name of a comparison: one for each preset and what the options say of the text, so that
    all that is tried with them counts."""
    return f"{base}-{checksum_of(str(config.data))[:6]}"
