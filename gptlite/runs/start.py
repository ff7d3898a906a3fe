"""A run that is trained: how it starts, what it keeps, how it ends.

A run starts in one of three ways, which differ in four things: the tokenizer, the state of the
first step, where training continues, and how the folder comes to be.
"""

import contextlib
import dataclasses
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key

from gptlite.cli import TrainArguments, check_start, settings
from gptlite.config import Config
from gptlite.custom import custom_arguments, custom_blocks, load_custom
from gptlite.errors import UserError, require
from gptlite.machine.memory import require_memory
from gptlite.machine.mesh import check_tensor, mesh_shape
from gptlite.machine.names import parse_lora
from gptlite.machine.processes import (
    broadcast_from_main,
    check_same,
    is_main_process,
    joined,
    max_over_processes,
    process_count,
    silence_others,
    wait_for_main,
)
from gptlite.machine.progress import log
from gptlite.machine.pytrees import count_parameters, size_of
from gptlite.machine.runtime import set_up_jax, usable_cpu_devices, with_chosen_dtype
from gptlite.machine.stop import Stop
from gptlite.models.gpt import GPT
from gptlite.runs.checkpoints import Record
from gptlite.runs.corpora import load_corpus, require_documents
from gptlite.runs.display import Display
from gptlite.runs.ending import Ending
from gptlite.runs.find import check_free, find_run, new_run
from gptlite.runs.folder import RunFolder
from gptlite.runs.frozen import frozen_in
from gptlite.runs.load import load
from gptlite.runs.metrics_log import MetricsLog
from gptlite.runs.model import draw_model, separator_of
from gptlite.runs.plots import losses, save_picture
from gptlite.runs.resume import bring_back, find_checkpoint
from gptlite.runs.run import Run
from gptlite.runs.saving import Saver
from gptlite.runs.tokenizers import load_tokenizer, make_tokenizer
from gptlite.runs.weights import fill, gather_to_main, named_arrays
from gptlite.text.corpus import Corpus
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split
from gptlite.training.evaluate import Evaluation
from gptlite.training.fit import Position, Progress
from gptlite.training.step import TrainState, TrainSteps

if TYPE_CHECKING:
    from gptlite.planning.plan import Plan

# The file in a run's folder with what `--minutes` has promised.
PLAN = "plan.json"
# Copies of a batch in memory: those that are read ahead, and on their way to the devices.
COPIES = 4
# The number of the signal for an output that nobody reads, which Windows has no name for.
SIGPIPE = 13


class Start(Protocol):
    """Where a run begins."""

    tokenizer: Tokenizer
    record: Record | None
    """That of the checkpoint from which the run is resumed: known when the state is."""

    def state(
        self, config: Config, steps: TrainSteps, model: GPT, split: Split, key: Key[Array, ""]
    ) -> TrainState:
        """The state before the next step. `model`: its shapes. `key`: for random numbers."""
        ...

    def write(self, folder: RunFolder, config: Config, state: TrainState) -> None:
        """Make the folder, or bring it back to where training continues."""
        ...


class New:
    """From random numbers."""

    record: Record | None = None

    def __init__(self, arguments: TrainArguments, config: Config, corpus: Corpus):
        self._overwrite = arguments.overwrite
        self.tokenizer = self._make_tokenizer(config, corpus)

    def _make_tokenizer(self, config: Config, corpus: Corpus) -> Tokenizer:
        return make_tokenizer(config.data.tokenizer, corpus)

    def state(
        self, config: Config, steps: TrainSteps, model: GPT, split: Split, key: Key[Array, ""]
    ) -> TrainState:
        return steps.init(draw_model(config.model, self.tokenizer, steps.mesh, key=key))

    def write(self, folder: RunFolder, config: Config, state: TrainState) -> None:
        frozen = gather_to_main(state.model, frozen_in(config))
        folder.create(config, self.tokenizer, overwrite=self._overwrite, frozen=frozen)


