"""The chat template of a model in Hugging Face's format."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptlite.errors import UserError, require, told
from gptlite.hugging_face.tokenizer import HFTokenizer, library_ids, library_tokenizer
from gptlite.machine.bounded import BoundedProcess
from gptlite.machine.files import behind_links, read_bounded
from gptlite.machine.records import read_record
from gptlite.serving.api import check_ids, check_length, check_text
from gptlite.text.tokenizer import Tokenizer

# Characters of a template. Those of models have some thousands.
MAX_TEMPLATE = 2**20
# What a template may take to be compiled, or to render a chat: more is no template of a model.
SECONDS, MEMORY = 10, 2**30
# Characters of a chat.
MAX_CHAT = 2**24


class ChatTemplate:
    """Makes one text of the messages of a chat, with the special tokens that the model knows.

    A template may come from a stranger. Another process compiles and renders it, in bounded time
    and memory. A template that breaks these is not tried again."""

    def __init__(self, template: str, tokenizer: HFTokenizer, special: dict[str, str]):
        """`special`: the texts of special tokens, by names such as `bos_token`.

        **Raises:** `UserError` if the template has an error.
        """
        require(
            len(template) <= MAX_TEMPLATE,
            f"The chat template has {len(template):,} characters, at most {MAX_TEMPLATE:,} are "
            "expected.",
        )
        broken = (
            f"The model's chat template took more than {SECONDS} s or {MEMORY // 2**20:,} MiB, and "
            "is not used any more: POST /v1/completions needs no template."
        )
        worker = Path(__file__).with_name("template_worker.py")
        words = (SECONDS, MEMORY, MAX_CHAT)
        self._process = BoundedProcess(worker, words, 2 * SECONDS, broken)
        error = self._process.ask({"template": template, "special": special})["error"]
        if error is not None:
            reason = error[:300].removesuffix(".")
            raise UserError(f"The model's chat template has an error: {reason}.")
        # Special tokens are recognised in the template's text, unlike in a prompt.
        self._plain = tokenizer
        self._tokenizer = library_tokenizer(tokenizer.to_json()["tokenizer"])

    def encode(self, messages: Sequence[Any], most: int) -> list[int]:
        """The ids of a chat, up to where the model's answer begins.

        `most`: the characters of a text that may fit into the context. One with more is not
        encoded.

        **Raises:** `UserError` if it has more, or a character or token that the model does not
        know, or the template refuses the messages, or breaks its limits, or did so before.
        """
        contents = [str(message.get("content") or "") for message in messages]
        check_length("chat", "".join(contents), most)
        for content in contents:
            # What would not come back is not known to the model. (A template may trim a text, and
            # the tokenizer may compose its characters.)
            self._plain.encode(unicodedata.normalize("NFC", content))
        answer = self._process.ask(messages)
        if answer["error"] is not None:
            reason = answer["error"].removesuffix(".")
            raise UserError(f"The chat template refuses these messages: {reason}.")
        check_text("messages", answer["text"])
        check_length("chat", answer["text"], most)
        with told("The tokenizer cannot encode this chat"):
            ids = library_ids(self._tokenizer, answer["text"], with_special=False)
        check_ids(ids, self._plain.vocab_size)
        return ids


def read_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of the model in `folder`; None if there is none, as for base models.

    **Raises:** `UserError` if it cannot be used.
    """
    settings, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if not isinstance(tokenizer, HFTokenizer):
        return None
    try:
        record = read_record(behind_links(settings), dict[str, Any]) if settings.exists() else {}
        template = record.get("chat_template")
        if file.exists():
            template = read_bounded(behind_links(file), 4 * MAX_TEMPLATE).decode("utf-8")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"The chat template in {folder} cannot be read: {error}.") from error
    if isinstance(template, list):  # several, by name
        named = [x for x in template if isinstance(x, dict) and x.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if not isinstance(template, str):
        return None
    special = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in record.items()
        if name.endswith("_token")
    }
    texts = {name: value for name, value in special.items() if isinstance(value, str)}
    return ChatTemplate(template, tokenizer, texts)
