"""Runs the notebooks: python -m experiments.notebooks [NAME ...]

Each script notebooks/NAME.py runs from top to bottom, and what it shows is written to NAME.ipynb beside it; all
of them where none is named. Needs the extra `notebooks`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import _main

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
TIMEOUT = 600  # seconds a cell


def main(arguments: Sequence[str]) -> None:
    """Runs and writes what is named.

    Raises:
        FileNotFoundError: no notebook of that name; lists those there are.
        ImportError: a package of the extra is missing.
    """
    parser = argparse.ArgumentParser("python -m experiments.notebooks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="the script's name without .py")
    console = _main.console()
    import jupytext
    import nbformat

    paths = [script(name) for name in parser.parse_args(arguments).names] or scripts()
    with kernel() as manager:
        for path in paths:
            start = time.perf_counter()
            notebook = nbformat.from_dict(jupytext.read(path))
            run(notebook, manager, path.parent)
            nbformat.write(notebook, path.with_suffix(".ipynb"))
            console.print(f"{path.stem}: {time.perf_counter() - start:.1f} s", highlight=False)


def scripts() -> list[Path]:
    """All notebooks, as scripts."""
    return sorted(FOLDER.glob("*.py"))


def script(name: str) -> Path:
    """The script of a notebook."""
    path = FOLDER / f"{name}.py"
    if not path.is_file():
        known = ", ".join(path.stem for path in scripts())
        raise FileNotFoundError(f"no notebook {name!r}; there are {known}")
    return path


@contextlib.contextmanager
def kernel() -> Iterator[Any]:
    """One kernel for several notebooks: what takes time is importing the library."""
    import jupyter_client

    manager = jupyter_client.KernelManager(kernel_name="python3")
    try:
        yield manager
    finally:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def run(notebook: Any, manager: Any, folder: Path) -> None:
    """Runs a notebook in its folder, without the names of those that ran before it; its outputs are replaced.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbclient
    import nbformat

    fresh = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
    for one in (fresh, notebook):
        where = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(one, km=manager, timeout=TIMEOUT, resources=where).execute()


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
