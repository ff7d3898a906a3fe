"""The tour as a page of the site, with its results: `python .ci/tour_page.py NOTEBOOK FOLDER`."""

import re
import sys
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

notebook, folder = map(Path, sys.argv[1:])
cells = nbformat.read(notebook, as_version=4)
for cell in cells.cells:
    if cell.cell_type == "markdown":
        # MathML, which browsers draw by themselves: what draws LaTeX would come from elsewhere.
        cell.source = re.sub(
            r"(\$\$?)(.+?)\1", lambda found: convert(found[2]), cell.source, flags=re.DOTALL
        )
page, resources = MarkdownExporter(preprocessors=[CoalesceStreamsPreprocessor]).from_notebook_node(
    cells, {"output_files_dir": f"{notebook.stem}_files"}
)
(folder / notebook.with_suffix(".md").name).write_text(page, encoding="utf-8")
for name, picture in resources["outputs"].items():
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(picture)
