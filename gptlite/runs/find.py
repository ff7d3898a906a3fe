"""The folders of runs: finding one, and a place for a new one."""

import os
from pathlib import Path

from gptlite.errors import UserError, require
from gptlite.machine.files import check_folder_name

RUNS_FOLDER = Path("runs")


def new_run(name: str) -> Path:
    """The folder for a run of that name.

    **Raises:** `UserError` if `name` is not a folder name.
    """
    check_folder_name("--run", name)
    return RUNS_FOLDER / name


def check_free(path: Path, *, overwrite: bool) -> None:
    """**Raises:** `UserError` if a new run may not be put at `path`."""
    try:
        exists, is_run = path.exists(), (path / "config.json").is_file()
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except OSError as error:  # a name that is too long to be one
        raise UserError(f"A run cannot be named {path.name!r}: {error.strerror}.") from error
    if not exists:
        return
    if not overwrite:
        raise UserError(
            f"There is a run at {path} already: choose another name with --run, or replace it "
            "with --overwrite."
        )
    if not is_run:
        raise UserError(f"{path} is not a run (it has no config.json), so it is not overwritten.")


def find_run(name: str | None, weights: str = "best") -> Path:
    """The folder of a run, given its path or its name in `runs/`. None: the run in `runs/` with the
    newest `weights`, best or last.

    **Raises:** `UserError` if there is none.
    """
    if name is None:
        # Not hidden folders, which are what `--overwrite` leaves if it is killed.
        files = [
            path for path in RUNS_FOLDER.glob(f"[!.]*/{weights}.safetensors") if path.is_file()
        ]
        if not files:
            raise UserError(
                f"There is no trained model in {RUNS_FOLDER}/ yet: run `python train.py` first, or "
                "name one with --run."
            )
        return max(files, key=lambda path: path.stat().st_mtime).parent
    require(name.strip() != "" and name.isprintable(), f"There is no run named {name!r}.")
    for path in (Path(name), RUNS_FOLDER / name):
        if os.path.isfile(path / "config.json"):
            return path
    raise UserError(f"{name} is not a run: neither it nor {RUNS_FOLDER / name} has a config.json.")
