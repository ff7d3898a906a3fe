"""Fetching TinyShakespeare with the `datasets` library, as a program of its own.

The hub's client retries for minutes where there is no network, and cannot be told not to. A
process can be given a deadline.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

# The hub's own Parquet conversion: `datasets` no longer runs the loading script beside it.
SHAKESPEARE = "karpathy/tiny_shakespeare"
REVISION = "refs/convert/parquet"


def download_shakespeare(seconds: float, source: str = SHAKESPEARE) -> bytes:
    """The corpus as bytes.

    **Arguments:**

    - `seconds`: give up after so long in all.
    - `source`: dataset on the hub, or a local folder in the same form.

    **Raises:** `OSError`, with the reason in one line.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "text"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "gptlite.text.download", source, str(target)],
                timeout=seconds,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"no answer within {seconds:g} seconds") from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise OSError(lines[-1] if lines else f"exit code {done.returncode}")
        return target.read_bytes()


def main(source: str, target: str) -> None:
    """Write the text of all splits of `source`, in order, to `target`."""
    import datasets

    revision = None if Path(source).is_dir() else REVISION
    splits = datasets.load_dataset(source, revision=revision)
    text = "".join(
        row for split in ("train", "validation", "test") for row in splits[split]["text"]
    )
    Path(target).write_bytes(text.encode("utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:])
