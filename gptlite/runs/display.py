"""The display of a training run: a progress bar, or plain lines."""

from typing import Any

from gptlite.machine.progress import log, progress_bar

# Without a terminal: a line at each evaluation, and after this many seconds without a line.
SECONDS_BETWEEN_LINES = 10.0


class Display:
    """A progress bar where standard output is a terminal, plain lines where it is not."""

    def __init__(self, steps: int, done: int = 0):
        """`done`: steps done before."""
        self._bar = progress_bar("training", steps, unit="step", done=done)
        self._last_line = 0.0

    def update(self, line: dict[str, Any], steps: int) -> None:
        """Show a line of metrics, and at an evaluation its loss. `steps`: those of the run."""
        self._bar.total = steps
        step, loss = line["step"], line["train_loss"]
        left = line["step_seconds"] / step * (steps - step)
        loss = "none" if loss is None else f"{loss:.4f}"
        state = f"loss {loss}  {line['tokens_per_second']:,.0f} tokens/s"
        if line.get("skipped"):
            state += f"  {line['skipped']} updates skipped"
        shown = f"step {step:>{len(str(steps))}}/{steps}  {state}"
        if "val_loss" in line:
            log(f"{shown}  validation loss {line['val_loss']:.4f}")
            self._last_line = line["seconds"]
        elif self._bar.disable and line["seconds"] - self._last_line > SECONDS_BETWEEN_LINES:
            log(f"{shown}  {left:.0f} s left")
            self._last_line = line["seconds"]
        self._bar.set_postfix_str(state, refresh=False)
        self._bar.update(step - self._bar.n)

    def show_sample(self, text: str) -> None:
        """Show a sample of the model's text."""
        for line in text.split("\n"):
            log(f"    | {line}")

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.close()
