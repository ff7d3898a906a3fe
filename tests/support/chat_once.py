"""Reads the chat template of a model in Hugging Face's format, and makes a prompt of one message:
`chat_once FOLDER MESSAGE`."""

import sys
from pathlib import Path

from gptlite.cli import exit_on_error
from gptlite.hugging_face.folder import load_hf_tokenizer
from gptlite.serving import chat


def main() -> None:
    folder, message = sys.argv[1:]
    chat.SECONDS = 2
    with exit_on_error():
        template = chat.read_chat_template(Path(folder), load_hf_tokenizer(Path(folder)))
        if template is not None:
            ids = template.encode([{"role": "user", "content": message}], 2**24)
            print(f"{len(ids)} ids")


if __name__ == "__main__":
    main()
