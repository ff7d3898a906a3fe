"""The command lines of the scripts, and how they report errors."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import tyro

from gptlite.config import Config, DataConfig, SamplingConfig
from gptlite.custom import with_custom
from gptlite.errors import UserError, require, told
from gptlite.machine.fields import MAX_INT32, Between, Seed, changed, check_fields, free
from gptlite.machine.files import check_folder_name
from gptlite.machine.names import CUSTOM_FIELDS, CustomBlock, split_options
from gptlite.machine.printed import printable
from gptlite.machine.processes import DistributedConfig
from gptlite.machine.progress import print_error, sentence_of
from gptlite.machine.stop import ends_on_ctrl_c
from gptlite.machine.text_files import read_text
from gptlite.presets import PRESETS
from gptlite.runs.find import find_run
from gptlite.runs.saved_config import load_config, with_corpus

A = TypeVar("A")

DEFAULT_PRESET = "quick"

PresetName = Annotated[
    Literal[tuple(PRESETS)],  # pyright: ignore[reportInvalidTypeForm] - one list of names
    tyro.conf.Positional,
    tyro.conf.arg(help="; ".join(f"{name}: {text}" for name, (text, _) in PRESETS.items())),
]
CustomFiles = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""Files of `--custom`."""


# Bytes of a prompt. A model reads the end of a long one only.
MAX_PROMPT = 2**22

# The fields of the model that `--init-from` leaves free.
MODEL_OPTIONS = [name for name in free(Config(), "weights") if name.startswith("model.")]

# A year.
MAX_MINUTES = 366 * 24 * 60

TRACKERS = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class LogConfig:
    """Where a run is shown while it trains, besides metrics.jsonl."""

    to: str = ""
    """Dashboards, separated by commas: tensorboard (files in the run's folder), wandb (Weights &
    Biases; offline with WANDB_MODE=offline) and trackio. Each needs its package: pip install
    "gptlite-jax[tensorboard]". They get losses, learning rate, gradient norm, speed and samples.
    One that fails is left out, and training goes on."""

    def __post_init__(self):
        check_fields("log.", self)
        wrong = [name for name in self.names if name not in TRACKERS]
        require(
            not wrong and len(set(self.names)) == len(self.names),
            f"log.to must be some of {', '.join(TRACKERS)}, each once and separated by commas, got "
            f"{self.to!r}.",
        )

    @property
    def names(self) -> list[str]:
        """The names of the dashboards."""
        return self.to.split(",") if self.to else []


