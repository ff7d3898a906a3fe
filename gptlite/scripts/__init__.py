"""The commands: `gptlite train`, which is `python train.py` in a clone, and so on."""

import importlib
import os
import signal
import sys
from collections.abc import Callable

SCRIPTS = {
    "train": "Train a language model.",
    "sample": "Generate text with a trained model.",
    "compare": "Train variants of a model from several seeds, and test which differences are real.",
    "forecast": "Say what a larger model will reach on a text, before it is trained.",
    "serve": "Serve a trained model: a page for browsers, and OpenAI's API.",
    "export": "Write a model in Hugging Face's format.",
    "check-block": "Check a block of your own.",
    "estimate": "A model's size, memory and time, without training it.",
}


def run(name: str) -> None:
    """A script, with the words of the command line."""
    # From now on, because the imports take a part of a second.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    importlib.import_module(f"gptlite.scripts.{name.replace('-', '_')}").main()


def main() -> None:
    """The command `gptlite`, whose first word names the script."""
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in SCRIPTS:
        sys.argv[:2] = [f"gptlite {word}"]
        run(word)
    elif word == "--version":
        import gptlite

        print(f"gptlite {gptlite.__version__}")
    else:
        import tyro

        from gptlite.machine.printed import printable

        tyro.extras.subcommand_cli_from_dict(
            {name: _described(text) for name, text in SCRIPTS.items()},
            prog="gptlite",
            description="A small language model package. `gptlite COMMAND --help` has the options, "
            "`gptlite --version` the version.",
            args=[printable(word)],
            sort_subcommands=False,
        )


def _described(text: str) -> Callable[[], None]:
    def idle() -> None: ...

    idle.__doc__ = text
    return idle
