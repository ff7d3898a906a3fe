"""Try an idea: check a block, tune it, compare it, write it down, in one command.

    python -m gptlite.research.lab try my_blocks.py:Mine --minutes 5

It ends with 0 if the block is better than the base, with 1 if no such difference was found, and
with 2 if it is broken: it breaks a law of `gptlite check-block`, cannot be built, or diverges.
"""

import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from gptlite.cli import exit_on_error, import_jax, parse_compare, parse_words
from gptlite.config import Config
from gptlite.errors import require
from gptlite.machine.fields import Between, check_fields
from gptlite.machine.files import check_folder_name
from gptlite.machine.progress import log

BETTER, NOT_BETTER, BROKEN = 0, 1, 2

# The share of the time that is planned.
PLANNED = 0.9
# The fewest steps that are worth a try.
FEWEST = 50


@dataclass(frozen=True)
class TryArguments:
    """Check a block, tune it, compare it with the base, and write all of it into a ledger.

    Ends with 0: better, 1: no such difference was found, 2: broken. The first try of a laboratory
    measures the machine, chooses the number of steps that fits into the minutes, and trains the
    base; later ones train as many steps, and the base no more. All options of gptlite compare may
    follow, such as --tune optimizer.learning_rate, --equal time and --json."""

    block: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:CLASS[:rank=4]")]
    """The file and the class, with the options of the class."""

    minutes: Annotated[float, Between(0.0, above=True)] = 10.0
    """Minutes of the whole."""

    part: Literal["auto", "attention", "mlp", "norm", "block"] = "auto"
    """What the block takes the place of. auto: attention if it has a cache, else mlp."""

    name: str = "lab"
    """The laboratory: its ledger is in comparisons/NAME/."""

    def __post_init__(self):
        check_fields("", self)
        check_folder_name("--name", self.name)


def parse_try(argv: Sequence[str]) -> tuple[TryArguments, list[str]]:
    """The command line of `try`, and the options that are those of `gptlite compare`."""
    prog = "python -m gptlite.research.lab try"
    return parse_words(TryArguments, argv, return_unknown_args=True, prog=prog)


def try_block(argv: Sequence[str]) -> int:
    """The command `try`, with its words; gives the code that it ends with."""
    arguments, rest = parse_try(argv)
    import_jax()
    # Imported here, because --help should not wait for JAX.
    from gptlite.research.check_block import CheckError, check_block
    from gptlite.research.report import words
    from gptlite.scripts.check_block import load_block
    from gptlite.scripts.compare import compare_variants

    # Lines of JSON are alone on standard output.
    out = sys.stderr if "--json" in rest else sys.stdout
    loaded, options = load_block(arguments.block, ())
    began = time.perf_counter()
    try:
        report = check_block(loaded, options=options)
    except CheckError as error:
        log(str(error), out)
        return BROKEN
    log(str(report), out)
    part = {"layer": "mlp", "block": "attention"}.get(report.kind)
    part = part if arguments.part == "auto" else arguments.part
    require(
        part is not None, f"{arguments.block} is a {report.kind}: --part says what it replaces."
    )
    given = ["--vary", f"model.{part}={arguments.block}", "--name", arguments.name, *rest]
    compared, variants = parse_compare(given)
    minutes = arguments.minutes - (time.perf_counter() - began) / 60
    if not any(word.replace("_", "-").startswith("--training.steps") for word in rest):
        base, *_ = variants.values()
        points = compared.tune_points if compared.tune else 0
        with contextlib.redirect_stdout(out):
            steps = _steps(arguments.name, base, minutes, points)
        given += ["--training.steps", str(steps), "--training.eval-every", str(max(1, steps // 5))]
        minutes = arguments.minutes - (time.perf_counter() - began) / 60
    given += ["--minutes", str(max(minutes, 1e-3))]
    compared, variants = parse_compare(given)
    _, name = variants
    (result,) = (x for x in compare_variants(compared, variants) if x.name == name)
    said = words(result)
    if "diverged" in said:
        return BROKEN
    return BETTER if said == "better" else NOT_BETTER


def _steps(name: str, base: Config, minutes: float, points: int) -> int:
    """The steps of the base in the ledger, or those that fit: base, base again and variant are
    trained from one group of seeds each, and base and variant from two seeds for each of `points`.

    **Raises:** `UserError` if too few fit.
    """
    import jax

    from gptlite.machine.runtime import set_up_jax
    from gptlite.research.conduct import group_size
    from gptlite.research.tune import SEEDS
    from gptlite.scripts.compare import FOLDER, loaded, opened

    set_up_jax(base.training.cpu_devices)
    base = loaded(base)
    with opened(FOLDER / name, base.data, [base]) as comparison:
        if (steps := comparison.steps_of_base(base)) is not None:
            return steps
        size = group_size(jax.device_count())
        before, of_step = comparison.seconds_of(base, size)
    programs, groups = 3 + 2 * points, 3 + 2 * points * len(SEEDS) / size
    seconds = 60 * minutes * PLANNED - programs * before
    steps = int(seconds / (groups * of_step))
    needed = (programs * before + FEWEST * groups * of_step) / PLANNED / 60
    require(
        steps >= FEWEST,
        f"{minutes:.1f} minutes are too short for a try here: {FEWEST} steps would take "
        f"{needed:.1f}.",
    )
    digits = 10 ** max(0, len(str(steps)) - 2)
    steps -= steps % digits
    log(f"{steps} steps fit: {of_step:.3f} s for a step of {size} seeds, here and now")
    return steps


COMMANDS = {"try": try_block}


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
