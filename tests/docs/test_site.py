"""The site's pages: what is in them, and that they name what there is."""

import ast
import importlib
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT
from support.pages import PAGES

import gptlite
from gptlite import nn

REFERENCE = {
    page.name: page.read_text("utf-8") for page in PAGES if page.parent.name == "reference"
}
NAMES = sorted(f"gptlite.{name}" for name in vars(gptlite)["__all__"] if name != "nn")
PARTS = sorted(
    f"gptlite.nn.{name}"
    for name, part in vars(nn).items()
    if getattr(part, "__module__", "").startswith("gptlite.nn.")
)


@pytest.mark.parametrize("name", [*NAMES, *PARTS])
def test_each_public_name_is_in_the_reference_with_an_example(name):
    pages = [text for text in REFERENCE.values() if f"\n::: {name}\n" in text]
    assert len(pages) == 1
    blocks = "\n".join(re.findall(r"```py\n(.*?)```", pages[0], re.DOTALL))
    last = name.rpartition(".")[2]
    used = rf"\bgl\.{last}\b" if name in NAMES else rf"\b{last}\b"
    assert re.search(used, re.sub(r"(?s)from gptlite\.nn import \(.*?\)", "", blocks))


SECTIONS = {
    name: (page, text)
    for page in REFERENCE.values()
    for name, text in re.findall(r"(?ms)^::: (\S+)\n(.*?)(?=^:::|\Z)", page)
}


def resolve(name: str) -> Any:
    """What a name of the reference stands for."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def returned_by(thing: Any) -> Iterator[type]:
    """The package's classes that a function returns, or the public methods of a class."""
    functions = [thing]
    if inspect.isclass(thing):
        members = ((n, m) for n, m in vars(thing).items() if n == "__call__" or n[0] != "_")
        functions = [getattr(m, "fget", m) for _, m in members]
    for function in filter(inspect.isfunction, map(inspect.unwrap, functions)):
        queue = [typing.get_type_hints(function).get("return")]
        while queue:
            kind = queue.pop()
            queue += typing.get_args(kind)
            if getattr(kind, "__module__", "").startswith("gptlite.") and inspect.isclass(kind):
                yield kind


def test_the_reference_names_what_there_is():
    """The public names, and what they return."""
    public = [*NAMES, *PARTS]
    objects = [resolve(name) for name in public]
    returned = {kind for thing in objects for kind in returned_by(thing)}
    others = {f"{x.__module__}.{x.__qualname__}" for x in returned if x not in objects}
    assert len(others) > 5
    assert set(public) | others <= SECTIONS.keys()
    for name in SECTIONS:
        assert resolve(name) is not None


def documented(name: str) -> str:
    """All that the reference says of a name, besides its signature."""
    page, text = SECTIONS[name]
    thing = resolve(name)
    # A list at the top of a page is of arguments that many of its names have.
    shared = re.findall(r"(?m)^- `.*?`: ", page.partition("\n::: ")[0])
    parts = [inspect.getdoc(thing) or "", text, *shared]
    if inspect.isclass(thing):
        parts.append(inspect.getdoc(vars(thing).get("__init__")) or "")
        body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                parts.append(f"`{ast.unparse(field.target)}`: {ast.unparse(below)}")
    return "\n".join(parts)


@pytest.mark.parametrize(
    "name", [x for x in (*NAMES, *PARTS) if callable(resolve(x)) and x != "gptlite.UserError"]
)
def test_each_argument_is_described(name):
    """In a docstring, below a field, or on the name's page."""
    text = documented(name)
    arguments = inspect.signature(resolve(name)).parameters.values()
    names = [x.name for x in arguments if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    assert [x for x in names if not re.search(rf"`[^`\n]*\b{x}\b[^`\n]*`", text)] == []


def test_each_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in PAGES[1:]:
        assert config.count(f" {page.relative_to(ROOT).as_posix()}\n") == 1, page


def messages() -> list[str]:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    headings = re.findall(r"^## (.*[^?\n])$", text, re.MULTILINE)
    return [heading for heading in headings if "TypeCheckError" not in heading]


@pytest.mark.parametrize("message", messages())
def test_the_messages_that_are_explained_are_those_of_the_code(message):
    """Between what differs, in one file."""
    parts = [part.strip(" :") for part in message.split("...")]
    sources = (path.read_text("utf-8") for path in (ROOT / "gptlite").rglob("*.py"))
    # Strings that are cut over lines.
    joined = (re.sub(r'"\s+f?"', "", source) for source in sources)
    assert any(all(part in source for part in parts) for source in joined)


def test_one_version_is_told():
    version = gptlite.__version__
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## (.+)$", changes, re.MULTILINE)[0] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
