"""What the scripts share: parsing a command line, and saying what was wrong with it."""

import argparse
import contextlib
import dataclasses
import io
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NoReturn, TypeVar

import tyro

from gptlite.config import (
    MOST,
    PRESETS,
    RESUMABLE,
    Config,
    SamplingConfig,
    UserError,
    load_config,
    require_range,
    require_resumable,
)
from gptlite.own import named_again, own_blocks
from gptlite.runs.find import find_run

DEFAULT_PRESET = "quick"
# Stands for a run's own block that is yet to be named again.
NOT_NAMED = "FILE.py:CLASS"
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

    resume: Annotated[
        str | None,
        tyro.conf.arg(
            help="Go on with a run, where its last checkpoint was written: its folder, or its name "
            "in runs/. Its settings are kept; only these may be given with it: "
            + ", ".join(
                f"--{section}.{name.replace('_', '-')}"
                for section, names in RESUMABLE.items()
                for name in names
            )
            + " (the corpus: the same text, from another place). More steps extend a run."
        ),
    ] = None

    summary: bool = False
    """Print the model as a table, with parameters, FLOPs and memory, and stop."""

    debug: bool = False
    """Show where in the code an error came from."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True)
class OwnBlocks:
    """Blocks of your own: named again, as they were to train.py."""

    block: str | None = None
    norm: str | None = None
    attention: str | None = None
    mlp: str | None = None


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
    """Weights of the best evaluation, or of the last save."""

    max_new_tokens: int = 500
    """Tokens to generate."""

    num_samples: int = 1
    """Texts to generate, together."""

    seed: int = 0
    """Same seed, same text."""

    debug: bool = False
    """Show where in the code an error came from."""

    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End a text before this string; may be given several times."""

    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(
        default_factory=SamplingConfig
    )

    model: OwnBlocks = field(default_factory=OwnBlocks)

    @property
    def own(self) -> dict[str, str]:
        """The blocks that were named."""
        return {knob: value for knob, value in vars(self.model).items() if value is not None}

    def __post_init__(self):
        require_range("max_new_tokens", self.max_new_tokens, 1, MOST)
        require_range("num_samples", self.num_samples, 1, 100_000)
        require_range("seed", self.seed, 0, MOST)
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("Give the prompt with --prompt or with --prompt-file, not with both.")


@dataclass(frozen=True)
class CompareArguments:
    """Train variants of a model from several seeds each, and tell which differences are real.

    All seeds of a variant are trained at the same time. Variants are paired by seed: the same seed
    reads the same batches in the same order. Stopped and started again with the same --name, it
    goes on with what is missing; more --vary and more --seeds may be added. The table, a CSV file
    and a picture are written to comparisons/NAME/. (A p-value holds for a number of seeds that was
    chosen beforehand, and for the variants of one table.)"""

    base: Annotated[
        Literal[tuple(PRESETS)],  # pyright: ignore[reportInvalidTypeForm] - one list of names
        tyro.conf.arg(help="The preset that all variants start from; settings below change it."),
    ] = DEFAULT_PRESET

    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """SECTION.FIELD=VALUE,VALUE,...: a variant for each value, with all else as in the base; may be
    given several times. More settings may be joined to a value with +, as in
    model.mlp=swiglu,moe+model.n_experts=8."""

    seeds: int = 5
    """Seeds of each variant: 0, 1, 2, ..."""

    equal: Literal["steps", "flops", "time"] = "steps"
    """What variants have in common. flops, time: steps are chosen so that a variant spends as many
    floating-point operations (of matrix products), or as much time, as the base."""

    name: str = "comparison"
    """The folder in comparisons/."""

    seeds_at_once: int | None = None
    """Seeds trained at the same time. None: all that fit into memory."""

    debug: bool = False
    """Show where in the code an error came from."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    def __post_init__(self):
        require_range("seeds", self.seeds, 1, 10_000)
        if self.seeds_at_once is not None:
            require_range("seeds_at_once", self.seeds_at_once, 1, 10_000)
        if self.name != os.path.basename(self.name) or self.name in ("", ".", ".."):
            raise UserError(f"--name takes a name for the folder, got {self.name!r}.")


def parse_train(argv: Sequence[str]) -> TrainArguments:
    """`train.py`'s command line. `argv` is without the program's name."""
    preset = argv[0] if argv and argv[0] in PRESETS else DEFAULT_PRESET
    # What is resumed decides what the other settings start from, so it is read first.
    only_resume = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    only_resume.add_argument("--resume", nargs="?")
    resume = only_resume.parse_known_args(argv)[0].resume
    resumed = None if resume is None else find_run(resume) / "config.json"
    before = PRESETS[preset][1] if resumed is None else load_config(resumed)
    own = dict.fromkeys(own_blocks(before.model), NOT_NAMED)
    unnamed = dataclasses.replace(before, model=dataclasses.replace(before.model, **own))
    arguments = _parse(TrainArguments, argv, TrainArguments(preset, config=unnamed))
    if arguments.preset != preset:
        raise UserError(f"The preset comes first: python train.py {arguments.preset} ...")
    if resume is not None:
        for given, option in (
            (arguments.run, "--run"),
            (arguments.overwrite, "--overwrite"),
            (argv[0] == preset, f"the preset {preset}"),
        ):
            if given:
                raise UserError(
                    f"A run that is resumed keeps its name and settings: leave {option} out."
                )
        given = {knob: getattr(arguments.config.model, knob) for knob in own}
        named = {knob: value for knob, value in given.items() if value != NOT_NAMED}
        require_resumable(named_again(before, named), arguments.config)
    return arguments


def parse_sample(argv: Sequence[str]) -> SampleArguments:
    """`sample.py`'s command line. `argv` is without the program's name."""
    return _parse(SampleArguments, argv, SampleArguments())


def parse_compare(argv: Sequence[str]) -> tuple[CompareArguments, dict[str, Config]]:
    """`compare.py`'s command line, and the variants that it asks for by name, the base first.
    `argv` is without the program's name."""
    only_base = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    only_base.add_argument("--base", nargs="?")
    base = only_base.parse_known_args(argv)[0].base
    base = base if base in PRESETS else DEFAULT_PRESET
    arguments = _parse(CompareArguments, argv, CompareArguments(base, config=PRESETS[base][1]))
    if arguments.config.training.seed != PRESETS[base][1].training.seed:
        raise UserError("The seeds of a comparison are 0, 1, 2, ...: --seeds says how many.")
    if arguments.config.mesh != PRESETS[base][1].mesh:
        raise UserError("A comparison trains each seed on one device: leave --mesh out.")
    variants = {f"base ({arguments.base})": arguments.config}
    for vary in arguments.vary:
        field_name, equals, values = vary.partition("=")
        if not equals or not values:
            raise UserError(f"--vary takes SECTION.FIELD=VALUE,VALUE,..., got {vary!r}.")
        for value in values.split(","):
            settings = re.split(r"\+(?=\w+\.[\w-]+=)", f"{field_name}={value}")
            config = _changed(arguments.config, settings)
            if config not in variants.values():
                variants[" ".join(s.removeprefix("model.") for s in settings)] = config
    if len(variants) == 1:
        raise UserError("There is nothing to compare: give --vary SECTION.FIELD=VALUE,VALUE,...")
    return arguments, variants


