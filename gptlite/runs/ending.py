"""How a run ends: with a result, or with an error that says how it is resumed."""

import contextlib
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from gptlite.config import Config
from gptlite.custom import custom_arguments
from gptlite.errors import UserError
from gptlite.machine.files import write_json
from gptlite.machine.processes import is_main_process, process_count, wait_for_main
from gptlite.runs.find import list_steps
from gptlite.runs.folder import RunFolder
from gptlite.runs.saved_config import corpus_arguments
from gptlite.runs.saving import Saver
from gptlite.text.tokenizer import Tokenizer
from gptlite.training.fit import DivergenceError


class Ending:
    """The end of a run that is trained."""

    def __init__(
        self, folder: RunFolder, saver: Saver, config: Config, options: Sequence[str] = ()
    ):
        """`options`: of the command, to be given again when the run is resumed."""
        self._folder, self._saver, self._config = folder, saver, config
        self._options = options

    @contextlib.contextmanager
    def training_errors(self, tokenizer: Tokenizer) -> Iterator[None]:
        """Wraps the training loop: waits at its end until everything is saved, and adds the command
        to resume to an error. A batch that made training diverge is saved as `nonfinite.json`."""
        try:
            yield
            self._saver.wait()
        except UserError as error:
            # A save in progress may still succeed, if all processes wait for it.
            together = process_count() == 1 or isinstance(error, DivergenceError)
            with contextlib.suppress(UserError):
                if together:
                    self._saver.wait()
            if not (self._folder.path / "config.json").exists():
                raise UserError(
                    f"The run folder {self._folder.path} was deleted while it was trained."
                ) from error
            hint = self.resume_hint()
            if isinstance(error, DivergenceError):
                if is_main_process():
                    self._save_diverged(error, tokenizer)
                wait_for_main("nonfinite.json")  # an error of another process would end it
                # Resumed with the same settings, it would diverge again.
                skip = ["--training.on-nonfinite", "skip"]
                hint = "" if error.batch is None else self.resume_hint(skip)
            raise UserError(f"{error} {hint}".rstrip()) from error

    def resume_hint(self, options: Sequence[str] = ()) -> str:
        """A sentence that gives the command to resume the run."""
        steps = list_steps(self._folder.path)
        if not steps:
            return "Nothing has been saved yet."
        where = ", in every process" if process_count() > 1 else ""
        named = (*corpus_arguments(self._config.data), *custom_arguments(self._config.model))
        resume = ["gptlite", "train", "--resume", str(self._folder.path)]
        words = [*resume, *named, *self._options, *options]
        return f"To resume from step {steps[0]}{where}:\n    {shlex.join(words)}"

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`."""
        if is_main_process():
            with self._folder.writing():
                write_json(self._folder.path / "result.json", result)

    def _save_diverged(self, diverged: DivergenceError, tokenizer: Tokenizer) -> None:
        """Write `nonfinite.json`."""
        # JSON has no NaN and no infinity.
        report = {
            name: value if math.isfinite(value) else str(value)
            for name, value in diverged.report.items()
        }
        if diverged.batch is not None:
            report["text"] = [tokenizer.decode(window) for window in diverged.batch]
            report["ids"] = diverged.batch.tolist()
        with self._folder.writing():
            write_json(self._folder.path / "nonfinite.json", report)
