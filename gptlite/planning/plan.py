"""`gptlite train --minutes`: what to train in so many minutes, and what that is expected to reach.

A plan is made in the run's first seconds, with a model of the recipe that is trained for so few
tokens (a pilot) that it takes a few hundredths of the time. Its speed tells what the machine can
do, and its loss how hard the text is: the law of other texts, times a factor, passes through it.
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import msgspec
import numpy as np

from gptlite.cli import DEFAULT_PRESET, MAX_MINUTES, TrainArguments
from gptlite.config import Config, DataConfig
from gptlite.errors import UserError
from gptlite.machine.files import MAX_NUMBER
from gptlite.machine.mesh import make_mesh
from gptlite.machine.processes import broadcast_from_main, is_main_process, max_over_processes
from gptlite.machine.progress import log
from gptlite.machine.records import read_record, write_record
from gptlite.planning.deadline import COMPILING, ENDING, Deadline
from gptlite.planning.forecast import USUAL, Forecast, fit_pilot
from gptlite.planning.ladder import parameters_of
from gptlite.planning.law import Points, fit_law
from gptlite.planning.recipe import (
    SHAPES,
    Rung,
    chosen_by_hand,
    eval_every,
    is_sensible,
    with_recipe,
)
from gptlite.presets import PRESETS
from gptlite.runs.folder import RunFolder
from gptlite.runs.frozen import trainable
from gptlite.runs.model import abstract_model, draw_model
from gptlite.runs.saved_config import load_config, save_config
from gptlite.text.batches import Batches
from gptlite.text.corpus import Corpus
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split, split_corpus
from gptlite.training.evaluate import Evaluation
from gptlite.training.fit import Progress, fit
from gptlite.training.step import TrainSteps

# The file in a run's folder.
FILE = "plan.json"
# Seconds of steps that tell the speed.
ENOUGH = 3.0
# Steps to begin with, at least. Where there is time for fewer, that is seen after two of them.
LEAST = 100
# Tokens of the first pilot, and the fewest steps of any.
FIRST, STEPS = 2**18, 20
# The share of the time that the steps of a second pilot take, and that all that comes before the
# run itself may take, if there is a second one.
PILOT, PILOTS = 0.03, 0.1
# The speed of a model with so many times the parameters is not known: there is a second pilot.
FAR = 16.0
# Tokens to validate on: an evaluation is to cost little.
VALIDATION = 131_072
# The share of the time that the promise leaves open.
TOLERANCE = 0.05

Loss = Annotated[float, msgspec.Meta(gt=0, le=MAX_NUMBER)]


class Promise(msgspec.Struct, frozen=True):
    """What was said before the first step."""

    minutes: Annotated[float, msgspec.Meta(gt=0, le=MAX_MINUTES)]
    loss: Loss | None = None
    """The validation loss that is expected at the end. None: none was said."""
    low: Loss | None = None
    high: Loss | None = None
    """The ends of the interval that is to hold it."""


class Plan:
    """A promise, and how it is kept."""

    def __init__(self, promise: Promise):
        self._promise = promise

    def begin(self, folder: RunFolder, config: Config, validation_tokens: int) -> None:
        """Write the promise into the run's folder, before the first step."""
        self._config, self._saved = config, config.training.steps
        tokens = config.training.batch_size * config.model.context_length
        # An evaluation has no backward pass.
        self._deadline = Deadline(60 * self._promise.minutes, validation_tokens / tokens / 3)
        if is_main_process():
            with folder.writing():
                write_record(folder.path / FILE, self._promise)

    def steps(self, progress: Progress, seconds: float, planned: int) -> int:
        """The steps of the run, of which `planned` were to be, `seconds` after it began."""
        return self._deadline.steps(
            progress.position,
            seconds,
            planned,
            self._config.training.eval_every,
            evaluates=progress.evaluation_due,
        )

    def keep(self, folder: RunFolder, steps: int) -> None:
        """Write the steps into the run's config, if they have changed."""
        if steps != self._saved and is_main_process():
            training = dataclasses.replace(self._config.training, steps=steps)
            with folder.writing():
                config = dataclasses.replace(self._config, training=training)
                save_config(config, folder.path / "config.json")
        self._saved = steps

    @property
    def promise(self) -> dict[str, Any]:
        """For the run's result."""
        promise = self._promise
        return {
            "minutes": promise.minutes,
            "expected_val_loss": promise.loss,
            "expected_between": [promise.low, promise.high],
        }

    def verdict(self, loss: float, seconds: float) -> str:
        """Whether it was kept, by the loss at the end, and the seconds that the run took."""
        promise = self._promise
        in_time = abs(seconds / (60 * promise.minutes) - 1) <= TOLERANCE
        said = f"{promise.minutes:g} min were given, {seconds / 60:.2f} were used"
        if not in_time:
            said += f", {100 * abs(seconds / 60 / promise.minutes - 1):.0f} % "
            said += "more" if seconds > 60 * promise.minutes else "less"
        if promise.loss is None or promise.low is None or promise.high is None:
            return said
        side = "as" if promise.low <= loss <= promise.high else "which is not as"
        return (
            f"{said}; expected was a loss of {promise.loss:.3f} ({promise.low:.3f} to "
            f"{promise.high:.3f}), and it is {loss:.3f}, {side} expected"
        )