@dataclass(frozen=True)
class TrainArguments:
    """Train a language model, with evaluations and samples.

    The options below start from PRESET. Those given after it change it."""

    preset: PresetName = DEFAULT_PRESET  # pyright: ignore[reportInvalidTypeForm]

    run: str | None = None
    """Name of the run: its folder is runs/NAME. Default: made from preset and time."""

    overwrite: bool = False
    """Replace the run of that name, if there is one."""

    resume: Annotated[
        str | None,
        tyro.conf.arg(
            help="Resume a run from its last checkpoint: its folder, or its name in runs/. Its "
            "settings are kept; only these may be given with it: "
            + ", ".join(f"--{name.replace('_', '-')}" for name in free(Config(), "resume"))
            + ", and --log.to. More steps extend a run. The corpus must be the same text; one that "
            "is not gptlite's own must be named again, because a run may come from a stranger."
        ),
    ] = None

    minutes: Annotated[float | None, Between(0.0, MAX_MINUTES, above=True)] = None
    """Train for so many minutes, to within 5 %, from the start of the command to its end. The
    number of steps is chosen by the speed of this machine. Without a preset, and without options
    for its size, the model is chosen, too, with its rates, batch and weight decay, and the loss
    that is expected is said before. None: for --training.steps."""

    init_from: Annotated[
        str | None,
        tyro.conf.arg(
            help="Start from the weights of a run, its folder or its name in runs/, or of "
            "hf:FOLDER or hf:NAME, a model in Hugging Face's format. Shape and tokenizer are then "
            "those of that model; of the model's options, only these may be given with it: "
            + ", ".join(f"--{name.replace('_', '-')}" for name in MODEL_OPTIONS)
            + " (the context length only if it is shorter)."
        ),
    ] = None

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. A run that was
    made with custom blocks is resumed, or begun from, only with their file. A field of the model
    may then name a class alone, as in --model.mlp SineMLP."""

    check_blocks: bool = True
    """Whether custom blocks are checked before a new run is trained: their parameters and shapes,
    and that no output depends on a later input."""

    debug: bool = False
    """Show where in the code an error came from."""

    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    log: LogConfig = field(default_factory=LogConfig)

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    began: Annotated[float, tyro.conf.Suppress] = field(default_factory=time.perf_counter)
    """When the command began, by `time.perf_counter`."""

    def __post_init__(self):
        check_fields("", self)


@dataclass(frozen=True)
class SampleArguments:
    """Generate text with a trained model.

    Only the generated text goes to standard output; a line `---` separates samples. Past the
    model's context length, the text continues from the last half of it."""

    prompt: str | None = None
    """The beginning of the text, which may also be given without --prompt, first. If it is longer
    than the model's context, the model reads its end. An empty one begins a new document, if the
    model has a token for that. Without --prompt and --prompt-file: read from standard input."""

    prompt_file: str | None = None
    """A file with the beginning of the text."""

    run: str | None = None
    """A run's folder, or its name in runs/; hf:FOLDER or hf:NAME for a model in Hugging Face's
    format, in a folder or on the hub. Default: the newest run."""

    weights: Literal["best", "last"] = "best"
    """Weights of the best evaluation, or of the last checkpoint."""

    max_new_tokens: Annotated[int, Between(1, MAX_INT32)] = 500
    """Tokens to generate."""

    num_samples: Annotated[int, Between(1, 100_000)] = 1
    """Texts to generate, together."""

    seed: Seed = 0
    """The same seed gives the same text."""

    debug: bool = False
    """Show where in the code an error came from."""

    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End a text before this string; may be given several times."""

    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(
        default_factory=SamplingConfig
    )

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. A run that was
    made with custom blocks is loaded only with their file."""

    def __post_init__(self):
        check_fields("", self)
        require(
            self.prompt is None or self.prompt_file is None,
            "Give the prompt with --prompt or with --prompt-file, not with both.",
        )
        require(all(self.stop), "--stop takes a text, got none.")


@dataclass(frozen=True)
class ServeArguments:
    """Serve a trained model over HTTP: a page to play with it and to look inside it, and the
    endpoints of OpenAI's API for completions.

    Open http://127.0.0.1:8000 in a browser. Clients of the API need the address
    http://127.0.0.1:8000/v1 and the name of the model, which is printed. Texts of many clients are
    generated together. SIGTERM or Ctrl-C ends the server: what is running has 10 seconds to
    finish."""

    run: str | None = None
    """A run's folder, or its name in runs/; hf:FOLDER or hf:NAME for a model in Hugging Face's
    format, in a folder or on the hub. Default: the newest run."""

    weights: Literal["best", "last"] = "best"
    """Weights of the best evaluation, or of the last checkpoint."""

    host: str = "127.0.0.1"
    """The address to listen at. Another one than this machine's own needs --api-key or
    --without-key."""

    port: Annotated[int, Between(0, 65_535)] = 8000
    """0: any that is free."""

    api_key: str | None = None
    """The key that clients must send. Default: the variable GPTLITE_API_KEY, which other users
    of this machine cannot see, or none."""

    without_key: bool = False
    """Let everyone who reaches --host use the server, without a key."""

    rows: Annotated[int, Between(1, 4096)] = 64
    """Texts that are generated together, at most; fewer, where memory is short."""

    queue: Annotated[int, Between(1, 1_000_000)] = 256
    """Texts that wait, at most. Then clients are told to come again later (status 429)."""

    allow_origin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A site, such as http://localhost:3000, whose scripts may use the server from a browser; may
    be given several times. *: any. Default: none."""

    debug: bool = False
    """Show where in the code an error came from."""

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. A run that was
    made with custom blocks is loaded only with their file."""

    def __post_init__(self):
        check_fields("", self)
        require(self.api_key != "", "api_key must have at least one character.")
        for origin in self.allow_origin:
            require(
                re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin) is not None,
                "allow_origin must be as browsers send it, such as http://localhost:3000, or * "
                f"for any, got {origin!r}.",
            )


