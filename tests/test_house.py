"""The parts of docs/code.md: which file is in which, who may import whom, how much is core."""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import ROOT

import gptlite

# By the first words of a module's name; the longest counts. All else is core.
PARTS = {
    "gptlite": "core",
    "gptlite.nn.kernels": "kernels",
    "gptlite.nn.variants": "variants",
    "gptlite.machine": "machine",
    "gptlite.runs": "machine",
    "gptlite.cli": "machine",
    "gptlite.custom": "machine",
    "gptlite.serving": "wing",
    "gptlite.estimate": "wing",
    "gptlite.research": "wing",
    "gptlite.planning": "wing",
    "gptlite.hugging_face": "wing",
    "gptlite.family": "wing",
    "gptlite.inspect": "wing",
    "gptlite.trackers": "wing",
    "gptlite.adapters": "wing",
    "gptlite.scripts": "wing",
    "gptlite.scripts.train": "core",
    "gptlite.scripts.sample": "core",
}
# Lines, with docstrings: of the core, and of its first file.
BUDGET, STORY = 4_800, 120
LINES_PER_HOUR = 700
# The first names of modules that need no requirement: jax brings the jaxlib of its version.
OURS = {"jaxlib"} | {
    x.stem for place in (ROOT, ROOT / "tests", ROOT / "benchmarks") for x in place.iterdir()
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FIRST = ("gptlite.scripts.train", "gptlite.scripts.sample")
MODULES = {module_name(path): path for path in ROOT.glob("gptlite/**/*.py")}


def part_of(module: str) -> str:
    fitting = [name for name in PARTS if f"{module}.".startswith(f"{name}.")]
    return PARTS[max(fitting, key=len)]


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str, *, at_start: bool = False) -> Iterator[str]:
    """The package's modules that a module imports; `at_start`: when it is itself imported."""
    pending: list[ast.AST] = [parsed(module)]
    while pending:
        node = pending.pop()
        if at_start and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{name.name}" for name in node.names]
            yield from (x if x in MODULES else str(node.module) for x in names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


EDGES = {module: sorted({*imports(module)} & MODULES.keys()) for module in MODULES}


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) in ("core", "kernels")])
def test_the_core_imports_no_wing(module):
    assert [m for m in EDGES[module] if part_of(m) == "wing"] == []
    # `import gptlite`, which has everything, is for the scripts.
    assert "gptlite" not in EDGES[module] or module in FIRST


def test_the_machine_imports_a_wing_only_where_a_run_asks_for_it():
    found = [
        (module, wing)
        for module in MODULES
        if part_of(module) in ("machine", "kernels", "variants")
        for wing in imports(module, at_start=True)
        if wing in MODULES and part_of(wing) == "wing"
    ]
    assert not found


def test_blocks_know_only_errors_bounds_and_the_mesh():
    outside = {
        m: set(EDGES[m]) - {"gptlite.errors", "gptlite.machine.fields", "gptlite.sharding"}
        for m in MODULES
        if m.startswith("gptlite.nn")
    }
    wrong = {m: x for m, x in outside.items() if not all(y.startswith("gptlite.nn") for y in x)}
    assert not wrong


@pytest.mark.parametrize("script", FIRST)
def test_the_first_scripts_use_public_names_only(script):
    tree = parsed(script)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "gl"
    }
    assert EDGES[script] == ["gptlite"]
    assert used
    assert used <= set(dir(gptlite))


@pytest.mark.parametrize("module", ["gptlite.runs.load", "gptlite.serving.page"])
def test_a_model_is_loaded_and_served_without_training(module):
    """Whose imports take a third of a second."""
    reached, pending = set(), [module]
    while pending:
        name = pending.pop()
        if name in MODULES and name not in reached:
            reached.add(name)
            pending += imports(name, at_start=True)
    assert "gptlite.runs.stored" in reached
    assert not {m for m in reached if m.startswith("gptlite.training")}