class BegunFrom(New):
    """From the weights of another model: with its tokenizer, and otherwise new."""

    def __init__(self, arguments: TrainArguments, config: Config, corpus: Corpus):
        self._name = str(arguments.init_from)
        self._source: Run | None = load(self._name, custom=arguments.custom)
        super().__init__(arguments, config, corpus)

    def _make_tokenizer(self, config: Config, corpus: Corpus) -> Tokenizer:
        assert self._source is not None
        return self._source.tokenizer

    def state(
        self, config: Config, steps: TrainSteps, model: GPT, split: Split, key: Key[Array, ""]
    ) -> TrainState:
        assert self._source is not None
        source, lora = self._source.model, config.model.lora
        self._source = None  # frees its arrays when they are copied
        if lora is not None:
            from gptlite.adapters import with_adapters

            source = with_adapters(source, parse_lora(lora), key=key)
        state = steps.init(fill(model, named_arrays(source), f"The weights of {self._name}"))
        del source
        loss = Evaluation(split.validation, config.model.context_length, steps.mesh)(state.model)
        log(
            f"starting from the weights of {self._name}: validation loss {loss:.4f} nats per token "
            f"({split.bits_per_byte(loss):.4f} bits per byte)"
        )
        return state


class Resumed:
    """From the newest checkpoint of the run in the folder."""

    record: Record | None = None

    def __init__(self, path: Path):
        self._path = path
        self.tokenizer = load_tokenizer(path)

    def state(
        self, config: Config, steps: TrainSteps, model: GPT, split: Split, key: Key[Array, ""]
    ) -> TrainState:
        abstract_state = steps.abstract_state(model)
        checkpoint = find_checkpoint(self._path, abstract_state, config, split.sha256)
        self.record = checkpoint.record
        check_same("checkpoints", {"the step": str(self.record.position.step)})
        return checkpoint.state

    def write(self, folder: RunFolder, config: Config, state: TrainState) -> None:
        assert self.record is not None
        bring_back(folder, self.record.position.step, config)


@contextlib.contextmanager
def start_run(arguments: TrainArguments) -> Iterator["TrainingRun"]:
    """The run that `arguments` ask for, from `parse_train`: new, resumed, or begun from other
    weights.

    Joins the other processes of the run, if there are any, and sets JAX up. Nothing is written
    before `TrainingRun.create_folder`. The exit of the context waits until everything is saved, and
    adds to an error of the training how the run is resumed.

    **Raises:** `UserError` if the run cannot start.
    """
    config, trackers = arguments.config, arguments.log.names
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined(arguments.distributed, debug=arguments.debug))
        silence_others()
        if trackers:
            from gptlite.trackers import check_installed

            check_installed(trackers)
        check_same("settings", settings(arguments))
        check_start(config, arguments.resume, arguments.init_from, arguments.custom)
        if arguments.resume is not None:
            path = find_run(arguments.resume)
        else:
            now = broadcast_from_main("time", time.strftime("%Y%m%d-%H%M%S"))
            path = new_run(f"{arguments.preset}-{now}" if arguments.run is None else arguments.run)
            if is_main_process() and arguments.run is not None:
                check_free(path, overwrite=arguments.overwrite)
        # Two devices of one of several processes may each wait for a thread that the other holds.
        set_up_jax(usable_cpu_devices(config.training, config.mesh) if process_count() == 1 else 1)
        dtype: Any = with_chosen_dtype(config).training.compute_dtype
        dtype = broadcast_from_main("number format", dtype)  # processors may differ
        training = dataclasses.replace(config.training, compute_dtype=dtype)
        config = dataclasses.replace(config, training=training)
        rows, tokens = config.training.batch_size, config.model.context_length + 1
        require_memory(f"A batch of {rows:,} x {tokens:,} tokens", COPIES * 4 * rows * tokens)
        may_rename = arguments.resume is None and arguments.run is None
        folder = stack.enter_context(RunFolder(path, may_rename=may_rename))
        if arguments.resume is not None:
            folder.open()
        model = load_custom(config.model)  # before what takes time
        if arguments.check_blocks and arguments.resume is None and custom_blocks(model):
            from gptlite.research.before_training import check_custom

            check_custom(model)
        corpus = load_corpus(config.data.corpus)
        data = dataclasses.replace(config.data, corpus=corpus.name)  # not `auto`
        config = dataclasses.replace(config, data=data, model=model)
        start: Start
        if arguments.resume is not None:
            start = Resumed(path)
        elif arguments.init_from is not None:
            start = BegunFrom(arguments, config, corpus)
        else:
            start = New(arguments, config, corpus)
        if config.model.separate_documents:
            require_documents(corpus)
            separator_of(config.model, start.tokenizer)  # or an error
        plan = None
        if arguments.minutes is not None:
            from gptlite.planning.plan import planned

            config, plan = planned(arguments, config, corpus, start.tokenizer)
        elif (path / PLAN).exists():
            from gptlite.planning.plan import kept_plan

            plan = kept_plan(path, config)
        check_tensor(mesh_shape(config.mesh, jax.device_count())[2], config.model)
        yield TrainingRun(config, corpus, start, folder, stack, trackers, arguments.began, plan)


