"""Every notebook runs from top to bottom, and stands beside the script that it is paired with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import notebooks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    nbformat = pytest.importorskip("nbformat")
    return request.param, nbformat.read(request.param, as_version=4)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    for needed in ("ipykernel", "jupyter_client", "nbclient"):
        pytest.importorskip(needed)
    with notebooks.kernel() as manager:
        yield manager


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in notebooks.scripts()} != set()


def test_it_says_what_its_script_says(notebook: tuple[Path, Any]) -> None:
    jupytext = pytest.importorskip("jupytext")
    path, found = notebook
    script = jupytext.read(path.with_suffix(".py"))
    assert [(c.cell_type, c.source) for c in found.cells] == [(c.cell_type, c.source) for c in script.cells]


def test_it_runs_and_shows_what_was_committed(notebook: tuple[Path, Any], kernel: Any) -> None:
    path, found = notebook
    before = printed(found)
    notebooks.run(found, kernel, path.parent)
    assert before and printed(found) == before


def test_a_notebook_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="no notebook '99_none'; there are 00_one_token_per_pass, 01_leviathan"):
        notebooks.script("99_none")


def printed(notebook: Any) -> str:
    """Everything that its cells wrote; pictures differ in their bytes between versions of matplotlib."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")
