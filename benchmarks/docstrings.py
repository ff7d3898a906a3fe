"""Write the docstrings of Python's standard library, of at least 100 characters and in a random
order, into a file of JSON lines: short documents that have nothing to do with one another.

    python benchmarks/docstrings.py docstrings.jsonl
"""

import argparse
import ast
import json
import random
import sysconfig
import warnings
from pathlib import Path

NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of old escapes in the sources
    found: set[str] = set()
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        if not {"site-packages", "test", "tests"} & set(path.relative_to(library).parts):
            found.update(docstrings(path))
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    with arguments.file.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    print(f"{len(texts):,} docstrings, {sum(map(len, texts)):,} characters in {arguments.file}")


def docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or not in UTF-8
        return []
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, NODES))
    return [text for text in found if text is not None and len(text) >= 100]


if __name__ == "__main__":
    main()
