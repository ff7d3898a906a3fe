"""A process that renders one chat template: a stranger's may take any time and memory.

The first question has the template and what it is given; each other one, messages.
"""

import datetime
import json
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gptlite.machine.limits import answer_lines


class Generation(jinja2.ext.Extension):
    """The tag around what a model is trained on, which means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
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


def now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class Templates:
    """Answers the first question, a template and what it is given, and then messages."""

    def __init__(self, most: int):
        """`most` characters of a text."""
        self._most = most
        self._template: jinja2.Template | None = None

    def answer(self, question: Any) -> dict[str, Any]:
        try:
            if self._template is None:
                self._template = compiled(**question)
                return {"error": None}
            text = self._template.render(messages=question, add_generation_prompt=True)
            if len(text) > self._most:
                refuse(f"the text would have {len(text):,} characters, and may have {self._most:,}")
            return {"text": text, "error": None}
        except MemoryError:
            raise
        except Exception as failure:  # a template may do anything that Python's operators do
            # Python's compiler has limits of its own.
            kind = "" if self._template else f"{type(failure).__name__}: "
            return {"error": f"{kind}{failure}"[:1000]}


def compiled(template: str, special: dict[str, str]) -> jinja2.Template:
    """A template that can neither call functions nor change values."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now, **special}
    # Templates ask whether these are None.
    environment.globals |= {"tools": None, "documents": None}
    return environment.from_string(template)


if __name__ == "__main__":
    seconds, memory, most = map(int, sys.argv[1:])
    answer_lines(Templates(most).answer, seconds, memory)
