"""Try an idea: check a block, tune it, compare it, write it down, in one command.

    python -m gptlite.research.lab try my_blocks.py:Mine --minutes 5

It ends with 0 if the block is better than the base, with 1 if no such difference was found, with 2
if it is broken (it breaks a law of `gptlite check-block`, cannot be built or trained, or diverges)
or the command is, and with 3 if there is no verdict, for want of time or because another process
uses the laboratory.
"""

import contextlib
import math
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from gptlite.cli import exit_on_error, import_jax, parse_compare, parse_words
from gptlite.errors import require
from gptlite.machine.fields import Between, check_fields
from gptlite.machine.files import check_folder_name
from gptlite.machine.progress import log, print_error

BETTER, NOT_BETTER, BROKEN, NOT_JUDGED = 0, 1, 2, 3

# The share of the time that is planned.
PLANNED = 0.9
# The fewest steps that are worth a try, and the evaluations of a run.
FEWEST, EVALUATIONS = 50, 5
# The groups of seeds that are planned: a later variant may need two to be judged, and so the base
# and the base again a second one.
GROUPS = 4


@dataclass(frozen=True)
class TryArguments:
    """Check a block, tune it, compare it with the base, and write all of it into a ledger.

    Ends with 0: better, 1: no such difference was found, 2: broken, 3: no verdict, for want of
    time or because another process uses the laboratory. The first try of a laboratory measures the
    machine, chooses the number of steps that fits into the minutes, and trains the base; later ones
    train as many steps, and the base only where more seeds are needed. All options of gptlite
    compare but --vary may follow, such as --tune optimizer.learning_rate, --equal time and --json.
    """

    variant: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FILE.py:CLASS[:rank=4]|SECTION.FIELD=VALUE"),
    ]
    """A class of a file, with its options; or a setting."""

    minutes: Annotated[float, Between(0.0, above=True)] = 10.0
    """Minutes of the whole."""

    part: Literal["auto", "attention", "mlp", "norm", "block"] = "auto"
    """What a class takes the place of. auto: attention if it has a cache, else mlp."""

    name: str = "lab"
    """The laboratory: its ledger is in comparisons/NAME/."""

    def __post_init__(self):
        check_fields("", self)
        check_folder_name("--name", self.name)


def parse_try(argv: Sequence[str]) -> tuple[TryArguments, list[str]]:
    """The command line of `try`, and the options that are those of `gptlite compare`.

    **Raises:** `UserError` if it names several variants.
    """
    prog = "python -m gptlite.research.lab try"
    arguments, rest = parse_words(TryArguments, argv, return_unknown_args=True, prog=prog)
    is_one = "," not in arguments.variant
    is_one &= not any(word.partition("=")[0] == "--vary" for word in rest)
    require(is_one, "A try is of one variant: leave --vary and commas out.")
    return arguments, rest


def try_variant(argv: Sequence[str]) -> int:
    """The command `try`, with its words; gives the code that it ends with."""
    arguments, rest = parse_try(argv)
    import_jax()
    # Imported here, because --help should not wait for JAX.
    from gptlite.research.conduct import NotJudgedError

    try:
        return _judged(arguments, rest)
    except NotJudgedError as error:
        print_error(str(error))
        return NOT_JUDGED


def _judged(arguments: TryArguments, rest: list[str]) -> int:
    from gptlite.research.check_block import CheckError
    from gptlite.research.conduct import NotJudgedError
    from gptlite.research.report import words
    from gptlite.research.statistics import FAILED, NOT_TRAINED, TOO_FEW
    from gptlite.scripts.compare import compare_variants

    began = time.perf_counter()
    # Lines of JSON are alone on standard output.
    with contextlib.redirect_stdout(sys.stderr if "--json" in rest else sys.stdout):
        try:
            setting = _setting(arguments)
        except CheckError as error:
            log(str(error))
            return BROKEN
        given = ["--vary", setting, "--name", arguments.name, *rest]
        minutes = arguments.minutes - (time.perf_counter() - began) / 60
        if not any(word.replace("_", "-").startswith("--training.steps") for word in rest):
            steps, evaluated = _steps(arguments.name, given, minutes)
            given += ["--training.steps", str(steps)]
            if not any(word.replace("_", "-").startswith("--training.eval-every") for word in rest):
                given += ["--training.eval-every", str(evaluated)]
    minutes = arguments.minutes - (time.perf_counter() - began) / 60
    compared, variants = parse_compare([*given, "--minutes", str(max(minutes, 1e-3))])
    _, name = variants
    result = compare_variants(compared, variants)[name]
    said = words(result)
    if said in (NOT_TRAINED, FAILED, TOO_FEW) or said.startswith("the base"):
        raise NotJudgedError(f"There is no verdict on {name}: {said}.")
    if said.startswith("diverged"):
        return BROKEN
    return BETTER if said == "better" else NOT_BETTER


