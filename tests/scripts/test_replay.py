"""tests/replay.py sees what a change does to compiled programs, and nothing else."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay
from conftest import ROOT
from support.programs import text_of


def tree(folder: Path, file: str = "", old: str = "", new: str = "") -> Path:
    """A copy of the code, with one text in a file replaced."""
    for name in ("gptlite", "tests/support"):
        ignore = shutil.ignore_patterns("__pycache__", "web")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    if file:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
    return folder


def test_a_table_is_compared_to_its_last_number():
    """XLA prints constants of more than ten numbers as `{...}`, if it is not told otherwise."""
    table = np.arange(100.0)
    other = np.where(table == 50, 51, table)

    def text(table, name):
        def function(x):
            return jnp.sin(x) * table

        function.__name__ = name
        return text_of(jax.jit(function).lower(jnp.ones(100)).compile())

    assert text(table, "one") == text(table.copy(), "other") != text(other, "one")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        (
            "gptlite/nn/norms.py",
            "eps: Epsilon = 1e-6",
            "eps: Epsilon = 2e-6",
            ["decode-1", "decode-4", "prefill-1", "prefill-4", "train"],
        ),
        (
            "gptlite/training/optimizer.py",
            "config.beta1, config.beta2)",
            "config.beta1, config.beta2, eps=2e-8)",
            ["train"],
        ),
        ("gptlite/nn/kernels/product.py", "_ab_on_cpu", "_as_it_lies", []),
    ],
    ids=["epsilon of a norm", "epsilon of Adam", "another name"],
)
def test_a_changed_constant_is_seen_and_a_name_is_not(tmp_path, file, old, new, changed):
    trees = [tree(tmp_path / "a"), tree(tmp_path / "b", file, old, new)]
    folders = [tmp_path / "programs-a", tmp_path / "programs-b"]
    replay.make(trees, folders, ["--configs", "default"])
    lowered = replay.different(folders, "mlir")
    replay.make(trees, folders, ["--configs", "default", "--compile", "none", *lowered])
    assert replay.different(folders, "hlo") == [f"default.cpu.{program}" for program in changed]
