"""Every notebook runs from top to bottom, and stands beside the script that it is paired with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    nbformat = pytest.importorskip("nbformat")
    return request.param, nbformat.read(request.param, as_version=4)


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in (ROOT / "notebooks").glob("*.py")} != set()


def test_it_says_what_its_script_says(notebook: tuple[Path, Any]) -> None:
    jupytext = pytest.importorskip("jupytext")
    path, found = notebook
    script = jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in found.cells] == [(c.cell_type, c.source) for c in script.cells]


def test_it_runs_and_shows_what_was_committed(notebook: tuple[Path, Any]) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    path, found = notebook
    before = printed(found)
    nbclient.NotebookClient(found, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert before and printed(found) == before


def printed(notebook: Any) -> str:
    """Everything that its cells wrote; pictures differ in their bytes between versions of matplotlib."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")