@dataclass(frozen=True)
class CompareArguments:
    """Train variants of a model from several seeds each, and test which differences are real.

    Variants are judged by the choice text, the end of the training text, which none is trained on.
    They are paired by seed: the same seed reads the same batches in the same order. A variant that
    is decided gets no more seeds. All that is tried is kept in comparisons/NAME/ledger.jsonl, and
    counted there: one may look at any time, and add --vary and --seeds at any time, and a verdict
    still holds. The same command again trains only what is missing; what was edited since, a block
    or the package itself, is another variant. The table, a CSV file and a picture are written
    beside the ledger. What was chosen is then confirmed on the validation text:
    gptlite compare confirm NAME VARIANT (see gptlite compare confirm --help)."""

    base: Annotated[
        Literal[tuple(PRESETS)],  # pyright: ignore[reportInvalidTypeForm] - one list of names
        tyro.conf.arg(help="The preset that all variants start from; settings below change it."),
    ] = DEFAULT_PRESET

    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """SECTION.FIELD=VALUE,VALUE,...: a variant for each value, with all else as in the base; may be
    given several times. More settings may be joined to a value with +, as in
    model.mlp=gelu,swiglu+model.d_ff=168."""

    seeds: Annotated[int, Between(1, 10_000)] = 12
    """Seeds of each variant, at most: 0, 1, 2, ..."""

    minutes: Annotated[float | None, Between(0.0, above=True)] = None
    """Minutes for all that is to be trained now. None: as many as --seeds take."""

    equal: Literal["steps", "tokens", "flops", "parameters", "time"] = "steps"
    """What variants have in common with the base. tokens, flops, time: their steps are chosen so
    that they read as many tokens, spend as many floating-point operations, or train as long.
    parameters: their model.d_ff is chosen. time is measured by turns, and a difference that the
    error of that may make is none."""

    tune: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A number to choose for base and variants alike before they are compared, on the choice text,
    such as optimizer.learning_rate: from a quarter of its value to four times that, or as
    FIELD=LOW,HIGH; may be given twice, for two numbers together."""

    tune_points: Annotated[int, Between(2, 1_000)] = 7
    """Values that --tune tries for each of them, from two seeds."""

    again: bool = True
    """Whether the base is trained once more from other first parameters, to show what chance alone
    does."""

    name: str | None = None
    """The folder in comparisons/. Default: one for each preset and --data options."""

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. Its classes may
    then be named alone, as in --vary model.mlp=relu2,SineMLP."""

    check_blocks: bool = True
    """Whether custom blocks are checked before a new variant is trained: their parameters and
    shapes, and that no output depends on a later input."""

    early: bool = True
    """Whether a variant is stopped in the second half of its training when it is behind the base.
    It may lose one that would have caught up."""

    seeds_at_once: Annotated[int | None, Between(1, 10_000)] = None
    """Seeds that are trained at the same time, and after which one looks. None: 5, or the next
    number that all devices share evenly."""

    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print a line of JSON for each variant, and all else to standard error."""

    debug: bool = False
    """Show where in the code an error came from."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    def __post_init__(self):
        check_fields("", self)
        if self.name is not None:
            check_folder_name("--name", self.name)


