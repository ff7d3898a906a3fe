"""Write a run in Hugging Face's format: `gptlite export RUN FOLDER`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from gptlite.cli import exit_on_error, import_jax, parse_words
from gptlite.machine.progress import log
from gptlite.runs.find import find_run


def export(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    *,
    debug: bool = False,
) -> None:
    """Write a model's weights (of a run, the best), config and tokenizer in Hugging Face's format,
    for AutoModelForCausalLM and AutoTokenizer of transformers.

    Args:
        run: The run's folder, or its name in runs/; or hf:NAME, as `gptlite sample` takes it.
        folder: A new folder.
        debug: Show where in the code an error came from.
    """
    import_jax()
    # Imported here, because --help should not wait for JAX.
    from gptlite.hugging_face.architectures import to_hf_config
    from gptlite.hugging_face.folder import export_run
    from gptlite.runs.load import load
    from gptlite.runs.saved_config import load_config

    if not run.startswith("hf:"):
        # Blocks that cannot be exported are refused first: a custom one would have to be named.
        to_hf_config(load_config(find_run(run) / "config.json").model, vocab_size=1)
    found = load(run)
    export_run(found, folder)
    if found.config.model.separate_documents:
        log(
            "The model keeps documents apart, which no architecture of transformers does: give it "
            "one document at a time."
        )
    log(f"{folder} is written: AutoModelForCausalLM.from_pretrained({str(folder)!r}) loads it")


def main() -> None:
    with exit_on_error(debug="--debug" in sys.argv):
        parse_words(export, sys.argv[1:])
