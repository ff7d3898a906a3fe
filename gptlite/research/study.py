"""Variants trained from several seeds, and what is kept of each, so that nothing is done twice."""

import dataclasses
import functools
import hashlib
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from gptlite.config import Config, UserError
from gptlite.custom import custom_sources
from gptlite.files import read_json, write_json
from gptlite.models.gpt import GPT
from gptlite.models.summary import activation_bytes, count_parameters, flops_per_token
from gptlite.research.seeds import SeedsProgress, fit_seeds
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split

# Dispatches by which a variant's speed is compared with the base's, by turns.
TIMED_DISPATCHES = 5
# Share of the free memory that seeds may fill together.
MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Result:
    """A variant, trained. Losses are in nats a token."""

    name: str
    steps: int
    parameters: int
    flops_per_token: int
    """Of training."""
    looks: Sequence[int]
    """The steps at which there was an evaluation."""
    curves: dict[int, Sequence[float]]
    """For each seed, the validation loss at each of `looks`."""
    seconds: float
    """A seed's share of the time that steps took."""

    @property
    def losses(self) -> list[float]:
        """Of each seed, at the end."""
        return [curve[-1] for curve in self.curves.values()]


class Study:
    """A folder with a file for each variant, all trained on the same text."""

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
        """Which of `seeds` have been trained.

        **Raises:** `UserError` if the variant kept under that name is another one.
        """
        kept = self._read(name, config)
        return [seed for seed in seeds if str(seed) in kept["curves"]]

    def result(self, name: str, config: Config, seeds: Sequence[int]) -> Result:
        """What is kept of the variant, all `seeds` of which have been trained."""
        kept = self._read(name, config)
        return Result(
            name=name,
            steps=kept["steps"],
            parameters=kept["parameters"],
            flops_per_token=kept["flops_per_token"],
            looks=kept["looks"],
            curves={
                seed: [math.nan if x is None else x for x in kept["curves"][str(seed)]]
                for seed in seeds
            },
            seconds=statistics.fmean(kept["seconds"][str(seed)] for seed in seeds),
        )

    def train(
        self, name: str, config: Config, seeds: Sequence[int], at_once: int | None = None
    ) -> Iterator[SeedsProgress]:
        """Train what is missing of the variant, `at_once` seeds at a time (by default as many as
        fit into memory), and keep it.

        **Raises:** `UserError` if what is kept under that name is another variant's, or the folder
        cannot be written.
        """
        kept = self._read(name, config)
        missing = [seed for seed in seeds if str(seed) not in kept["curves"]]
        if not missing:
            return
        at_once = self._fitting(config) if at_once is None else at_once
        if kept["steps"] is None:
            kept["steps"] = self._choose_steps(config, min(at_once, len(missing)))
        config = _with_steps(config, kept["steps"])
        for first in range(0, len(missing), at_once):
            group = missing[first : first + at_once]
            looks, curves, progress = [], [], None
            for progress in fit_seeds(config, self._maker(config), group, self._split):
                if progress.val_losses is not None:
                    looks.append(progress.step)
                    curves.append(progress.val_losses)
                yield progress
            assert progress is not None
            kept["looks"] = looks
            for seed, curve in zip(group, zip(*curves, strict=True), strict=True):
                # JSON has no number that is not finite.
                kept["curves"][str(seed)] = [x if math.isfinite(x) else None for x in curve]
            kept["seconds"] |= {str(seed): progress.step_seconds / len(group) for seed in group}
            try:
                write_json(self._path(name), kept)
            except OSError as error:
                raise UserError(
                    f"{self._path(name)} cannot be written: {error.strerror}."
                ) from error

    def _path(self, name: str) -> Path:
        # Characters and a length that any file system takes, and no two names alike.
        readable = re.sub(r"[^A-Za-z0-9=._+-]", "_", name)[:80]
        return self._folder / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"

    def _read(self, name: str, config: Config) -> dict[str, Any]:
        parameters, flops = self._cost(config)
        about = {
            "config": _what_counts(config),
            # By which the steps were chosen.
            "base": None if self._equal == "steps" else _what_counts(self._base),
            "tokenizer": self._tokenizer.to_json(),
            "equal": self._equal,
            "corpus_sha256": self._corpus_sha256,
            "custom": {
                file: hashlib.sha256(source).hexdigest()
                for file, source in custom_sources(config.model).items()
            },
            "parameters": parameters,
            "flops_per_token": flops,
        }
        path = self._path(name)
        if not path.exists():
            return about | {"steps": None, "looks": [], "curves": {}, "seconds": {}}
        try:
            kept = read_json(path)
            missing = {"steps", "looks", "curves", "seconds"} - kept.keys()
            if missing:
                raise ValueError(f"it has no {min(missing)}")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}. Delete it to train it anew.") from error
        changed = [key for key, value in about.items() if kept.get(key) != value]
        if changed:
            for key in ("config", "base"):
                if key in changed and about[key] and kept.get(key):
                    place, old = changed.index(key), kept[key]
                    differs = [knob for knob, value in about[key].items() if old.get(knob) != value]
                    changed[place] = " and ".join(differs) + (" of the base" * (key == "base"))
            if "custom" in changed:
                changed[changed.index("custom")] = f"version of {', '.join(about['custom'])}"
            raise UserError(
                f"{path} was trained with another {', another '.join(changed)}: choose another "
                "--name for this comparison, or delete that file."
            )
        return kept

    def _maker(self, config: Config) -> Callable[[PRNGKeyArray], GPT]:
        tokenizer = self._tokenizer
        rows = tokenizer.padded_vocab_size
        return lambda key: GPT(config.model, tokenizer.vocab_size, padded_vocab_size=rows, key=key)

    def _choose_steps(self, config: Config, at_once: int) -> int:
        """How many make the variant equal to the base, with so many seeds trained at once."""
        steps = self._base.training.steps
        if self._equal == "steps" or config == self._base:
            return config.training.steps
        if self._equal == "flops":
            ratio = self._flops_per_step(self._base) / self._flops_per_step(config)
        else:
            ratio = self._times_as_fast(config, at_once)
        return max(1, round(steps * ratio))

    def _flops_per_step(self, config: Config) -> int:
        tokens = config.training.batch_size * config.model.context_length
        return self._cost(config)[1] * tokens

    def _count_cost(self, config: Config) -> tuple[int, int]:
        """Parameters, and training FLOPs a token."""
        skeleton = eqx.filter_eval_shape(self._maker(config), jax.random.key(0))
        return count_parameters(skeleton), flops_per_token(skeleton)[1]

    def _times_as_fast(self, config: Config, at_once: int) -> float:
        """The base's seconds a step by the variant's, in short runs of both by turns."""
        runs = []
        for timed in (self._base, config):
            per_dispatch = timed.training.steps_per_dispatch
            steps = per_dispatch * (TIMED_DISPATCHES + 1)
            short = dataclasses.replace(timed.training, steps=steps, eval_every=steps)
            timed = dataclasses.replace(timed, training=short)
            runs.append(fit_seeds(timed, self._maker(timed), range(at_once), self._split))
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

    def _fitting(self, config: Config) -> int:
        """How many seeds fit into memory."""
        skeleton = eqx.filter_eval_shape(self._maker(config), jax.random.key(0))
        rows = config.training.batch_size // config.training.accumulation
        # Parameters, gradients, two moments, in float32.
        each = 16 * count_parameters(skeleton) + activation_bytes(skeleton, rows)
        fit = max(1, int(MEMORY_SHARE * _free_memory() / each))
        return max(fit - fit % jax.device_count(), 1)


def _free_memory() -> int:
    """Bytes, on all devices together; where it cannot be known, all that a machine has."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return jax.device_count() * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if os.path.exists("/proc/meminfo"):  # Linux, where files in memory count as free
        found = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
        if found is not None:
            return 1024 * int(found[1])
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**33


def _what_counts(config: Config) -> dict[str, Any]:
    """The knobs by which a variant learns what it learns, and no others."""
    idle = {"seed", "sample_tokens", "save_seconds", "keep", "cpu_devices"}
    return {
        f"{section}.{knob}": value
        for section, knobs in dataclasses.asdict(config).items()
        if section not in ("data", "mesh")  # of the data, the checksum tells more
        for knob, value in knobs.items()
        if (section, knob) not in {("training", name) for name in idle}
    }


def _with_steps(config: Config, steps: int) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, steps=steps))
