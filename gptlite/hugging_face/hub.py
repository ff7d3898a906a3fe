"""Models on Hugging Face's hub."""

import os
from pathlib import Path

from gptlite.errors import UserError

INDEX = "model.safetensors.index.json"
# Files of a model that are fetched before its weights: no pickles, and no code.
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
]
# Seconds until the hub counts as out of reach.
TIMEOUT = 5.0


def find_folder(name: str) -> Path:
    """The folder. If there is none of that name here, it is fetched from the hub, without its
    weights.

    **Raises:** `UserError` if it cannot be fetched.
    """
    folder = os.path.expanduser(name)
    return Path(folder) if os.path.isdir(folder) else fetch(name, FILES)


def fetch(name: str, files: list[str], revision: str | None = None) -> Path:
    """The folder in the hub's cache, with `files` of the model `name`.

    **Raises:** `UserError` if they cannot be fetched.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=files, etag_timeout=TIMEOUT
            )
        )
    except HFValidationError as error:
        raise UserError(f"{name} is no folder, and no name of a model on the hub.") from error
    except Exception as error:  # of huggingface_hub, of its HTTP library, of the system
        reason = str(error).strip().partition("\n")[0][:300]
        raise UserError(
            f"{name} is no folder, and cannot be fetched from the hub: {type(error).__name__}: "
            f"{reason}"
        ) from error
