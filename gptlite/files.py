"""Files that nobody ever sees half of, and whose damage nobody overlooks."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

# Where a sealed file holds its checksum: this, while the checksum is computed.
SEAL = b"0" * 64


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, or leave `path` as it was."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            # Or a power cut may leave the new name on an empty file.
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder, before this returns.

    Without it, a power cut may keep what was written later and lose what was written before.
    """
    if path.is_dir() and os.name == "nt":  # Windows has no such thing for folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The checksum of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(content: bytes) -> bytes:
    """`content` with the first `SEAL` in it replaced by the sha256 of all of it."""
    return content.replace(SEAL, hashlib.sha256(content).hexdigest().encode("ascii"), 1)


def is_sealed_by(content: bytes, checksum: str) -> bool:
    """Whether `content` is as `seal` returned it, with `checksum` in it."""
    unsealed = content.replace(checksum.encode(), SEAL, 1)
    return hashlib.sha256(unsealed).hexdigest() == checksum


def json_to_bytes(record: dict[str, Any]) -> bytes:
    """`record` as JSON, with a checksum of the whole text as its first entry, `sha256`."""
    text = json.dumps({"sha256": SEAL.decode(), **record}, allow_nan=False, indent=2)
    return seal(text.encode("ascii") + b"\n")


def json_from_bytes(content: bytes, *, sealed: bool = True) -> dict[str, Any]:
    """The record that `json_to_bytes` was given.

    If it need not be `sealed`, one without a checksum (an earlier version's, or written by hand) is
    read as it is; whoever reads it refuses entries that it does not know, a damaged `sha256` among
    them.

    **Raises:** `ValueError` if it is no JSON object, or not as it was written.
    """
    try:
        record = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError("it holds no JSON object")
    checksum = record.pop("sha256", None)
    if checksum is None and sealed:
        raise ValueError("it has no checksum")
    if checksum is not None and not is_sealed_by(content, str(checksum)):
        raise ValueError("it is damaged or was edited, for its checksum does not match")
    return record
