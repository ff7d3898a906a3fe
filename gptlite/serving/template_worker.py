"""A process that renders one chat template: a stranger's may take any time and memory.

It is started by its path, alone, and imports nothing of the package: see `chat.py`. Lines of JSON
come in and go out. The first has the template and what it is given; each other one, messages.
"""

import contextlib
import datetime
import json
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


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


def limit(seconds: int, memory: int) -> None:
    """Bound what this process may take, where the system can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if hasattr(signal, "SIGALRM"):  # ends the process, also when nobody waits for it any more
        signal.alarm(seconds)


def main(seconds: int, memory: int, most: int) -> None:
    """`seconds` of an answer, `memory` in bytes, `most` characters of a text."""
    limit(seconds, memory)
    given = json.loads(sys.stdin.readline())
    # It can neither call functions nor change values.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now, **given["special"]}
    # Templates ask whether these are None.
    environment.globals |= {"tools": None, "documents": None}
    try:
        template = environment.from_string(given["template"])
    except MemoryError:
        raise
    except Exception as failure:  # also of Python's compiler, which has limits of its own
        answer(error=f"{type(failure).__name__}: {failure}"[:1000])
        return
    answer(error=None)
    for line in sys.stdin:
        limit(seconds, memory)
        try:
            text = template.render(messages=json.loads(line), add_generation_prompt=True)
            if len(text) > most:
                refuse(f"the text would have {len(text):,} characters, and may have {most:,}")
            answer(text=text, error=None)
        except MemoryError:
            raise
        except Exception as failure:  # a template may do anything that Python's operators do
            answer(error=str(failure)[:1000])


def answer(**record: Any) -> None:
    print(json.dumps(record), flush=True)
    if hasattr(signal, "SIGALRM"):
        signal.alarm(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