def kept_plan(path: Path, config: Config) -> Plan | None:
    """The plan of a run that is resumed with `config`; None if it is extended.

    **Raises:** `UserError` if it cannot be read.
    """
    saved = load_config(path / "config.json").training.steps
    if (path / "result.json").exists() or saved != config.training.steps:
        return None
    try:
        return Plan(read_record(path / FILE, Promise))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / FILE} is not a readable plan: {error}.") from error


def planned(
    arguments: TrainArguments, config: Config, corpus: Corpus, tokenizer: Tokenizer
) -> tuple[Config, Plan]:
    """What to train in `arguments.minutes`: `config` with the settings that are chosen, and the
    plan.

    The size of the model and its settings are chosen where neither a preset nor an option has; the
    number of steps is always chosen.
    """
    minutes, by_user = arguments.minutes, config.training.eval_every
    assert minutes is not None
    if config.data.validation_tokens == DataConfig.validation_tokens:
        data = dataclasses.replace(config.data, validation_tokens=VALIDATION)
        config = dataclasses.replace(config, data=data)
    data = config.data
    split = split_corpus(corpus, tokenizer, data.validation_tokens, data.max_tokens)
    pilots = _Pilots(config, tokenizer, split, 60 * minutes, arguments.began)
    evaluates = "training.eval_every"
    by_hand = chosen_by_hand(config, PRESETS[arguments.preset][1])
    is_own = arguments.init_from is not None or arguments.preset != DEFAULT_PRESET
    if is_own or {*by_hand} - {evaluates}:
        config = pilots.steps_alone()
        log(f"{minutes:g} min: about {config.training.steps:,} steps")
        promise = Promise(minutes)
    else:
        config, promise = _chosen(minutes, pilots, len(split.train))
    if evaluates in by_hand:
        training = dataclasses.replace(config.training, eval_every=by_user)
        config = dataclasses.replace(config, training=training)
    return config, Plan(promise)


def _chosen(minutes: float, pilots: "_Pilots", unique: int) -> tuple[Config, Promise]:
    """The settings of the recipe, and what is expected, which are told."""
    config, rung, forecast = pilots.choose()
    rounds = rung.tokens / unique
    log(
        f"{minutes:g} min: {rung.n_layers} layers of width {rung.d_model} and about "
        f"{rung.tokens:,} tokens, {rounds:.2g} times the text"
        + (f", and so with weight decay {config.optimizer.weight_decay:.2g}" if rounds > 2 else "")
    )
    log(
        f"expected: a validation loss of {forecast.loss:.3f}, with a probability of 95 % from "
        f"{forecast.low:.3f} to {forecast.high:.3f}"
    )
    return config, Promise(minutes, forecast.loss, forecast.low, forecast.high)


