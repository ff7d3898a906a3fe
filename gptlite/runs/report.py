"""What a person sees of a run: a progress bar or plain lines, and the picture of the curves."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

# Not a terminal: a line at least so many seconds after the last one, besides the evaluations'.
SECONDS_BETWEEN_LINES = 10.0


class Display:
    """A progress bar where standard output is a terminal, plain lines where it is not."""

    def __init__(self, steps: int, done: int = 0):
        """`done`: the step that the run goes on from."""
        self._steps = steps
        self._bar = tqdm(
            total=steps,
            initial=done,
            unit="step",
            desc="training",
            file=sys.stdout,
            disable=not sys.stdout.isatty(),
            dynamic_ncols=True,
        )
        self._last_line = 0.0

    def update(self, line: dict[str, Any], sample: str = "") -> None:
        """Show a line of metrics, and at an evaluation its loss and `sample`."""
        step, loss = line["step"], line["train_loss"]
        left = line["seconds"] / step * (self._steps - step)
        loss = "none" if loss is None else f"{loss:.4f}"
        state = f"loss {loss}  {line['tokens_per_second']:,.0f} tokens/s"
        if line.get("skipped"):
            state += f"  {line['skipped']} updates skipped"
        shown = f"step {step:>{len(str(self._steps))}}/{self._steps}  {state}"
        if "val_loss" in line:
            self.say(f"{shown}  validation loss {line['val_loss']:.4f}")
            for text in sample.split("\n") if sample else ():
                # Sampled bytes may be control characters, which a terminal would obey.
                clean = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)
                self.say(f"    | {clean}")
        elif self._bar.disable and line["seconds"] - self._last_line > SECONDS_BETWEEN_LINES:
            self.say(f"{shown}  {left:.0f} s left")
            self._last_line = line["seconds"]
        self._bar.set_postfix_str(state, refresh=False)
        self._bar.update(step - self._bar.n)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._bar.leave = False
        self._bar.close()


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw `metrics.jsonl`'s training and validation losses (nats a token) over steps."""
    # Here, because it takes a second to import; and not pyplot, which picks a window system.
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    evaluated = [record for record in records if "val_loss" in record]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [record["step"] for record in records],
        # NaN, a gap in the line, where every update was skipped.
        [record["train_loss"] or math.nan for record in records],
        label="training",
        linewidth=1,
    )
    losses = [record["val_loss"] for record in evaluated]
    axes.plot(
        [record["step"] for record in evaluated],
        losses,
        label=f"validation, at best {min(losses, default=math.nan):.3f}",
        marker="o",
        markersize=4,
    )
    axes.set(xlabel="step", ylabel="cross-entropy, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
