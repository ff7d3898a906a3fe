"""The tour as a page. (That it gives what it shows takes a minute: `.ci/run tour` sees to that.)"""

import json

import pytest
from conftest import ROOT

FILE = ROOT / "examples" / "tour.ipynb"
CELLS = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_cells_are_short():
    assert len(CELLS) > 30
    for cell in CELLS:
        assert len(cell["source"]) <= 25
        assert max(map(len, cell["source"])) <= 110
    for cell in CODE:
        python = [line for line in cell["source"] if not line.startswith("%")]
        compile("".join(python), "cell", "exec")


def test_results_are_those_of_one_pass_from_top_to_bottom():
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert {output.get("name") for output in outputs} == {"stdout", None}  # no warnings
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3


@pytest.mark.parametrize("words", ["First Citizen:", "characters, 65 different ones"])
def test_results_are_those_of_tiny_shakespeare(words):
    assert words in FILE.read_text(encoding="utf-8")


def test_the_file_is_small_and_says_nothing_of_a_machine():
    assert FILE.stat().st_size < 300_000
    # Times of execution would differ with every pass.
    assert not any("execution" in cell["metadata"] for cell in CELLS)
    assert str(ROOT) not in FILE.read_text(encoding="utf-8")
