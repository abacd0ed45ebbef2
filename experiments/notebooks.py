"""Runs the notebooks: python -m experiments.notebooks [NAME ...]

Each script notebooks/NAME.py runs from top to bottom, and what it shows is written to NAME.ipynb beside it; all
of them where none is named. Needs the extra `notebooks`.

    --rerun    measures again what a notebook reads (its RERUN = True), which takes hours; what is written then shows it
    --timeout  seconds a cell, 600 by default, 0 for no limit, which is the default with --rerun
"""

from __future__ import annotations

import argparse
import contextlib
import re
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
    parser.add_argument("--rerun", action="store_true")
    parser.add_argument("--timeout", type=int, metavar="SECONDS")
    options, console = parser.parse_args(arguments), _main.console()
    timeout = options.timeout if options.timeout is not None else 0 if options.rerun else TIMEOUT
    import jupytext
    import nbformat

    paths = [script(name) for name in options.names] or scripts()
    with kernel() as manager:
        for path in paths:
            start = time.perf_counter()
            notebook = nbformat.from_dict(jupytext.read(path))
            shown = [cell.source for cell in notebook.cells]
            if options.rerun:
                rerun(notebook)
            run(notebook, manager, path.parent, timeout)
            for cell, source in zip(notebook.cells, shown, strict=True):
                cell.source = source
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


def rerun(notebook: Any) -> None:
    """Sets RERUN where a notebook has it; one that has not reads nothing that could be measured again."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"^RERUN = False$", "RERUN = True", cell.source, flags=re.MULTILINE)


def run(notebook: Any, manager: Any, folder: Path, timeout: int = TIMEOUT) -> None:
    """Runs a notebook in its folder, without the names of those that ran before it; its outputs are replaced.

    Args:
        notebook: as read.
        manager: of the kernel.
        folder: it runs in.
        timeout: seconds a cell, 0 for no limit.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbclient
    import nbformat

    fresh = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])
    for one in (fresh, notebook):
        where = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(one, km=manager, timeout=timeout or None, resources=where).execute()


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
