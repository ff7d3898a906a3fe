"""Compare variants of a model over several seeds:
`python compare.py --base laptop --vary model.norm=rms,layer,dyt --seeds 5`."""

import dataclasses
import shlex
import time
from pathlib import Path

from gptlite.cli import CompareArguments, parse_compare, run_script
from gptlite.config import Config
from gptlite.errors import UserError

FOLDER = Path("comparisons")


def main() -> None:
    run_script(compare, parse_compare)


def compare(parsed: tuple[CompareArguments, dict[str, Config]]) -> None:
    arguments, variants = parsed
    # Imported here, because --help should not wait for JAX.
    from gptlite.custom import custom_arguments, load_custom
    from gptlite.machine.files import lock, write_atomically
    from gptlite.machine.progress import log, progress_bar
    from gptlite.machine.runtime import set_up_jax, with_chosen_dtype
    from gptlite.research import plots
    from gptlite.research.comparison import Comparison, default_name
    from gptlite.research.report import table, to_csv
    from gptlite.runs.corpora import load_corpus, require_documents
    from gptlite.runs.model import separator_of
    from gptlite.runs.plots import save_picture
    from gptlite.runs.tokenizers import make_tokenizer
    from gptlite.text.tokens import split_corpus

    data = arguments.config.data
    seeds = list(range(arguments.seeds))
    set_up_jax(min(arguments.config.training.cpu_devices, len(seeds)))

    variants = {
        name: with_chosen_dtype(dataclasses.replace(config, model=load_custom(config.model)))
        for name, config in variants.items()
    }

    # One text for all.
    corpus = load_corpus(data.corpus)
    tokenizer = make_tokenizer(data.tokenizer, corpus)
    for config in variants.values():
        if config.model.separate_documents:
            require_documents(corpus)
            separator_of(config.model, tokenizer)  # or an error
    split = split_corpus(corpus, tokenizer, data.validation_tokens, data.max_tokens)
    for custom in {
        shlex.join(custom_arguments(config.model)): None for config in variants.values()
    }:
        if custom:
            log(f"custom blocks: {custom}")

    base = next(iter(variants.values()))
    name = arguments.name or default_name(arguments.base, base, arguments.equal)
    folder = FOLDER / name
    try:
        held = lock(folder / ".lock", f"The comparison {folder} is being run by another process.")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}.") from error
    with held:
        comparison = Comparison(folder, base, arguments.equal, tokenizer, split, split.sha256)
        # A mistake in a variant is found before the first one is trained.
        trained = {
            name: comparison.trained(name, config, seeds) for name, config in variants.items()
        }
        left = len(variants) * len(seeds) - sum(map(len, trained.values()))
        log(f"variants: {len(variants)}, seeds: {len(seeds)}, runs to train: {left}")
        start, done, results = time.perf_counter(), 0, []
        for name, config in variants.items():
            now = len(seeds) - len(trained[name])
            if now:  # its first evaluation, the next line of a log, may take minutes
                log(f"training {name}, {now} seed{'s' * (now > 1)} ...")
            with progress_bar(name, unit="step") as bar:
                for progress in comparison.train(name, config, seeds, arguments.seeds_at_once):
                    bar.total, bar.n = progress.steps, progress.step
                    bar.refresh()
                    if progress.val_losses is not None:
                        where = f"{name}: step {progress.step}/{progress.steps}"
                        losses = " ".join(f"{loss:.4f}" for loss in progress.val_losses)
                        log(f"{where}  validation losses {losses}")
            results.append(comparison.result(name, config, seeds))
            done, left = done + now, left - now
            if now and left:
                minutes = (time.perf_counter() - start) / done * left / 60
                log(f"runs left: {left}, about {minutes:.1f} min")
        shown = table(results)
        try:
            write_atomically(folder / "table.csv", to_csv(results))
            write_atomically(folder / "table.txt", shown + "\n")
            written = "table.txt and table.csv are"
            try:
                save_picture(plots.comparison(results), folder / "comparison.png")
                written = "table.txt, table.csv and comparison.png are"
            except UserError as error:
                log(f"comparison.png is not drawn: {error}")
        except OSError as error:
            log(f"{shown}\n")
            reason = error.strerror or error
            raise UserError(f"A file of {folder} cannot be written: {reason}.") from error
    log(f"\n{shown}\n\n{written} in {folder}")