def test_imports_have_no_circle():
    left = dict(EDGES)
    # What imports nothing that is left is in no circle.
    while ready := [m for m in left if not (set(left[m]) - {m}) & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, "these import each other, or what does"


@functools.cache
def requirements() -> dict[str, set[str]]:
    """The packages that pyproject.toml names: by extra, and "" for all users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: {re.split(r"[^\w-]", line)[0].replace("_", "-").lower() for line in lines}
        for extra, lines in named.items()
    }


# Once: it reads the records of all that is installed.
distributions_of = functools.cache(packages_distributions)


@pytest.mark.parametrize(
    "path", [*MODULES.values(), *sorted(ROOT.glob("tests/**/*.py"))], ids=module_name
)
def test_every_package_that_is_imported_is_required_by_name(path):
    """Another package may bring it today, and not tomorrow. What a wing imports, or a function, may
    be an extra."""
    named, distributions = requirements(), distributions_of()
    is_test = path.is_relative_to(ROOT / "tests")
    at_once = named[""] | (named["serve"] | named["test"] if is_test else set())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            tops = {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            tops = {str(node.module).partition(".")[0]}
        else:
            continue
        is_late = node not in tree.body or (not is_test and part_of(module_name(path)) == "wing")
        allowed = at_once.union(*named.values()) if is_late else at_once
        for top in tops - OURS - sys.stdlib_module_names:
            packages = {name.replace("_", "-").lower() for name in distributions.get(top, [top])}
            assert packages & allowed, f"{top} is imported, and no requirement"


def listed() -> list[tuple[str, int, int]]:
    """The files of the core in docs/code.md, in the order in which they are to be read."""
    text = (ROOT / "docs/code.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\S+)\]\(\.\./\S+\) \| ([\d,]+) \| (\d+) \|", text, re.MULTILINE)
    return [(file, int(lines.replace(",", "")), int(minutes)) for file, lines, minutes in rows]


def core() -> dict[str, int]:
    """Lines of the core's files."""
    paths = [path for m, path in MODULES.items() if part_of(m) == "core"]
    lines = {p.relative_to(ROOT).as_posix(): len(p.read_bytes().splitlines()) for p in paths}
    return {name: count for name, count in lines.items() if count}


def test_the_core_keeps_to_its_budget():
    assert sum(core().values()) <= BUDGET
    assert core()["gptlite/scripts/train.py"] <= STORY


def test_the_docs_list_the_core_as_it_is():
    lines = core()
    assert sorted(file for file, _, _ in listed()) == sorted(lines)
    for file, said, minutes in listed():
        assert abs(said - lines[file]) <= max(5, lines[file] // 10), f"{file} has {lines[file]}"
        assert minutes == max(1, round(60 * said / LINES_PER_HOUR)), file


def programs() -> Iterator[tuple[str, ast.Module]]:
    """Programs for other processes, which are strings in tests, and are looked at by no checker."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        formatted = [x for x in ast.walk(tree) if isinstance(x, ast.JoinedStr)]
        parts = {id(part) for x in formatted for part in x.values}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if id(node) in parts:  # of a program that is put together
                continue
            if re.search(r"(?m)^\s*(from|import) gptlite\b", node.value):
                yield f"{path.name}:{node.lineno}", ast.parse(textwrap.dedent(node.value))


def test_programs_in_strings_name_what_there_is():
    missing = []
    for place, program in programs():
        modules = {}
        for node in ast.walk(program):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gptlite"):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    full = f"{node.module}.{name.name}"
                    found = importlib.import_module(full) if full in MODULES else None
                    modules[name.asname or name.name] = found or getattr(module, name.name, None)
        missing += [f"{place}: {name}" for name, found in modules.items() if found is None]
        for node in ast.walk(program):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                if inspect.ismodule(module) and not hasattr(module, node.attr):
                    missing.append(f"{place}: {node.value.id}.{node.attr}")
    assert not missing