@dataclass(frozen=True)
class ConfirmArguments:
    """Judge a variant of a comparison on the validation text.

    Base and variant are trained once more, from seeds that nothing was trained from before, and
    then judged by the validation text, which nothing was chosen by: by Student's paired t-test,
    once. The look and the verdict are written into the ledger. In a comparison, the first verdict
    is wrong with a probability of at most 2.5 %, the second of 0.8 %, all together of 5 %."""

    name: Annotated[str, tyro.conf.Positional]
    """The comparison: a folder in comparisons/."""

    variant: Annotated[str, tyro.conf.Positional]
    """The variant, as its table names it; or its checksum, if it was tried in several ways."""

    seeds: Annotated[int, Between(2, 1_000)] = 12
    """Seeds of base and variant."""

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. A variant with
    custom blocks is confirmed only with their file."""

    corpus: Annotated[str | None, tyro.conf.arg(name="data.corpus")] = None
    """The text, if it is not gptlite's own: a ledger may come from a stranger."""

    seeds_at_once: Annotated[int | None, Between(1, 10_000)] = None
    """Seeds that are trained at the same time. None: as many as fit into memory."""

    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the verdict as a line of JSON, and all else to standard error."""

    debug: bool = False
    """Show where in the code an error came from."""

    def __post_init__(self):
        check_fields("", self)
        check_folder_name("NAME", self.name)


@dataclass(frozen=True)
class ForecastArguments:
    """Say what a larger model will reach on a text before it is trained.

    Models of several sizes are trained for several lengths, from two seeds each, with settings that
    follow from size and length. What they reach tells the law of the text: the loss by parameters
    and tokens, and with it the best size for given compute. Then a forecast is sealed: the loss of
    a model beyond all of these, with an interval, in a file whose checksum is printed. gptlite
    forecast open NAME trains that model, and judges the forecast (see gptlite forecast open
    --help). All is kept in forecasts/NAME/ledger.jsonl; the same command again trains only what is
    missing, and with more --minutes goes on to larger models."""

    minutes: Annotated[float, Between(0.0, above=True)] = 30.0
    """Minutes for all models that the law is fitted to, those that were trained before included."""

    times: Annotated[float, Between(1.0, 10_000.0)] = 10.0
    """Compute of the model that is forecast, over that of the largest one before. With 10, to open
    the forecast takes about as long as --minutes."""

    name: str | None = None
    """The folder in forecasts/. Default: one for each choice of options."""

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. Its classes may
    then be named alone, as in --model.mlp SineMLP."""

    debug: bool = False
    """Show where in the code an error came from."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Config(data=DataConfig(validation_tokens=131_072))
    )

    def __post_init__(self):
        check_fields("", self)
        if self.name is not None:
            check_folder_name("--name", self.name)


@dataclass(frozen=True)
class OpenArguments:
    """Train the model of a sealed forecast, and judge the forecast.

    What it reaches is written into the ledger, whether the forecast was right or not. The same
    forecast is opened once."""

    name: Annotated[str, tyro.conf.Positional]
    """The forecast: a folder in forecasts/."""

    custom: CustomFiles = ()
    """A file with custom blocks, which may be executed; may be given several times. A forecast with
    custom blocks is opened only with their file."""

    corpus: Annotated[str | None, tyro.conf.arg(name="data.corpus")] = None
    """The text, if it is not gptlite's own: a ledger may come from a stranger."""

    debug: bool = False
    """Show where in the code an error came from."""

    def __post_init__(self):
        check_fields("", self)
        check_folder_name("NAME", self.name)


def parse_words(kind: Any, args: Sequence[str], **options: Any) -> Any:
    """`tyro.cli`. Its errors repeat what was typed, so control characters are parsed as escapes
    first.

    **Raises:** `UserError` if a word is no text, or names an option almost."""
    for word in args:
        # Python keeps bytes that are no text as halves of surrogate pairs.
        require(
            word == word.encode(errors="ignore").decode(),
            f"{printable(word)} on the command line is no text in "
            f"{sys.getfilesystemencoding()}, the encoding that Python found: with PYTHONUTF8=1 in "
            "the environment, it is UTF-8.",
        )
    safe = [printable(word) for word in args]
    if safe != list(args):
        # A function would be called.
        idle = functools.wraps(kind)(lambda **_: None) if inspect.isfunction(kind) else kind
        tyro.cli(idle, args=safe, **options)
    if not options.get("return_unknown_args"):
        _suggest(kind, args)
    return tyro.cli(kind, args=args, **options)


