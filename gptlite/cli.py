"""What the two scripts share: parsing a command line, and saying what was wrong with it."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import tyro

from gptlite.config import MOST, PRESETS, Config, SamplingConfig, UserError, require_range

DEFAULT_PRESET = "quick"
T = TypeVar("T")


@dataclass(frozen=True)
class TrainArguments:
    """Train a language model; see it learn, evaluate and sample.

    PRESET is where all settings below start from; those given after it change it."""

    preset: Annotated[
        Literal[tuple(PRESETS)],  # pyright: ignore[reportInvalidTypeForm] - one list of names
        tyro.conf.Positional,
        tyro.conf.arg(help="; ".join(f"{name}: {text}" for name, (text, _) in PRESETS.items())),
    ] = DEFAULT_PRESET

    run: str | None = None
    """Name of the run: its folder is runs/NAME. Default: made from preset and time."""

    overwrite: bool = False
    """Replace the run of that name, if there is one."""

    summary: bool = False
    """Print the model as a table, with parameters, FLOPs and memory, and stop."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class SampleArguments:
    """Generate text with a trained model.

    The generated text goes to standard output, and nothing else does; several samples are parted
    by a line `---`. Past the model's context length, it goes on from the last half of it."""

    prompt: str | None = None
    """The text to go on from. Without --prompt and --prompt-file: read from standard input."""

    prompt_file: str | None = None
    """A file with the text to go on from."""

    run: str | None = None
    """A run's folder, or its name in runs/. Default: the newest run."""

    weights: Literal["best", "last"] = "best"
    """Weights at the best or at the last evaluation."""

    max_new_tokens: int = 500
    """Tokens to generate."""

    num_samples: int = 1
    """Texts to generate, together."""

    seed: int = 0
    """Same seed, same text."""

    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End a text before this string; may be given several times."""

    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(
        default_factory=SamplingConfig
    )

    def __post_init__(self):
        require_range("max_new_tokens", self.max_new_tokens, 1, MOST)
        require_range("num_samples", self.num_samples, 1, 100_000)
        require_range("seed", self.seed, 0, MOST)
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("Give the prompt with --prompt or with --prompt-file, not with both.")


def parse_train(argv: Sequence[str]) -> TrainArguments:
    """`train.py`'s command line. `argv` is without the program's name."""
    preset = argv[0] if argv and argv[0] in PRESETS else DEFAULT_PRESET
    arguments = _parse(TrainArguments, argv, TrainArguments(preset, config=PRESETS[preset][1]))
    if arguments.preset != preset:
        raise UserError(f"The preset comes first: python train.py {arguments.preset} ...")
    return arguments


def parse_sample(argv: Sequence[str]) -> SampleArguments:
    """`sample.py`'s command line. `argv` is without the program's name."""
    return _parse(SampleArguments, argv, SampleArguments())


def _parse(kind: type[T], argv: Sequence[str], default: T) -> T:
    return tyro.cli(kind, args=argv, default=default)


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """A `UserError` inside ends the program with its sentence on standard error and code 2; Ctrl-C
    and a reader that has gone (`| head`) end it quietly."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print(
            "error: this does not fit into memory; make the model or the batch smaller, or raise "
            "--training.accumulation.",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes standard output once more at exit; nobody is there to read it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
