"""The tour as a page. (That it runs from top to bottom takes a minute: `.ci/run` sees to that.)"""

import json

from conftest import ROOT

CELLS = json.loads((ROOT / "examples" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]


def test_cells_are_short_and_have_no_outputs():
    assert len(CELLS) > 30
    for cell in CELLS:
        assert len(cell["source"]) <= 25
        assert max(map(len, cell["source"])) <= 110
        if cell["cell_type"] == "code":
            python = [line for line in cell["source"] if not line.startswith("%")]
            compile("".join(python), "cell", "exec")
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
