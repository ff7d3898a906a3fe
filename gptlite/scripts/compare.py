"""Compare variants of a model over several seeds:
`python compare.py --base laptop --vary model.norm=rms,layer,dyt`."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gptlite.cli import CompareArguments, ConfirmArguments, parse_comparison, run_script
from gptlite.config import Config, DataConfig
from gptlite.errors import UserError, require

if TYPE_CHECKING:
    from gptlite.research.comparison import Comparison
    from gptlite.research.results import Result

FOLDER = Path("comparisons")


def main() -> None:
    run_script(compare, parse_comparison)


def compare(arguments: ConfirmArguments | tuple[CompareArguments, dict[str, Config]]) -> None:
    if isinstance(arguments, ConfirmArguments):
        _confirm(arguments)
    else:
        compare_variants(*arguments)


def compare_variants(
    arguments: CompareArguments, variants: dict[str, Config]
) -> "dict[str, Result]":
    """`gptlite compare`, which gives the results of what it was to compare, by name."""
    # Imported here, because --help should not wait for JAX.
    from gptlite.machine.runtime import set_up_jax
    from gptlite.research.before_training import check_custom
    from gptlite.research.comparison import default_name
    from gptlite.research.conduct import Clock, NotJudgedError, conduct
    from gptlite.research.opening import loaded
    from gptlite.research.report import records
    from gptlite.research.results import AGAIN
    from gptlite.research.tune import parse_knob, tune

    set_up_jax(min(arguments.config.training.cpu_devices, arguments.seeds))
    variants = {name: loaded(config) for name, config in variants.items()}
    base = next(iter(variants.values()))
    knobs = [parse_knob(text, base) for text in arguments.tune]
    folder = FOLDER / (arguments.name or default_name(arguments.base, base))
    with _printer(arguments.as_json) as print_line:
        with opened(folder, base.data, variants.values()) as comparison:
            # Tuning has speeds of its own.
            tuning, clock = Clock(arguments.minutes), Clock(arguments.minutes)
            equal = arguments.equal
            # A mistake in a variant is found before the first one is trained.
            variants = comparison.made_equal(variants, equal)
            if arguments.check_blocks:
                for model in dict.fromkeys(config.model for config in variants.values()):
                    check_custom(model)
            twins = {}
            if knobs:
                points = arguments.tune_points
                variants, twins = tune(comparison, variants, knobs, points, equal, tuning)
            comparison.enter(variants, equal, again=arguments.again, twins=twins)
            at_once = arguments.seeds_at_once
            failed = conduct(comparison, arguments.seeds, at_once, clock, early=arguments.early)
            _write(folder, comparison)
        for record in records(comparison.results()):
            print_line(json.dumps(record))
        broken = [name for name in failed if name in comparison.judged]
        require(not broken, f"The training of {', '.join(broken)} failed: see above.")
        if set(failed) - {AGAIN}:
            raise NotJudgedError(f"The training of {', '.join(failed)} failed: see above.")
    return {name: comparison.result(name) for name in comparison.names}


def _confirm(arguments: ConfirmArguments) -> None:
    from gptlite.machine.progress import log
    from gptlite.machine.runtime import set_up_jax
    from gptlite.research.confirm import enter_one, recalled, train_and_confirm
    from gptlite.research.ledger import Ledger
    from gptlite.research.opening import loaded
    from gptlite.research.report import confirmation

    folder = FOLDER / arguments.name
    path = folder / "ledger.jsonl"
    require(path.exists(), f"There is no comparison {folder}: there is no file {path}.")
    ledger, name, custom = Ledger(path), arguments.variant, arguments.custom

    def ready(config: Config) -> Config:
        set_up_jax(min(config.training.cpu_devices, arguments.seeds))
        return loaded(config)

    candidates = recalled(ledger, name, custom, arguments.corpus, ready)
    _, base = candidates[0].base
    configs = [config for one in candidates for config in one.configs]
    with _printer(arguments.as_json) as print_line:
        with opened(folder, base.data, configs) as comparison:
            variant = enter_one(comparison, candidates)
            seeds, at_once = arguments.seeds, arguments.seeds_at_once
            begun, confirmed = train_and_confirm(comparison, variant.name, seeds, at_once)
        names = [comparison.names[0], variant.name]
        record, sentence = confirmation(names, begun, confirmed)
        log(f"\n{sentence}")
        print_line(json.dumps(record))


@contextlib.contextmanager
def _printer(as_json: bool) -> Iterator[Callable[[str], None]]:
    """What prints a line of JSON, or nothing if that was not asked for. If it was, all else goes to
    standard error."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr if as_json else stdout):
        yield lambda line: print(line, file=stdout) if as_json else None


@contextlib.contextmanager
def opened(folder: Path, data: DataConfig, configs: Iterable[Config]) -> "Iterator[Comparison]":
    """A comparison, which no other process runs meanwhile, on one text for all of `configs`."""
    from gptlite.research.comparison import Comparison
    from gptlite.research.opening import held

    with held(folder, data, configs) as (tokenizer, split):
        yield Comparison(folder, tokenizer, split)


def _write(folder: Path, comparison: "Comparison") -> None:
    """The table, which is printed, the CSV file and the picture."""
    from gptlite.machine.files import write_atomically
    from gptlite.machine.progress import log
    from gptlite.research import plots
    from gptlite.research.report import table, to_csv
    from gptlite.runs.plots import save_picture

    results = comparison.results()
    shown = table(results, comparison.tried)
    try:
        write_atomically(folder / "table.csv", to_csv(results))
        write_atomically(folder / "table.txt", shown + "\n")
        written = "table.txt and table.csv are"
        try:
            require(any(result.curves for result in results), "nothing was trained to its end.")
            save_picture(plots.comparison(results), folder / "comparison.png")
            written = "table.txt, table.csv and comparison.png are"
        except UserError as error:
            log(f"comparison.png is not drawn: {error}")
    except OSError as error:
        log(f"{shown}\n")
        reason = error.strerror or error
        raise UserError(f"A file of {folder} cannot be written: {reason}.") from error
    log(f"\n{shown}\n\n{written} in {folder}, with the ledger")
