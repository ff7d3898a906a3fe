"""Files that are written completely or not at all, and locks."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from gptlite.errors import UserError, require
from gptlite.machine.printed import CONTROL
from gptlite.machine.progress import log

# Bytes of a JSON file. The largest tokenizer that gptlite writes has 6 million.
MAX_JSON = 2**24
# Bytes of a folder's name. Most file systems take 255, also for names that are made of it.
MAX_NAME = 200
# Errors of a file system that has no locks.
NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)
# Seconds to wait for a lock: as long as it takes.
FOR_EVER = -1.0
# The largest number in float32 is 3.4e38.
MAX_NUMBER = 1e39


def check_folder_name(option: str, name: str) -> None:
    """**Raises:** `UserError` if `name`, given as `option`, is a path or no name at all, has
    control characters, is too long for a file system, or begins with a dot, as the names of hidden
    folders do."""
    is_plain = isinstance(name, str) and not CONTROL.search(name) and not name.startswith(".")
    require(
        is_plain and name == Path(name).name != "",
        f"{option} takes the name of a folder, which does not begin with a dot, got {name!r}.",
    )
    require(
        len(name.encode()) <= MAX_NAME,
        f"{option} takes the name of a folder, of at most {MAX_NAME} bytes, got {name!r:.300}.",
    )


def folders_with(parent: Path, file: str) -> list[Path]:
    """The folders in `parent` that have such a file. Not hidden ones, which are what `--overwrite`
    leaves if it is killed, and none whose name is not Unicode."""
    folders = (path.parent for path in parent.glob(f"[!.]*/{file}"))
    return [path for path in folders if path.name.encode(errors="ignore").decode() == path.name]


def lock(path: Path, busy: str, seconds: float = 0.0) -> contextlib.AbstractContextManager:
    """Lock the file `path`: a context manager, whose exit releases the lock. The system releases
    it when the process ends. Some network folders have no locks: then there is none.

    **Raises:** `UserError` with the message `busy` if another process holds it for so many
    `seconds`; `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path, timeout=seconds, fallback_to_soft=False).acquire()
    except Timeout:
        raise UserError(busy) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return contextlib.nullcontext()


def lock_patiently(path: Path, work: str) -> contextlib.AbstractContextManager:
    """`lock`, which waits for another process that does the same `work`.

    **Raises:** `OSError`.
    """
    try:
        return lock(path, "")
    except UserError:
        # The system releases it when that process ends; the lock of a network folder may stay.
        log(f"waiting for another process that {work} (if there is none, delete {path})")
        return lock(path, "", FOR_EVER)


def is_locked(path: Path) -> bool:
    """Whether another process has locked the file `path`. It is locked here for a moment: what
    waits for some seconds is not disturbed."""
    try:
        with lock(path, "") if path.exists() else contextlib.nullcontext():
            return False
    except UserError:
        return True
    except OSError:
        return False


def write_atomically(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Write `content` (text as UTF-8; bytes, or pieces of them) to `path`, or leave `path` as it
    was."""
    if isinstance(content, str):
        content = content.encode("utf-8")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            # Without this, a power cut may leave an empty file under the new name.
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record` to `path` as JSON."""
    write_atomically(path, json.dumps(record, allow_nan=False, indent=2) + "\n")


def open_regular(path: Path) -> BinaryIO:
    """Open a file in a run, which may come from a stranger: a link may lead to any file, a device
    has no end, and a pipe waits for a writer.

    **Raises:** `OSError`, also if `path` is a link or no regular file.
    """
    if path.is_symlink():
        raise OSError("it is a link")
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)  # none on Windows
    file = open(os.open(path, flags), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def behind_links(path: Path) -> Path:
    """The file that `path` leads to, as those of the hub's cache do.

    **Raises:** `OSError` if there is none: a link may lead to itself.
    """
    return Path(os.path.realpath(path, strict=True))


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes.

    **Raises:** `OSError`, as `open_regular` does, also if the file is larger.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(f"it has {size:,} bytes, and at most {limit:,} are expected")
        return file.read(size)


def is_plausible(value: Any) -> bool:
    """Whether `value`, from a file of a stranger, is a number that training could have written:
    finite, and so small that sums of a few do not overflow."""
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk.

    Without this, a power cut may keep later writes and lose earlier ones.
    """
    if path.is_dir() and os.name == "nt":  # Windows cannot flush folders
        return
    # Windows flushes only what is opened for writing, and a folder cannot be opened so.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)  # some file systems cannot flush a folder
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The checksum of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