# Options by the names that others have for them.
OTHER_NAMES = {
    "--lr": "--optimizer.learning-rate",
    "--epochs": "--training.steps",
    "--max-steps": "--training.steps",
    "--batch": "--training.batch-size",
    "--block-size": "--model.context-length",
    "--dtype": "--training.compute-dtype",
    "--dataset": "--data.corpus",
    "--max-tokens": "--max-new-tokens",
    "--length": "--max-new-tokens",
    "--model": "--run",
    "--checkpoint": "--run",
}


def _suggest(kind: Any, args: Sequence[str]) -> None:
    """**Raises:** `UserError`, which names the option that was meant, if one of `args` is none, and
    is like one."""
    known = list(_options(kind))
    for word in args:
        option = word.partition("=")[0].replace("_", "-")
        plain = option.replace("--no-", "--").replace(".no-", ".")
        if not option.startswith("--") or plain in known or option == "--help":
            continue
        require(
            option != "--preset",
            "The preset comes first, without a name of its own, as in gptlite train laptop.",
        )
        meant = [name for name in known if name.lstrip("-").rpartition(".")[2] == option[2:]]
        meant = meant or [name for name in known if name == f"--{option.rpartition('.')[2]}"]
        meant = meant or [name for name in known if name == OTHER_NAMES.get(option)]
        meant = meant or difflib.get_close_matches(option, known, 1, 0.75)
        require(not meant, f"There is no option {option}: did you mean {' or '.join(meant)}?")


def _options(kind: Any, prefix: str = "--") -> Iterator[str]:
    """The names of the options of a command line."""
    for name, noted in get_type_hints(kind, include_extras=True).items():
        is_noted = get_origin(noted) is Annotated
        hint, *notes = (noted.__origin__, *noted.__metadata__) if is_noted else (noted,)
        if tyro.conf.Suppress in notes:
            continue
        # `config` and `sampling` have no name of their own, and others have another one.
        given = [note.name for note in notes if getattr(note, "name", None) is not None]
        option = f"{prefix}{given[0] if given else name.replace('_', '-')}"
        if dataclasses.is_dataclass(hint):
            yield from _options(hint, f"{option}." if option != prefix else prefix)
        elif option != "--preset":
            yield option


@dataclass(frozen=True)
class _First:
    """The options that decide the defaults of others, and are read before them."""

    resume: str | None = None
    init_from: str | None = None
    custom: CustomFiles = ()
    corpus: Annotated[str | None, tyro.conf.arg(name="data.corpus")] = None


def parse_train(argv: Sequence[str]) -> TrainArguments:
    """The command line of `gptlite train`. `argv` is without the program's name.

    **Raises:** `UserError` if a value is out of its bounds, or options do not go together;
    `SystemExit`, after a message on standard error, if there is no such option, and for `--help`.
    """
    arguments, preset = parse_config(TrainArguments, argv)
    if arguments.resume is None:
        require(
            arguments.preset == preset,
            f"The preset comes first: gptlite train {arguments.preset} ...",
        )
        steps = PRESETS[preset][1].training.steps
        require(
            arguments.minutes is None or arguments.config.training.steps == steps,
            "--minutes chooses the number of steps: leave --training.steps out, or --minutes.",
        )
        return arguments
    for value, option in (
        (arguments.run, "--run"),
        (arguments.overwrite, "--overwrite"),
        (arguments.minutes, "--minutes"),
        (arguments.preset != DEFAULT_PRESET, f"the preset {arguments.preset}"),
    ):
        require(
            not value, f"A run that is resumed keeps its name and settings: leave {option} out."
        )
    return arguments