class _Pilots:
    """Short trainings on this machine."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, split: Split, seconds: float, began: float
    ):
        """`seconds`: from `began`, by `time.perf_counter`, to the end of the run."""
        self._config, self._tokenizer, self._split = config, tokenizer, split
        self._seconds, self._began = seconds, began
        self._mesh = make_mesh(**vars(config.mesh))
        self._rows = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
        self._unique = len(split.train)
        # Of the first steps, which tell no speed, there are a few.
        self._fewest = max(FIRST, STEPS * self._rows * config.model.context_length)
        self._measured = itertools.count()

    def steps_alone(self) -> Config:
        """The config with as many steps as there is time for, by the speed of its first ones."""
        config, before = self._config, self._used()
        steps, state = self._steps(config)
        count, on_steps = 0, 0.0
        for progress in fit(state, steps, self._batches(config, steps)):
            count, on_steps = progress.step, progress.position.step_seconds
            (is_enough,) = max_over_processes(on_steps > min(PILOT * self._seconds, ENOUGH))
            if is_enough:
                break
        before_steps = self._used() - before - on_steps  # which comes once more
        left = self._seconds - self._used() - before_steps - COMPILING - ENDING
        number = int(self._alike(max(float(LEAST), left / on_steps * count)))
        training = dataclasses.replace(config.training, steps=number, eval_every=eval_every(number))
        return dataclasses.replace(config, training=training)

    def choose(self) -> tuple[Config, Rung, Forecast]:
        """The config with what the recipe chooses, its rung, and what is expected of it."""
        pilot = Rung(*SHAPES[1], self._fewest)
        while True:
            before = self._used()
            loss, speed = self._train(pilot)
            before_steps = self._alike(self._used() - before - pilot.tokens / speed)
            left = self._seconds - self._alike(self._used()) - before_steps - COMPILING - ENDING
            rung = self._best(pilot, loss, speed, max(left, 1.0))
            seconds = PILOT * self._seconds
            again = dataclasses.replace(rung, tokens=self._tokens(rung, pilot, speed, seconds))
            costs = self._alike(self._used()) + before_steps + seconds
            is_far = self._parameters(again) > FAR * self._parameters(pilot)
            is_same = (again.n_layers, again.d_model) == (pilot.n_layers, pilot.d_model)
            if is_same or not (is_far or costs < PILOTS * self._seconds):
                break
            pilot = again
        config = with_recipe(self._config, rung, self._unique, self._rows)
        laws = fit_pilot(self._point(pilot, loss))
        return config, rung, laws.forecast(self._parameters(rung), rung.tokens, self._unique)

    def _point(self, rung: Rung, loss: float) -> Points:
        values = self._parameters(rung), rung.tokens, self._unique, loss
        return Points(*(np.array([float(x)]) for x in values))

    def _used(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self._began

    def _alike(self, number: float) -> float:
        """What process 0 has measured, so that all of them choose the same."""
        return float(broadcast_from_main(f"plan {next(self._measured)}", repr(number)))

    def _parameters(self, rung: Rung) -> int:
        return parameters_of(rung, self._tokenizer.vocab_size)

    def _tokens(self, rung: Rung, pilot: Rung, speed: float, seconds: float) -> int:
        """Tokens that a rung of the size of `rung` reads in so many seconds, when `pilot` reads
        `speed` tokens a second, each with its parameters."""
        n, of_pilot = self._parameters(rung), self._parameters(pilot)
        return max(self._fewest, int(seconds * speed * of_pilot / n))

    def _best(self, pilot: Rung, loss: float, speed: float, seconds: float) -> Rung:
        """The rung that is expected to reach the lowest loss in so many seconds."""
        rungs = [Rung(*shape, 1) for shape in SHAPES]
        rungs = [
            dataclasses.replace(x, tokens=self._tokens(x, pilot, speed, seconds)) for x in rungs
        ]
        inside = [x for x in rungs if is_sensible(self._parameters(x), x.tokens, self._unique)]
        law = fit_law(self._point(pilot, loss), USUAL)
        return min(
            inside or rungs[:1],
            key=lambda x: law.loss(self._parameters(x), x.tokens, self._unique),
        )

    def _steps(self, config: Config) -> tuple[TrainSteps, Any]:
        """The update of a config, and the state before the first one."""
        model = abstract_model(config.model, self._tokenizer)
        trained = trainable(config, model)
        steps = TrainSteps(model, config.optimizer, config.training, self._mesh, trainable=trained)
        key = jax.random.split(jax.random.key(config.training.seed))[0]  # as that of the run
        return steps, steps.init(draw_model(config.model, self._tokenizer, self._mesh, key=key))

    def _batches(self, config: Config, steps: TrainSteps) -> Batches:
        training, length = config.training, config.model.context_length
        return Batches(self._split.train, training.batch_size, length, training.seed, steps.rows)

    def _train(self, rung: Rung) -> tuple[float, float]:
        """The validation loss of a rung, and the tokens a second of its steps."""
        config = with_recipe(self._config, rung, self._unique, self._rows)
        steps, state = self._steps(config)
        # The first dispatch is slower than others.
        first, *_, last = fit(state, steps, self._batches(config, steps))
        before, after = first.position, last.position
        per_step = (after.step_seconds - before.step_seconds) / (after.step - before.step)
        length = config.model.context_length
        loss = Evaluation(self._split.validation, length, self._mesh).after(last)
        return loss, self._alike(config.training.batch_size * length / per_step)
