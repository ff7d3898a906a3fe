"""Where gptlite keeps what can be fetched or made again. (Runs and comparisons are in the working
folder.)"""

from pathlib import Path

# Of a clone; else where packages are installed.
ROOT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path | None:
    """The platform's folder for caches. None: the user has no home, as in some containers."""
    import platformdirs

    try:
        folder = platformdirs.user_cache_path("gptlite", appauthor=False)
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None  # it is not, in earlier versions


def data_folder() -> Path:
    """The folder of texts that were fetched, and of large ones as ids: a clone's data/; else `data`
    in the folder for caches, or, of a user without a home, in the working folder."""
    if (ROOT / "pyproject.toml").is_file():
        return ROOT / "data"
    return (cache_folder() or Path()) / "data"


DATA_FOLDER = data_folder()
