"""Each notebook runs end to end on small shapes, and its committed, executed form has the same source."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="the extra `notebooks` is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.py"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_notebook_runs(notebook: Path, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLLM_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(notebook.parents[1]), os.environ.get("PYTHONPATH", "")]))
    document = jupytext.read(notebook)
    nbclient.NotebookClient(document, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [out for cell in document.cells for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
    assert pictures


def test_committed_form_is_executed_and_has_the_same_source(notebook: Path) -> None:
    executed = nbformat.read(notebook.with_suffix(".ipynb"), as_version=4)
    source = jupytext.read(notebook)
    assert [(cell.cell_type, cell.source) for cell in executed.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ], "run `make notebooks`"
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not re.search("/(home|root|tmp|Users)/", str(outputs))
