"""The chat template of a model in Hugging Face's format."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gptlite.errors import UserError
from gptlite.hugging_face.tokenizer import HFTokenizer, library_tokenizer
from gptlite.machine.files import read_bounded
from gptlite.machine.records import read_record
from gptlite.serving.api import check_text
from gptlite.text.tokenizer import Tokenizer

MAX_TEMPLATE = 2**20


class ChatTemplate:
    """Makes one text of the messages of a chat, with the special tokens that the model knows."""

    def __init__(self, template: str, tokenizer: HFTokenizer, special: dict[str, str]):
        """`special`: the texts of special tokens, by names such as `bos_token`.

        **Raises:** `UserError` if the template has an error.
        """
        # A template may come from a stranger: it can neither call functions nor change values.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now, **special}
        # Templates ask whether these are None.
        environment.globals |= {"tools": None, "documents": None}
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise UserError(f"The model's chat template has an error: {error}.") from error
        # Special tokens are recognised in the template's text, unlike in a prompt.
        self._tokenizer = library_tokenizer(tokenizer.to_json()["tokenizer"])

    def encode(self, messages: Sequence[Any]) -> list[int]:
        """The ids of a chat, up to where the model's answer begins.

        **Raises:** `UserError` if the template refuses the messages.
        """
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True)
        except Exception as error:  # a template may do anything that Python's operators do
            raise UserError(f"The chat template refuses these messages: {error}.") from error
        check_text("messages", text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def read_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of the model in `folder`; None if there is none, as for base models.

    **Raises:** `UserError` if it cannot be read.
    """
    settings, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if not isinstance(tokenizer, HFTokenizer):
        return None
    try:
        record = read_record(settings.resolve(), dict[str, Any]) if settings.exists() else {}
        template = record.get("chat_template")
        if file.exists():
            template = read_bounded(file.resolve(), MAX_TEMPLATE).decode("utf-8")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"The chat template in {folder} cannot be read: {error}.") from error
    if isinstance(template, list):  # several, by name
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        return None
    special = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in record.items()
        if name.endswith("_token")
    }
    texts = {name: value for name, value in special.items() if isinstance(value, str)}
    return ChatTemplate(template, tokenizer, texts)


class _Generation(jinja2.ext.Extension):
    """The tag around what a model is trained on, which means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's templates have it: Jinja's own escapes HTML and sorts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
