"""Say what a larger model will reach before it is trained:
`python forecast.py --minutes 30`, then `python forecast.py open NAME`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gptlite.cli import ForecastArguments, OpenArguments, parse_forecast, run_script
from gptlite.errors import UserError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gptlite.planning.ladder import Ladder

FOLDER = Path("forecasts")


def main() -> None:
    run_script(forecast, parse_forecast)


def forecast(arguments: ForecastArguments | OpenArguments) -> None:
    if isinstance(arguments, OpenArguments):
        _open(arguments)
    else:
        _seal(arguments)


def _seal(arguments: ForecastArguments) -> None:
    # Imported here, because --help should not wait for JAX.
    from gptlite.machine.progress import log
    from gptlite.machine.runtime import set_up_jax
    from gptlite.planning.ladder import SEEDS, Ladder, default_name
    from gptlite.planning.plots import picture
    from gptlite.planning.recipe import check_free
    from gptlite.planning.report import sizes, told
    from gptlite.research.before_training import check_custom
    from gptlite.research.opening import held, loaded

    set_up_jax(min(arguments.config.training.cpu_devices, len(SEEDS)))
    config = loaded(arguments.config)
    check_free(config)
    check_custom(config.model)
    folder = FOLDER / (arguments.name or default_name(config))
    with held(folder, config.data, [config], "forecast") as (tokenizer, split):
        ladder = Ladder(folder, config, tokenizer, split)
        waiting = ladder.journal.sealed
        if waiting is None:
            _train(ladder, 60 * arguments.minutes)
            laws = ladder.laws()
            table = sizes(ladder, laws)
            log(f"{table}\n")
            waiting, checksum = ladder.seal(laws, arguments.times)
            _write(folder, table, lambda: picture(ladder, laws, waiting))
            log(f"sealed in {ladder.journal.path}, whose checksum is now {checksum}")
        log(told(ladder, waiting, folder.name))


def _write(folder: Path, table: str, draw: "Callable[[], Figure]") -> None:
    """The table as a file, and the picture."""
    from gptlite.machine.files import write_atomically
    from gptlite.machine.progress import log
    from gptlite.runs.plots import save_picture

    try:
        write_atomically(folder / "table.txt", f"{table}\n")
        save_picture(draw(), folder / "forecast.png")
    except UserError as error:
        log(f"forecast.png is not drawn: {error}")
    except OSError as error:
        raise UserError(
            f"A file of {folder} cannot be written: {error.strerror or error}."
        ) from error


def _train(ladder: "Ladder", seconds: float) -> None:
    from gptlite.machine.progress import log
    from gptlite.research.conduct import show

    for rung in ladder.missing(seconds):
        name = f"{rung.n_layers} x {rung.d_model}, {rung.tokens:,} tokens"
        show(name, ladder.train(rung), 2, "validation")
    log("")


def _open(arguments: OpenArguments) -> None:
    from gptlite.machine.progress import log
    from gptlite.machine.runtime import set_up_jax
    from gptlite.planning.journal import ForecastJournal
    from gptlite.planning.ladder import SEEDS, SHAPES, Ladder
    from gptlite.planning.recipe import Rung
    from gptlite.research.conduct import show
    from gptlite.research.opening import held, loaded
    from gptlite.runs.saved_config import with_corpus

    folder = FOLDER / arguments.name
    path = folder / "ledger.jsonl"
    require(path.exists(), f"There is no forecast {folder}: there is no file {path}.")
    journal = ForecastJournal(path)
    config = with_corpus(
        journal.config(arguments.custom), arguments.corpus, f"The forecast {folder}"
    )
    sealed = journal.sealed
    require(sealed is not None, f"{folder} has no sealed forecast: gptlite forecast seals one.")
    assert sealed is not None
    shape = sealed.n_layers, sealed.d_model
    known = f"no model of this version has {shape[0]} layers of width {shape[1]}"
    require(shape in SHAPES, f"{path} cannot be opened: {known}.")
    set_up_jax(min(config.training.cpu_devices, len(SEEDS)))
    config = loaded(config)
    with held(folder, config.data, [config], "forecast") as (tokenizer, split):
        ladder = Ladder(folder, config, tokenizer, split)
        rung = Rung(sealed.n_layers, sealed.d_model, sealed.asked)
        if ladder.journal.trained(*dataclasses.astuple(rung)) is None:
            log(f"this takes about {ladder.seconds_of(rung) / 60:.0f} min")
            training = ladder.train(rung, sealed.seeds)
            show("the sealed model", training, len(sealed.seeds), "validation")
        judged = ladder.judge(sealed)
    error = 100 * (judged.loss / sealed.loss - 1)
    log(
        f"\nforecast {sealed.loss:.4f} ({sealed.low:.4f} to {sealed.high:.4f}), reached "
        f"{judged.loss:.4f}, {abs(error):.2f} % {'above' if error > 0 else 'below'} it: "
        f"{'inside' if judged.is_inside else 'OUTSIDE'} the interval"
    )
