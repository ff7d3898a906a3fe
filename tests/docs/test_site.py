"""The site's pages: what is in them, and that they name what there is."""

import re

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


def test_the_reference_names_what_there_is():
    said = re.findall(r"^::: (\S+)$", "".join(REFERENCE.values()), re.MULTILINE)
    assert sorted(said) == sorted([*NAMES, *PARTS])


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