def _setting(arguments: TryArguments) -> str:
    """What is varied: a setting, or a block, which is checked.

    **Raises:** `CheckError` if it breaks a law; `UserError` if it cannot be loaded.
    """
    from gptlite.config import ModelConfig
    from gptlite.custom import load_custom
    from gptlite.machine.names import is_custom, split_options
    from gptlite.research.check_block import check_block
    from gptlite.research.code import code_of
    from gptlite.scripts.check_block import load_block

    variant = arguments.variant
    if re.match(r"(model|optimizer|training)\.[\w-]+=", variant):
        return variant
    require(
        is_custom(split_options(variant)[0]),
        "A try is of a block, FILE.py:CLASS, or of a setting of model, optimizer or training, such "
        f"as model.norm=layer, got {variant!r}.",
    )
    loaded, options = load_block(variant, ())
    code_of(load_custom(ModelConfig(mlp=variant)))  # before its files can be edited
    report = check_block(loaded, options=options)
    log(str(report))
    part = {"layer": "mlp", "block": "attention"}.get(report.kind)
    part = part if arguments.part == "auto" else arguments.part
    require(part is not None, f"{variant} is a {report.kind}: --part says what it replaces.")
    return f"model.{part}={variant}"


def _steps(name: str, given: Sequence[str], minutes: float) -> tuple[int, int]:
    """The steps, and those from one evaluation to the next: of the base in the ledger, or those
    that fit. Base, base again and variant are trained from one group of seeds each, later variants
    from two, and with --tune base and variant from two seeds for each point.

    **Raises:** `NotJudgedError` if too few fit.
    """
    import jax

    from gptlite.machine.runtime import set_up_jax
    from gptlite.research.conduct import NotJudgedError, group_size
    from gptlite.research.equal import tokens_per_step
    from gptlite.research.opening import loaded
    from gptlite.research.tune import SEEDS
    from gptlite.scripts.compare import FOLDER, opened

    compared, variants = parse_compare(given)
    base = next(iter(variants.values()))
    set_up_jax(base.training.cpu_devices)
    base = loaded(base)
    with opened(FOLDER / name, base.data, [base]) as comparison:
        if (before := comparison.like_before(base)) is not None:
            return before.steps, before.eval_every
        size, asked = group_size(jax.device_count()), compared.seeds_at_once
        size = max(size, min(asked or size, compared.seeds))
        start, of_step = comparison.seconds_of(base, size, asked or size)
        choice_tokens = comparison.choice_tokens
    points = compared.tune_points if compared.tune else 0
    # Seeds of all devices take as long as that of one.
    devices = jax.device_count()
    of_point = math.ceil(len(SEEDS) / devices) / math.ceil(size / devices)
    programs, groups = GROUPS + 2 * points, GROUPS + 2 * points * of_point
    # An evaluation has no backward pass.
    evaluating = EVALUATIONS * choice_tokens / tokens_per_step(base) / 3 * of_step
    before = programs * start + groups * evaluating
    steps = int((60 * minutes * PLANNED - before) / (groups * of_step))
    needed = (before + FEWEST * groups * of_step) / PLANNED / 60
    if steps < FEWEST:
        raise NotJudgedError(
            f"{minutes:.1f} minutes are too short for a try here: {FEWEST} steps would take "
            f"{needed:.1f}."
        )
    digits = 10 ** max(0, len(str(steps)) - 2)
    steps -= steps % digits
    log(f"{steps} steps fit: {of_step:.3f} s for a step of {size} seeds, here and now")
    return steps, max(1, steps // EVALUATIONS)


COMMANDS = {"try": try_variant}


def main() -> None:
    code = BROKEN
    try:
        with exit_on_error(debug="--debug" in sys.argv):
            word, *argv = sys.argv[1:] or ["--help"]
            if word not in COMMANDS:
                print(__doc__)
                require(word in ("-h", "--help"), f"There is no command {word}: there is try.")
            code = COMMANDS[word](argv) if word in COMMANDS else 0
    except Exception:
        traceback.print_exc()
    sys.exit(code)


if __name__ == "__main__":
    main()
