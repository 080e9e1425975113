"""The notebooks run from top to bottom, and are kept without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
QUICK = ("01_load_generate_inspect.ipynb",)
TIMEOUT_S = 600  # of one cell; the whole notebook takes less than two minutes on two quiet cores


def test_the_quick_notebooks_are_there():
    assert set(QUICK) < {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=() if p.name in QUICK else pytest.mark.slow) for p in NOTEBOOKS]
)
def test_notebook_runs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3").execute()
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert codes and all(cell.execution_count for cell in codes)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)
