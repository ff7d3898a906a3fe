"""What computes a result is known: an edit of it is noticed, also in what a block imports."""

import dataclasses
import hashlib
import importlib.metadata
import sys

import pytest
from conftest import ROOT, TINY

from gptlite.custom import load_custom
from gptlite.research.code import _imported, _read, code_of

FILES = {
    "lab_blocks.py": "import math\nimport equinox as eqx\nfrom lab_parts import inner\n"
    "class Mine(eqx.Module):\n    def __init__(self, config, *, key):\n        pass\n"
    "    def __call__(self, x):\n        from lab_parts.late import f\n"
    "        return inner.f(f(x))\n",
    "lab_parts/__init__.py": "",
    "lab_parts/inner.py": "from .deep import g\nfrom . import deeper\ndef f(x):\n    return g(x)\n",
    "lab_parts/deep.py": "def g(x):\n    return x\n",
    "lab_parts/deeper.py": "",
    "lab_parts/late.py": "def f(x):\n    return x\n",
    "lab_parts/unused.py": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "lab_parts").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _read.cache_clear()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("lab_")]:
        del sys.modules[name]


def code(folder):
    model = dataclasses.replace(TINY, mlp=f"{folder / 'lab_blocks.py'}:Mine")
    return code_of(load_custom(model))


def test_the_code_of_the_package(folder):
    found = code_of(TINY)
    assert found["jax"] == importlib.metadata.version("jax")
    for part in ("nn/mlp", "nn/kernels/linear_recurrence", "training/step", "research/seeds"):
        file = ROOT / "gptlite" / f"{part}.py"
        name = f"gptlite.{part.replace('/', '.')}"
        assert found[name] == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    # Not what computes nothing.
    parts = {name.split(".")[1] for name in found if name.startswith("gptlite.")}
    assert not parts & {"serving", "scripts", "hugging_face", "estimate", "cli", "inspect"}


def test_an_edit_of_anything_that_a_block_imports_is_noticed(folder):
    before = code(folder)
    of_block = {name for name in before if name.startswith("lab_")}
    assert of_block == {f"lab_parts{x}" for x in ("", ".inner", ".deep", ".deeper", ".late")} | {
        "lab_blocks"
    }
    for name in FILES:
        file = folder / name
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        file.write_text(file.read_text() + "# edited\n")
        if file.parent != folder:
            # What was imported is what is executed: an edit is one of the next process.
            assert code(folder) == before
        _read.cache_clear()
        after = code(folder)
        changed = {x for x in before.keys() | after.keys() if before.get(x) != after.get(x)}
        assert changed == ({module} if module in of_block else set())
        before = after


def test_a_module_of_the_package_that_only_a_block_imports_is_known(folder):
    file = folder / "lab_blocks.py"
    file.write_text(
        "from gptlite.family.cross_attention import CrossAttention\n" + file.read_text()
    )
    assert "gptlite.family.cross_attention" in code(folder)
    assert "gptlite.family.cross_attention" not in code_of(TINY)


def test_a_version_of_a_package_that_a_block_imports_is_noticed(folder):
    file = folder / "lab_blocks.py"
    file.write_text("import tqdm.auto\nimport yaml\n" + file.read_text())
    found = code(folder)
    assert found["tqdm"] == importlib.metadata.version("tqdm")
    assert not [name for name in found if name.startswith("tqdm.")]
    # That is installed under another name.
    (name,) = {name for name in found if name.lower() == "pyyaml"}
    assert found[name] == importlib.metadata.version("pyyaml")


def test_an_edit_of_the_package_is_noticed(tmp_path):
    """As of any package: here of a small one."""
    file = tmp_path / "gptlite" / "first.py"
    file.parent.mkdir()
    file.write_text("from gptlite.errors import require\n")
    before = _imported("gptlite.first", file, file.read_bytes())
    assert before.keys() >= {"gptlite.first", "gptlite", "gptlite.errors"}
    file.write_text("from gptlite.errors import require, told\n")
    after = _imported("gptlite.first", file, file.read_bytes())
    assert {name for name in before if before[name] != after[name]} == {"gptlite.first"}