def parse_config(
    kind: Any, argv: Sequence[str], *, resumes: bool = True, **options: Any
) -> tuple[Any, str]:
    """A command line of the form PRESET OPTIONS, and the preset that its options change, or that
    `--resume` (if there is one: `resumes`) and `--init-from` change before. `options`: of tyro.

    **Raises:** `UserError` if an option changes what the run that is resumed, or the model that is
    begun from, has settled.
    """
    first, _ = parse_words(_First, argv, add_help=False, return_unknown_args=True)
    resume = first.resume if resumes else None
    require(
        resume is None or first.init_from is None,
        "A run that is resumed keeps its weights: leave --init-from out.",
    )
    preset = argv[0] if argv and argv[0] in PRESETS else DEFAULT_PRESET
    config = PRESETS[preset][1]
    if resume is not None:
        rule = "A run that is resumed keeps its name and settings"
        require(argv[0] not in PRESETS, f"{rule}: leave the preset {argv[0]} out.")
        config = _resumed(resume, first)
    elif first.init_from is not None:
        config = _begun_from(config, first.init_from, first.custom)
    arguments = parse_words(kind, argv, default=kind(preset, config=config), **options)
    config = with_custom(arguments.config, first.custom)
    check_start(config, resume, first.init_from, first.custom)
    return dataclasses.replace(arguments, config=config), preset


def check_start(
    config: Config, resume: str | None, init_from: str | None, custom: Sequence[str]
) -> None:
    """**Raises:** `UserError` if a run with `config` cannot be `resume`d, or begun from the model
    `init_from`, because these have settled otherwise."""
    if resume is not None:
        classes = [getattr(config.model, name) for name in CUSTOM_FIELDS]
        sources = [*custom, *(x.block for x in classes if isinstance(x, CustomBlock))]
        saved = with_custom(load_config(find_run(resume) / "config.json"), sources, read=True)
        wrong = "; ".join(changed(saved, config, "resume"))
        require(not wrong, f"These may not change on --resume: {wrong}.")
    elif init_from is not None:
        source = _begun_from(config, init_from, custom)
        wrong = "; ".join(changed(source, config, "weights"))
        require(not wrong, f"These are set by the model {init_from}: {wrong}.")
        old, new = source.model.context_length, config.model.context_length
        fixed = split_options(source.model.positions)[0] == "learned"
        require(
            new == old or (new < old and not fixed),
            f"model.context_length must be {'' if fixed else 'at most '}{old}, that of "
            f"{init_from}, got {new}.",
        )


def settings(arguments: TrainArguments) -> dict[str, str]:
    """The settings that all processes of a run must have been given alike, by name. The corpus may
    lie in different places: its checksum is compared."""
    values = {
        name: str(getattr(arguments, name)) for name in ("run", "overwrite", "resume", "minutes")
    }
    for section, fields in vars(arguments.config).items():
        values |= {f"{section}.{name}": str(value) for name, value in vars(fields).items()}
    del values["data.corpus"]
    return values


def _resumed(name: str, first: _First) -> Config:
    """The config of the run that is resumed, with its custom blocks and its text as the command
    names them."""
    saved = load_config(find_run(name) / "config.json")
    return with_corpus(with_custom(saved, first.custom, read=True), first.corpus, "The run")


def _begun_from(preset: Config, name: str, custom: Sequence[str]) -> Config:
    """`preset` with the shape and the tokenizer of another model."""
    if name.startswith("hf:"):
        import_jax()
        from gptlite.hugging_face.folder import load_hf_config
        from gptlite.hugging_face.hub import find_folder

        model, tokenizer = load_hf_config(find_folder(name.removeprefix("hf:"))), name
    else:
        saved = with_custom(load_config(find_run(name) / "config.json"), custom, read=True)
        # Its adapters, if it has any, are a part of its matrices now.
        model, tokenizer = dataclasses.replace(saved.model, lora=None), saved.data.tokenizer
    return dataclasses.replace(
        preset,
        model=model,
        data=dataclasses.replace(preset.data, tokenizer=tokenizer),
        training=dataclasses.replace(preset.training, init_from=name),
    )


def parse_sample(argv: Sequence[str]) -> SampleArguments:
    """The command line of `gptlite sample`. `argv` is without the program's name.

    **Raises:** as `parse_train` does.
    """
    is_prompt = bool(argv) and not argv[0].startswith("-")
    return parse_words(SampleArguments, ["--prompt", *argv] if is_prompt else argv)