class TrainingRun:
    """A run that is trained, as `start_run` gives it."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        start: Start,
        folder: RunFolder,
        stack: contextlib.ExitStack,
        trackers: list[str],
        began: float,
        plan: "Plan | None" = None,
    ):
        """`stack`: of contexts that end with the run. `began`: when the command did, by
        `time.perf_counter`. `plan`: of `--minutes`."""
        self.config = config
        """All settings, with what `auto` stands for."""
        self.corpus = corpus
        """The text."""
        self.tokenizer = start.tokenizer
        """New, or that of the run, or of the model, that it begins from."""
        # (The third key of this split is that of the updates.)
        keys = jax.random.split(jax.random.key(config.training.seed))
        self._model_key = keys[0]
        self.sample_key = keys[1]
        """The key of the samples at evaluations."""
        self._start, self._folder, self._stack = start, folder, stack
        self._loop = contextlib.ExitStack()
        self._trackers, self._began, self._plan = trackers, began, plan
        self._stop, self._signal = Stop(exits=True), 0
        self._parameters = 0
        self._unshown: OSError | None = None
        """Why a line could not be shown."""

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    @property
    def position(self) -> Position:
        """Where training continues, once there is a state."""
        record = self._start.record
        return Position() if record is None else record.position

    def state(self, steps: TrainSteps, model: GPT, split: Split) -> TrainState:
        """The state before the next step: drawn from the seed, filled with the weights of another
        model, or restored from a checkpoint. Says what is trained, where, and on what. From here
        on, the first signal to stop ends training after a step. `model`: its shapes.

        **Raises:** `UserError` if it does not fit into memory, or cannot be loaded.
        """
        written = json.dumps(self.tokenizer.to_json()).encode()
        tokens = hashlib.sha256(written).hexdigest()
        check_same("corpora", {"the sha256": split.sha256, "the tokenizer's": tokens})
        require(
            split.validation_bytes > 0 or len(split.validation) < 2,
            f"The validation text of {self.corpus.name} is too short: it has no letter that is to "
            "be predicted.",
        )
        log(
            f"{self.corpus.name}: {len(split.train):,} training tokens, {len(split.validation):,} "
            f"validation tokens, vocabulary {self.tokenizer.vocab_size:,}"
        )
        # Of what the processes share, each holds a part.
        whole = size_of(steps.abstract_state(model))
        require_memory("The training state", whole // process_count())
        state = self._start.state(self.config, steps, model, split, self._model_key)
        self._steps = steps
        self._parameters = count_parameters(model)
        trained = count_parameters(eqx.filter(model, steps.trainable))
        note = "" if trained == self._parameters else f", of which {trained:,} are trained,"
        step = self.position.step
        log(
            f"{self._parameters:,} parameters{note} on {steps.mesh.size} "
            f"{steps.mesh.devices.flat[0].platform} device(s), {steps.training.compute_dtype}; run "
            f"folder {self.path}" + (f", from step {step}" if step else "")
        )
        custom = custom_arguments(self.config.model)
        if custom:
            log(f"custom blocks: {shlex.join(custom)}")
        self._stack.enter_context(self._stop)
        return state

    def create_folder(self, state: TrainState, split: Split) -> None:
        """Make the run's folder, or bring it back to its checkpoint, before the first step.

        **Raises:** `UserError` if it cannot be written, or there is a run of that name.
        """
        wait_for_main("ready")  # for all: what one of them finds wrong is found before
        (signal,) = max_over_processes(self._stop.signal or 0)
        if signal:
            log("stopped before the first step: nothing has been written.")
            sys.exit(128 + signal)
        config, folder, record = self.config, self._folder, self._start.record
        self._start.write(folder, config, state)
        self._metrics = MetricsLog(folder, config, self._began, record)
        if self._plan is not None:
            self._plan.begin(folder, config, len(split.validation))
        saver = Saver(folder, config, split.sha256, self._parameters, record)
        self._saver = self._stack.enter_context(saver)
        options = ["--log.to", ",".join(self._trackers)] if self._trackers else []
        self._ending = Ending(folder, saver, config, options)
        self._loop = self._stack.enter_context(contextlib.ExitStack())
        self._loop.enter_context(self._ending.training_errors(self.tokenizer))
        log("compiling the training step ...")
        self._display = self._loop.enter_context(Display(self._steps.steps, saver.step))
        self._track: Any = lambda step, metrics: None
        if self._trackers:
            from gptlite.trackers import Trackers

            trackers = Trackers(self._trackers, self.path, self.config)
            self._track = self._loop.enter_context(trackers)

    def requests(self, progress: Progress) -> tuple[bool, bool]:
        """Whether training is to stop, because of a signal, and whether the run is to be saved,
        because its last checkpoint is old. With `--minutes`, the steps of the run change with its
        speed. Every process must call this after each dispatch: the answers are the same in all."""
        if self._plan is not None:
            steps = self._plan.steps(progress, self._metrics.seconds, self._steps.steps)
            (self._steps.steps,) = max_over_processes(steps)
        signal = self._stop.signal or (SIGPIPE if self._unshown else 0)
        self._signal, save = max_over_processes(signal, self._saver.is_due())
        return bool(self._signal), bool(save)

    def log(self, progress: Progress, val_loss: float | None = None) -> None:
        """Write a line of metrics, and show it."""
        self._saver.check()
        self._metrics.add(progress, val_loss)
        self._show(self._display.update, self._metrics.last, self._steps.steps)
        self._track(progress.step, self._metrics.last)

    def show_sample(self, text: str) -> None:
        """Show a sample of the model's text, after a line of metrics."""
        self._show(self._display.show_sample, text)
        self._track(self._metrics.last["step"], {"sample": text})

    def _show(self, show: Callable[..., None], *what: Any) -> None:
        """Show something. An output that is gone is a request to stop, before which the run is
        saved: Ctrl-C ends `tee`, too, and a terminal closes before its signal comes."""
        try:
            show(*what)
        except OSError as error:
            self._unshown = error

    def save(self, progress: Progress) -> None:
        """Start to save a checkpoint."""
        if self._plan is not None:
            self._plan.keep(self._folder, self._steps.steps)
        self._saver.save(progress, self._metrics)

    def finish(self, split: Split) -> None:
        """Wait until everything is saved; then write the result, draw the curves, and say what to
        do next. After a signal: exit with its code, and say how to resume."""
        self._loop.close()
        step, steps, ending = self._saver.step, self._steps.steps, self._ending
        if step < steps:
            if self._unshown is not None and not self._stop.requested:
                raise self._unshown
            log(f"stopped at step {step} of {steps}. {ending.resume_hint()}")
            sys.exit(128 + self._signal)
        last, best, seconds = self._metrics.last, self._metrics.best, self._metrics.seconds
        best_val_loss = last["val_loss"] if best is None else best.val_loss
        kept = {} if self._plan is None else self._plan.promise
        ending.save_result(
            {
                "best_val_loss": best_val_loss,
                "final_val_loss": last["val_loss"],
                "val_bits_per_byte": split.bits_per_byte(best_val_loss),
                "steps": last["step"],
                "tokens": last["tokens"],
                "parameters": self._parameters,
                "total_seconds": seconds,
                "tokens_per_second": last["tokens"] / last["step_seconds"],
                "corpus": self.corpus.name,
                "corpus_characters": split.characters,
                "corpus_sha256": split.sha256,
                "seed": self.config.training.seed,
                **kept,
            }
        )
        if not is_main_process():
            return
        try:
            save_picture(losses(self._metrics.lines()), self.path / "loss.png")
        except (OSError, UserError) as error:
            log(f"loss.png is not drawn: {error}")
        # A prompt of characters that the tokenizer knows, for the suggested command.
        ids = split.train[:100]
        beginning = self.tokenizer.decode(ids[~np.isin(ids, self.tokenizer.end_ids)])
        first_word = (beginning.split() or [beginning])[0]
        prompt = "ROMEO:" if self.corpus.name == "shakespeare" else first_word[:8]
        custom = custom_arguments(self.config.model)
        command = ["gptlite", "sample", "--run", str(self.path), *custom, f"--prompt={prompt}"]
        log(
            f"best validation loss {best_val_loss:.4f} nats per token "
            f"({split.bits_per_byte(best_val_loss):.4f} bits per byte) "
            f"after {seconds:.0f} s\n"
            + ("" if self._plan is None else f"{self._plan.verdict(last['val_loss'], seconds)}\n")
            + f"weights, metrics and curves are in {self.path}; now try\n"
            f"    {shlex.join(command)}"
        )
