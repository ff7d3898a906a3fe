"""The folders of runs: finding one, and a place for a new one; and of their checkpoints."""

import contextlib
import math
import os
from pathlib import Path

from gptlite.errors import UserError, require
from gptlite.machine.files import check_folder_name
from gptlite.machine.printed import CONTROL

RUNS_FOLDER = Path("runs")
# The folder of checkpoints in a run's.
CHECKPOINTS = "checkpoints"


def new_run(name: str) -> Path:
    """The folder for a run of that name.

    **Raises:** `UserError` if `name` is not a folder name.
    """
    check_folder_name("--run", name)
    return RUNS_FOLDER / name


def check_free(path: Path, *, overwrite: bool) -> None:
    """**Raises:** `UserError` if a new run may not be put at `path`."""
    check_path(path)
    try:
        exists, is_run = path.exists(), (path / "config.json").is_file()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if not exists:
        return
    require(
        overwrite,
        f"There is a run at {path} already: choose another name with --run, or replace it "
        "with --overwrite.",
    )
    require(is_run, f"{path} is not a run (it has no config.json), so it is not overwritten.")


def list_steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints, the newest first. Links are left out."""
    folder = run / CHECKPOINTS
    paths = [] if folder.is_symlink() else [*folder.glob("[0-9]*")]
    names = (path.name for path in paths if path.is_dir() and not path.is_symlink())
    return sorted((int(n) for n in names if n.isdecimal() and str(int(n)) == n), reverse=True)


def checkpoint_of(run: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return run / CHECKPOINTS / str(step)


def check_path(path: Path) -> None:
    """**Raises:** `UserError` if no run can be saved at `path`."""
    # Orbax looks for its files by a pattern, in which brackets are no letters, and TensorStore
    # takes a backslash for a slash.
    where = path.absolute()
    require(
        not any(letter in where.as_posix() for letter in "[]\\"),
        f"A run cannot be saved in {where}: the names of folders must be without [, ] and \\.",
    )


def _saved_at(run: Path) -> float:
    """When the newest checkpoint of a run was saved; minus infinity if there is none."""
    for step in list_steps(run):
        with contextlib.suppress(OSError):  # deleted since, by the process that trains the run
            return checkpoint_of(run, step).stat().st_mtime
    return -math.inf


def find_run(name: str | None) -> Path:
    """The folder of a run, given its path or its name in `runs/`. None: the run in `runs/` with the
    newest checkpoint.

    **Raises:** `UserError` if there is none.
    """
    if name is None:
        # Not hidden folders, which are what `--overwrite` leaves if it is killed.
        runs = [run for run in RUNS_FOLDER.glob("[!.]*") if (run / "config.json").is_file()]
        newest = max(runs, key=_saved_at, default=None)
        if newest is None or not list_steps(newest):
            raise UserError(
                f"There is no trained model in {RUNS_FOLDER.absolute()} yet: run `gptlite train` "
                "first, in this folder, or name a run's folder with --run."
            )
        return newest
    require(
        not name.startswith("hf:"),
        f"{name} is a model in Hugging Face's format, and no run that can be resumed: "
        f"--init-from {name} begins a run with its weights.",
    )
    is_name = name.strip() != "" and CONTROL.search(name) is None
    require(is_name, f"There is no run named {name!r}.")
    for path in (Path(name), RUNS_FOLDER / name):
        if os.path.isfile(path / "config.json"):
            return path
    places = (
        [name] if Path(name).parts[:1] == RUNS_FOLDER.parts else [name, f"{RUNS_FOLDER}/{name}"]
    )
    looked = " and no ".join(str(Path(place, "config.json")) for place in places)
    raise UserError(f"There is no run {name}: no {looked} in {Path.cwd()}.")
