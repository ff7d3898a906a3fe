"""TinyShakespeare: downloaded once, checked and kept."""

import hashlib
import http.client
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from gptlite.errors import UserError, require
from gptlite.machine.files import write_atomically
from gptlite.machine.progress import log

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
FILE = "tinyshakespeare.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_SECONDS = 10.0
# More than the file has: a longer answer is something else.
MAX_BYTES = 2**21


def load_shakespeare(folder: Path, download: Callable[[float], bytes]) -> str:
    """The text, from a file in `folder`, which is downloaded if it is missing. `download(seconds)`
    returns the file, or raises `OSError`.

    **Raises:** `UserError` if the file is another one, or cannot be downloaded.
    """
    path = folder / FILE
    by_hand = (
        f"To use it, put the 1,115,394-character file, known as input.txt from karpathy/char-rnn, "
        f"at {path}."
    )
    try:
        if path.is_file():
            content = path.read_bytes()
            require(
                hashlib.sha256(content).hexdigest() == SHA256,
                f"{path} is not TinyShakespeare: its sha256 should be {SHA256}. Delete it to "
                "download it again, or train on it as it is with --data.corpus.",
            )
            return content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    log(f"downloading TinyShakespeare to {path}")
    try:
        content = download(DOWNLOAD_SECONDS)
    except OSError as error:
        raise UserError(
            f"TinyShakespeare is not at {path} and could not be downloaded from {URL}: {error}. "
            f"{by_hand}"
        ) from error
    require(
        hashlib.sha256(content).hexdigest() == SHA256,
        f"The file at {URL} is not TinyShakespeare (its sha256 should be {SHA256}). {by_hand}",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        log(f"TinyShakespeare was downloaded, but could not be kept at {path}: {error}.")
    return content.decode("utf-8")


def download_shakespeare(seconds: float, url: str = URL) -> bytes:
    """The file as bytes.

    **Raises:** `OSError`, also if it has not arrived after `seconds`.
    """
    deadline, content = time.monotonic() + seconds, b""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as response:
            while len(content) < MAX_BYTES and (part := response.read1(2**16)):
                content += part
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it has not arrived within {seconds:g} seconds")
    except http.client.HTTPException as error:  # not an OSError
        raise OSError(f"the HTTP response is invalid: {error!r}") from error
    except ValueError as error:  # of a proxy's address, in the environment
        raise OSError(f"the request is invalid: {error}") from error
    return content
