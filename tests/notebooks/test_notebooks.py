"""Every notebook runs from top to bottom, and stands beside the script that it is paired with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import notebooks
from specjax import build

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


@pytest.mark.parametrize("name", ["03_block_verification", "05_medusa", "16_lookahead"])
def test_rows_that_claims_are_about_are_rows_of_the_small_study(name: str) -> None:
    """A label that no row has would stand as undecided for ever."""
    text = notebooks.script(name).read_text()
    (paper,) = re.findall(r'study\("(\w+)"', text)
    rows = build.load_config(f"configs/papers/{paper}.py", "small").rows
    along = [quoted for labels in re.findall(r"rising\(\(([^)]*)\)", text) for quoted in re.findall(r'"([^"]*)"', labels)]
    pairs = [label for pair in re.findall(r'compare\("(\w+)", "(\w+)"', text) for label in pair]
    asked = {label.partition(" T=")[0] for label in (*along, *pairs)}
    assert asked and asked <= set(rows)


@pytest.mark.parametrize("name", ["11_eagle_ablation", "12_eagle3_ablation", "13_distillspec"])
def test_pairs_that_claims_are_about_are_trained_by_the_small_study(name: str) -> None:
    text = notebooks.script(name).read_text()
    asked = set(re.findall(r'paired\("(\w+)"', text))
    assert re.findall(r'study\("(\w+)"', text) == ["ablations"]
    assert asked and asked <= set(build.load_config("configs/ablations.py", "smollm2,small").only)


def test_a_notebook_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="no notebook '99_none'; there are 00_one_token_per_pass, 01_leviathan"):
        notebooks.script("99_none")


def printed(notebook: Any) -> str:
    """Everything that its cells wrote; pictures differ in their bytes between versions of matplotlib."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")
