"""Fetching TinyShakespeare."""

import http.client
import time
import urllib.request

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
# More than the file has: what is longer is something else.
MOST_BYTES = 2**21


def download_shakespeare(seconds: float, url: str = SHAKESPEARE) -> bytes:
    """The file as bytes.

    **Raises:** `OSError`, also if it has not arrived after so many seconds.
    """
    deadline, content = time.monotonic() + seconds, b""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as response:
            while len(content) < MOST_BYTES and (part := response.read1(2**16)):
                content += part
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it has not arrived within {seconds:g} seconds")
    except http.client.HTTPException as error:  # which is no OSError
        raise OSError(f"the answer is broken: {error!r}") from error
    return content