def _changed(config: Config, settings: Sequence[str]) -> Config:
    """`config` with each of `settings`, `SECTION.FIELD=VALUE`."""
    argv = []
    for setting in settings:
        name, _, value = setting.partition("=")
        section, _, knob = name.strip().replace("-", "_").partition(".")
        if section not in ("model", "optimizer", "training") or (section, knob) == (
            "training",
            "seed",
        ):
            raise UserError(
                "--vary takes fields of model, optimizer and training (but the seed, which "
                f"--seeds varies), got {name!r}."
            )
        option = f"--{section}.{knob.replace('_', '-')}"
        if value.lower() in ("true", "false"):
            option = (
                option
                if value.lower() == "true"
                else f"--{section}.no-{option[3 + len(section) :]}"
            )
            argv.append(option)
        else:
            argv += [option, value]
    return _parse(Config, argv, config)


def _parse(kind: type[T], argv: Sequence[str], default: T) -> T:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=argv, default=default)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
    raise UserError(_sentence(said.getvalue(), argv))


def _sentence(box: str, argv: Sequence[str]) -> str:
    """What tyro draws a box around, in a line: the error, and what was expected or meant."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()  # without colours
    if lines[0].startswith("╭"):
        lines = [line[2:-2].rstrip() for line in lines if line.startswith("│")]
    else:  # drawn in ASCII: a title, a rule, and what follows is indented
        lines = [line[2:].rstrip() for line in lines[2:]]
    rules = [place for place, line in enumerate(lines) if set(line) <= set("─-")]
    error = " ".join(line.strip() for line in lines[: min(rules, default=None)]).rstrip(".")
    # Of a flag that takes no value, it names the value alone.
    for flag, equals, value in (word.partition("=") for word in argv):
        if equals and flag not in error and value in error:
            error += f" (in {flag}={value})"
    options = [line.strip() for line in lines if line.startswith("    --")]
    if not options:
        return f"{error}. See --help."
    hint = "Expected" if "Argument helptext:" in lines else "Perhaps you meant"
    return f"{error}. {hint} {' or '.join(options)}."


@contextlib.contextmanager
def errors_as_sentences(debug: bool = False) -> Iterator[None]:
    """A `UserError` inside ends the program with its sentence on standard error and code 2; Ctrl-C
    and a reader that has gone (`| head`) end it quietly. With `debug`, an error's traceback comes
    before its sentence."""
    try:
        yield
    except UserError as error:
        _end(str(error), debug)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes standard output once more at exit; nobody is there to read it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        # XLA's own error for memory, recognised by its words, for JAX may not be imported here.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _end(
            "this does not fit into memory; make the model or the batch smaller, or raise "
            "--training.accumulation.",
            debug,
        )


def _end(sentence: str, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)
