"""A trained model, read from its run's folder, or from a folder in Hugging Face's format."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from gptlite.custom import Custom, check_files, load_custom, with_custom
from gptlite.errors import UserError, require
from gptlite.machine.files import behind_links
from gptlite.machine.progress import log
from gptlite.machine.records import read_record
from gptlite.machine.runtime import require_devices
from gptlite.models.gpt import GPT
from gptlite.runs.find import checkpoint_of, find_run, list_steps
from gptlite.runs.frozen import frozen_in
from gptlite.runs.model import abstract_model
from gptlite.runs.run import Run
from gptlite.runs.saved_config import load_config, tell_changed_sources
from gptlite.runs.stored import best_step, load_model, newest_summary
from gptlite.runs.tokenizers import load_tokenizer
from gptlite.runs.weights import fill, named_arrays


def load(
    name: str | Path | None = None,
    weights: Literal["best", "last"] = "best",
    *,
    custom: Custom = (),
) -> Run:
    """A trained model, with its tokenizer and config. Adapters are added to their matrices. A line
    on standard output says which of the custom files have changed since the run began.

    **Arguments:**

    - `name`: the folder of a run, or its name in `runs/`; `hf:NAME` for a model in Hugging Face's
      format on the hub or in a folder, or that folder. Default: the newest run.
    - `weights`: those of the best evaluation, or of the last checkpoint.
    - `custom`: the files with the custom blocks that the run was made with, which are executed; or
      the classes themselves.

    **Raises:** `UserError` if there is no such model, a file is missing, damaged or of another
    shape than the config says, or a custom block is in none of the files.
    """
    require(weights in ("best", "last"), f"weights must be best or last, got {weights!r}.")
    require_devices()
    check_files(custom)
    name = None if name is None else str(name)
    if name is not None and (name.startswith("hf:") or _is_hf(Path(name))):
        from gptlite.hugging_face.folder import load_hf  # its imports take time

        require(weights == "best", f"{name} has one set of weights: leave --weights last out.")
        return load_hf(name.removeprefix("hf:"))
    path = find_run(name)
    try:
        return _load_run(path, weights, custom)
    except UserError as error:
        if name is not None:
            raise
        raise UserError(
            f"{str(error).removesuffix('.')}. {path} is the newest run: --run NAME, in Python "
            "load(NAME), takes another."
        ) from error


def _load_run(path: Path, weights: Literal["best", "last"], custom: Custom) -> Run:
    config = load_config(path / "config.json")
    try:
        config = with_custom(config, custom, read=True)
    except UserError as error:
        raise UserError(f"{path} cannot be loaded. {error}") from error
    config = dataclasses.replace(config, model=load_custom(config.model))
    tell_changed_sources(path, config.model)
    tokenizer = load_tokenizer(path)
    abstract, is_frozen = abstract_model(config.model, tokenizer), frozen_in(config)
    checkpoint, model = _load(path, weights, abstract, is_frozen)
    if config.model.lora is not None:
        from gptlite.adapters import merged

        config = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None))
        plain = abstract_model(config.model, tokenizer)
        model = fill(plain, named_arrays(merged(model)), f"The arrays of {checkpoint}")
    return Run(path, config, tokenizer, model)


def _load(
    run: Path,
    weights: Literal["best", "last"],
    abstract: GPT,
    is_frozen: Callable[[str], bool],
) -> tuple[Path, GPT]:
    while True:
        checkpoint = _checkpoint(run, weights)
        try:
            return checkpoint, load_model(checkpoint, abstract, is_frozen)
        except UserError:
            # While a run is trained, a checkpoint may be deleted as it is read: there is another.
            if _checkpoint(run, weights) == checkpoint:
                raise


def _checkpoint(run: Path, weights: Literal["best", "last"]) -> Path:
    steps = list_steps(run)
    require(bool(steps), f"The run {run} has no weights yet: its first checkpoint is not written.")
    if weights == "last":
        return checkpoint_of(run, steps[0])
    best = best_step(run)
    if best is not None:
        return checkpoint_of(run, best.step)
    require(
        newest_summary(run) is not None,
        f"The run {run} has no best weights: the record of {checkpoint_of(run, steps[0])} is "
        "damaged. Use its last ones (gptlite sample --weights last), or resume it (gptlite train "
        "--resume).",
    )
    log(f"No checkpoint of {run} was evaluated: its last weights are used.")
    return checkpoint_of(run, steps[0])


def _is_hf(folder: Path) -> bool:
    try:
        return "model_type" in read_record(behind_links(folder / "config.json"), dict[str, object])
    except (OSError, ValueError):
        return False
