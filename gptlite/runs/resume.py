"""Resuming a run: from which checkpoint, and the folder as it was then."""

from collections.abc import Mapping
from pathlib import Path

import jax

from gptlite.config import Config
from gptlite.errors import UserError, require
from gptlite.machine.files import write_atomically
from gptlite.machine.processes import is_main_process
from gptlite.machine.progress import log
from gptlite.machine.pytrees import size_of
from gptlite.runs import metrics
from gptlite.runs.checkpoints import Checkpoint, describe_devices, restore
from gptlite.runs.find import CHECKPOINTS, checkpoint_of, list_steps
from gptlite.runs.folder import RunFolder
from gptlite.runs.frozen import FROZEN, frozen_in, frozen_sha256, read_frozen
from gptlite.runs.saved_config import (
    load_config,
    save_config,
    save_sources,
    tell_changed_sources,
)
from gptlite.runs.stored import MAX_OTHER, check_files, is_readable
from gptlite.runs.weights import named_leaves
from gptlite.training.step import TrainState


def find_checkpoint(
    run: Path, abstract_state: TrainState, config: Config, corpus_sha256: str
) -> Checkpoint:
    """The newest checkpoint that is not damaged, with its arrays sharded over devices as those
    of `abstract_state` are. Changes nothing.

    **Raises:** `UserError` if there is none, the run was trained on another corpus, or none of
    the steps in `config` is left to do.
    """
    tell_changed_sources(run, config.model)
    checkpoint = _newest(run, abstract_state, _frozen(run, abstract_state, config))
    record = checkpoint.record
    require(
        record.frozen_sha256 == frozen_sha256(run, config),
        f"{run / FROZEN} is damaged: its checksum is not that of the checkpoint.",
    )
    step, steps = record.position.step, config.training.steps
    require(
        corpus_sha256 == record.corpus_sha256,
        "The corpus is not the text that this run was trained on: its sha256 is "
        f"{corpus_sha256}, and was {record.corpus_sha256}.",
    )
    # A run may have been stopped between its last checkpoint and its result.
    evaluated = record.last.get("step") == step and "val_loss" in record.last
    only_result_missing = evaluated and not (run / "result.json").exists()
    require(
        step < steps or (step == steps and only_result_missing),
        f"The run {run} has done {step} steps; to extend it, give "
        f"--training.steps above that, got {steps}.",
    )
    devices = describe_devices(config.mesh)
    if record.devices != devices:
        log(
            f"This run was trained on {record.devices} and continues on {devices}: from here, sums "
            "are added up in another order."
        )
    return checkpoint


def _frozen(run: Path, abstract_state: TrainState, config: Config) -> dict[str, jax.Array]:
    is_frozen = frozen_in(config)
    leaves = named_leaves(abstract_state.model)
    wanted = {name: leaf for name, leaf in leaves.items() if is_frozen(name)}
    arrays = read_frozen(run / FROZEN, wanted) if wanted else {}
    return {x: jax.device_put(array, wanted[x].sharding) for x, array in arrays.items()}


def _newest(run: Path, abstract_state: TrainState, frozen: Mapping[str, jax.Array]) -> Checkpoint:
    check_files(run / CHECKPOINTS, size_of(abstract_state) + MAX_OTHER)  # Orbax reads them, too
    for step in list_steps(run):
        try:
            return restore(checkpoint_of(run, step), abstract_state, frozen)
        except UserError as error:
            log(f"{error} Looking for an older checkpoint.")
    raise UserError(f"No checkpoint in {run} can be used.")


def bring_back(folder: RunFolder, step: int, config: Config) -> None:
    """Bring the folder back to the state in which the checkpoint of `step` was written."""
    if is_main_process():
        _bring_back(folder, step, config)
    folder.check_shared()


def _bring_back(folder: RunFolder, step: int, config: Config) -> None:
    run = folder.path
    with folder.writing():
        for other in list_steps(run):
            checkpoint = checkpoint_of(run, other)
            if other < step and is_readable(checkpoint):
                continue
            if other < step:
                log(f"The checkpoint {checkpoint} is damaged.")
            if other != step:
                _move_damaged(checkpoint)
        for leftover in (*run.glob(".*.part"), run / "result.json"):
            leftover.unlink(missing_ok=True)
        _truncate_metrics(run / metrics.FILE, step)
        if load_config(run / "config.json") != config:
            save_config(config, run / "config.json")
        save_sources(run, config.model)  # of a file that has another name now


def _move_damaged(checkpoint: Path) -> None:
    """Move a damaged checkpoint, on which Orbax fails, to `damaged/`."""
    target = checkpoint.parent.parent / "damaged" / checkpoint.name
    while target.exists():
        target = target.with_name(target.name + "-again")
    target.parent.mkdir(exist_ok=True)
    checkpoint.rename(target)


def _truncate_metrics(path: Path, step: int) -> None:
    """Remove from `metrics.jsonl` the lines after `step`, and what is no line of metrics. The
    file is always a new one, because the old one may have other names, outside of the run."""
    if path.exists():
        write_atomically(path, metrics.lines_up_to(path, step))
    else:
        log(f"{path} is missing. A new one is started.")