def read_prompt(arguments: SampleArguments) -> str:
    """The prompt that `arguments` say: from --prompt, --prompt-file or standard input.

    **Raises:** `UserError` if it cannot be read, is too long or is not UTF-8.
    """
    if arguments.prompt is not None:
        return arguments.prompt
    try:
        # Bytes, not text mode: line ends stay as they are.
        if arguments.prompt_file is not None:
            with Path(arguments.prompt_file).open("rb") as file:
                content = file.read(MAX_PROMPT + 1)
        elif sys.stdin is None:
            return ""
        else:
            if sys.stdin.isatty():
                print("type the prompt, then Ctrl-D", file=sys.stderr)
            content = sys.stdin.buffer.read(MAX_PROMPT + 1)
        require(len(content) <= MAX_PROMPT, f"The prompt has more than {MAX_PROMPT:,} bytes.")
    except OSError as error:
        source = arguments.prompt_file or "standard input"
        raise UserError(f"The prompt cannot be read from {source}: {error}.") from error
    return "".join(read_text(io.BytesIO(content), arguments.prompt_file or "The prompt"))


def parse_serve(argv: Sequence[str]) -> ServeArguments:
    """The command line of `gptlite serve`. `argv` is without the program's name."""
    return parse_words(ServeArguments, argv)


def parse_forecast(argv: Sequence[str]) -> OpenArguments | ForecastArguments:
    """The command line of `gptlite forecast`, or of `gptlite forecast open`."""
    if argv[:1] == ["open"]:
        return parse_words(OpenArguments, argv[1:], prog="gptlite forecast open")
    for word in argv:
        option = word.partition("=")[0].replace("_", "-")
        require(
            not option.startswith(("--training.init-from", "--model.lora", "--mesh")),
            f"A forecast is of whole models, each trained on one device: leave {option} out.",
        )
    arguments = parse_words(ForecastArguments, argv)
    return dataclasses.replace(arguments, config=with_custom(arguments.config, arguments.custom))


@dataclass(frozen=True)
class _BaseOnly:
    base: str = DEFAULT_PRESET


def parse_comparison(
    argv: Sequence[str],
) -> ConfirmArguments | tuple[CompareArguments, dict[str, Config]]:
    """The command line of `gptlite compare`, or of `gptlite compare confirm`."""
    if argv[:1] == ["confirm"]:
        return parse_words(ConfirmArguments, argv[1:], prog="gptlite compare confirm")
    return parse_compare(argv)


def parse_compare(argv: Sequence[str]) -> tuple[CompareArguments, dict[str, Config]]:
    """The command line of `gptlite compare`, and the variants that it asks for by name, the base
    first. `argv` is without the program's name."""
    for word in argv:
        option = word.partition("=")[0].replace("_", "-")
        require(
            not option.startswith(("--init-from", "--training.init-from", "--model.lora")),
            f"A comparison trains whole models from the beginning: leave {option} out.",
        )
    first, _ = parse_words(_BaseOnly, argv, add_help=False, return_unknown_args=True)
    base = first.base if first.base in PRESETS else DEFAULT_PRESET
    default: Any = CompareArguments(base, config=PRESETS[base][1])  # pyright: ignore[reportArgumentType]
    arguments = parse_words(CompareArguments, argv, default=default)
    require(
        arguments.config.training.seed == PRESETS[base][1].training.seed,
        "The seeds of a comparison are 0, 1, 2, ...: --seeds says how many.",
    )
    require(
        arguments.config.mesh == PRESETS[base][1].mesh,
        "A comparison trains each seed on one device: leave --mesh out.",
    )
    base_config = with_custom(arguments.config, arguments.custom)
    variants = {f"base ({arguments.base})": base_config}
    knobs = [_field_name(knob) for knob in arguments.tune]
    require(
        len(set(knobs)) == len(knobs) <= 2,
        f"--tune chooses one number, or two together, got {', '.join(knobs)}.",
    )
    for vary in arguments.vary:
        field_name, equals, values = vary.partition("=")
        is_complete = bool(equals and values)
        require(is_complete, f"--vary takes SECTION.FIELD=VALUE,VALUE,..., got {vary!r}.")
        for value in values.split(","):
            settings = re.split(r"\+(?=\w+\.[\w-]+=)", f"{field_name}={value}")
            names = [_field_name(setting) for setting in settings]
            tuned = set(knobs) & set(names)
            require(not tuned, f"--tune chooses {', '.join(tuned)}: leave it out of --vary.")
            chosen = CHOSEN.get(arguments.equal)
            require(
                chosen not in names,
                f"--equal {arguments.equal} chooses {chosen} for each variant: leave it out of "
                "--vary.",
            )
            config = with_custom(_changed(arguments.config, settings), arguments.custom)
            if config not in variants.values():
                variants[" ".join(s.removeprefix("model.") for s in settings)] = config
    require(
        len(variants) > 1,
        "There is nothing to compare: give --vary SECTION.FIELD=VALUE,VALUE,... with a value "
        "that differs from the base's.",
    )
    return arguments, variants


