"""Every notebook runs from top to bottom, and stands beside the script that it is paired with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    nbformat = pytest.importorskip("nbformat")
    return request.param, nbformat.read(request.param, as_version=4)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One kernel for all notebooks: what takes time is importing the library."""
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("jupyter_client")
    manager = client.KernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        manager.shutdown_kernel(now=True)


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in (ROOT / "notebooks").glob("*.py")} != set()


def test_it_says_what_its_script_says(notebook: tuple[Path, Any]) -> None:
    jupytext = pytest.importorskip("jupytext")
    path, found = notebook
    script = jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in found.cells] == [(c.cell_type, c.source) for c in script.cells]


def test_it_runs_and_shows_what_was_committed(notebook: tuple[Path, Any], kernel: Any) -> None:
    path, found = notebook
    before = printed(found)
    execute(path, fresh(), kernel)
    execute(path, found, kernel)
    assert before and printed(found) == before


def fresh() -> Any:
    """A notebook that forgets all names of the one before."""
    import nbformat

    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])


def execute(path: Path, notebook: Any, kernel: Any) -> None:
    """Runs it in its directory."""
    nbclient = pytest.importorskip("nbclient")
    nbclient.NotebookClient(
        notebook, km=kernel, timeout=120, resources={"metadata": {"path": str(path.parent)}}
    ).execute()


def printed(notebook: Any) -> str:
    """Everything that its cells wrote; pictures differ in their bytes between versions of matplotlib."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")
