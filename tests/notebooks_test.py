"""Notebooks run from top to bottom, and are kept without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv(
        "JAX_DISABLE_MOST_OPTIMIZATIONS", "1"
    )  # the kernel compiles more than it runs
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    drawn = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(drawn) >= 4