# What is chosen for a variant that is made equal to the base.
CHOSEN = {
    "tokens": "training.steps",
    "flops": "training.steps",
    "time": "training.steps",
    "parameters": "model.d_ff",
}


def _field_name(setting: str) -> str:
    return setting.partition("=")[0].strip().replace("-", "_")


def _changed(config: Config, settings: Sequence[str]) -> Config:
    """`config` with each of `settings`, `SECTION.FIELD=VALUE`."""
    argv = []
    for setting in settings:
        name, value = _field_name(setting), setting.partition("=")[2]
        require(
            name.split(".")[0] in ("model", "optimizer", "training")
            and name not in ("training.seed", "training.init_from", "model.lora"),
            "--vary takes fields of model, optimizer and training (except the seed, which --seeds "
            "varies, and init_from and lora, because models are trained from the beginning), got "
            f"{name!r}.",
        )
        is_bool = value.lower() in ("true", "false")
        argv += [f"--{name}", value.capitalize() if is_bool else value]
    return parse_words(Config, argv, default=config, config=(tyro.conf.FlagConversionOff,))


def run_script(main: Callable[[A], None], parse: Callable[[Sequence[str]], A]) -> None:
    """A script: `main(parse(words))`, with the words of its command line. How it ends with an
    error: see `exit_on_error`."""
    with exit_on_error(debug="--debug" in sys.argv):
        arguments = parse(sys.argv[1:])
        import_jax()
        main(arguments)


def import_jax() -> None:
    """**Raises:** `UserError` if JAX or Equinox refuses one of its own environment variables."""
    with told("JAX cannot be used"):
        import jax as jax
    # With it, Equinox compiles nothing ahead.
    on_error = os.environ.get("EQX_ON_ERROR", "raise")
    require(on_error != "breakpoint", "EQX_ON_ERROR must be raise, nan or off, got breakpoint.")
    with told("Equinox cannot be used"):
        import equinox as equinox


@contextlib.contextmanager
def exit_on_error(debug: bool = False) -> Iterator[None]:
    """A `UserError` inside ends the program with its sentence on standard error and code 2, and so
    does what the system refuses, such as to write to a full disk. A closed pipe (`| head`) ends it
    quietly, and so does Ctrl-C, at once, unless what is inside has a handler of its own: as an
    exception, it would be lost in callbacks of JAX's. With `debug`, an error's traceback comes
    before its sentence."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # closed by the shell, as in `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            # Windows writes to a file in an encoding of few characters: others become escapes.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with ends_on_ctrl_c():
                yield
        finally:
            sys.stdout.flush()  # here, where it can still be said that it fails
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        if isinstance(error, OSError):
            _drop_output()
        if debug:
            print(printable(traceback.format_exc()), end="", file=sys.stderr)
        print_error(sentence)
        sys.exit(2)


def _drop_output() -> None:
    """Python writes what is left in standard output at its exit. Where that failed before, it is to
    go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # no file, in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
