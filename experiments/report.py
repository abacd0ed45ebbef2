"""Reports on finished runs: python -m experiments.report runs/*

Merges the results.json of benchmark runs into one page that needs no server (--out, report.html by default), and prints
them. Directories without one (of training runs, for instance) are named and left out. With --table it prints that table
instead, as --format says:

    python -m experiments.report runs/a runs/b --table=methods_by_dataset --format=latex

    --table   methods_by_dataset: speedup / tau of every row on every category, the mean, the best in bold;
              intervals_by_dataset: the same with the speedups' intervals
    --format  terminal, latex (booktabs), markdown or csv
    --convention  prints drafting rows as vllm, eagle, deepspec or spec_bench count them, in place of the page
    --certificates  certificates.json of experiments.exactness: verdicts stand beside rows of their drafter and rule
    --out     where the page, or the table, is written; a table is printed when it is left out
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath
from rich.console import Console

from experiments import _main
from experiments._arguments import Parser
from specjax.evaluation import grid, tables
from specjax.evaluation.grid import Grid, Run
from specjax.evaluation.report import merged_page
from specjax.evaluation.results import read_results
from specjax.verification.registry import LOSSY

TABLES: dict[str, Callable[[Sequence[Run]], Grid]] = {
    "methods_by_dataset": grid.methods_by_dataset,
    "intervals_by_dataset": grid.with_intervals,
}
FORMATS = ("terminal", *grid.FORMATS)
PAGE = "report.html"


def main(arguments: Sequence[str]) -> None:
    """Reads the runs, then prints or writes what is asked for.

    Raises:
        FileNotFoundError: no run was named, or none holds a results.json.
        ValueError: an unknown option, or no file is a benchmark's results of this version.
    """
    options = _parser().parse_args(arguments)
    runs = read_runs(options.runs)
    if options.certificates:
        runs = certified(runs, epath.Path(options.certificates))
    if options.table:
        show_table(TABLES[options.table](runs), options.format, options.out)
        return
    if options.convention:
        if options.out or options.format != "terminal":
            raise ValueError("--convention prints to the terminal alone; leave --format and --out out")
        for run in runs:
            _main.console().print(run.name, style="bold", highlight=False)
            wide = Console(width=None if sys.stdout.isatty() else 240)
            wide.print(tables.convention_table(run.rows, options.convention))
        return
    if options.format != "terminal":
        raise ValueError(f"--format={options.format} is of a table: add --table={next(iter(TABLES))}")
    console = _main.console()
    for run in runs:
        console.print(run.name, style="bold", highlight=False)
        console.print(tables.headline_table(run.rows))
        for line in tables.findings(run.rows):
            console.print(line, highlight=False, markup=False)
    out = epath.Path(options.out or PAGE)
    out.write_text(merged_page(runs, title="specjax benchmark runs"))
    console.print(f"page: {out}", highlight=False)


def certified(runs: Sequence[Run], path: epath.Path) -> list[Run]:
    """The runs, each row with what was certified of its drafter and rule.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds no certificates.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no certificates at {path}; expected certificates.json of experiments.exactness")
    try:
        found = [row for row in json.loads(path.read_text())["rows"] if row["planted"] is None]
        said: dict[tuple[str, str], list[str]] = {
            (row["drafter"], row["rule"].removesuffix(LOSSY)): [] for row in found
        }
        for row in found:
            said[row["drafter"], row["rule"].removesuffix(LOSSY)].append(row["verdict"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no certificates ({error!r}); expected a file of experiments.exactness"
        ) from error

    def verdict(row: Mapping[str, Any]) -> str | None:
        verdicts = said.get((row["method"], row["rule"].removesuffix(LOSSY)))
        if verdicts is None:
            return None
        worst = next((v for v in ("fail", "lossy") if v in verdicts), "pass")
        return f"{worst}, {verdicts.count(worst)} of {len(verdicts)}"

    return [dataclasses.replace(run, rows=[{**row, "certificate": verdict(row)} for row in run.rows]) for run in runs]


def read_runs(paths: Sequence[str]) -> list[Run]:
    """The runs at these directories or results files, with names that differ; says on stderr which are none.

    Raises:
        FileNotFoundError: none was named, or the first of them holds no results.json and no other does.
        ValueError: one is named twice, or likewise none is a benchmark's results of this version.
    """
    if not paths:
        raise FileNotFoundError("no runs were named; expected run directories of experiments.benchmark, such as runs/*")
    files = [path / "results.json" if path.is_dir() else path for path in map(epath.Path, paths)]
    names = _names([file.parent for file in files])
    runs: list[Run] = []
    wrong: list[Exception] = []
    for name, file in zip(names, files, strict=True):
        try:
            runs.append(grid.run_of(name, read_results(file)))
        except (FileNotFoundError, NotADirectoryError, ValueError) as error:
            wrong.append(error)
    if not runs:
        raise wrong[0]
    for reason in wrong:
        print(f"left out: {_main.one_line(reason)}", file=sys.stderr)
    return runs


def show_table(made: Grid, style: str, out: str | None) -> None:
    """Prints or writes a table."""
    if style == "terminal" and out:
        raise ValueError("--out needs a --format that is a file's: latex, markdown or csv")
    if style == "terminal":
        console = Console(width=None if sys.stdout.isatty() else 40 + 18 * len(made.columns))
        console.print(grid.as_table(made))
        console.print(made.caption, highlight=False, markup=False)
        return
    text = grid.FORMATS[style](made)
    if out:
        epath.Path(out).write_text(text)
    else:
        sys.stdout.write(text)


def _names(folders: Sequence[epath.Path]) -> list[str]:
    """The last parts of each path, as many as tell them all apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) != len(parts):
        twice = next(folder for i, folder in enumerate(folders) if parts[i] in parts[:i])
        raise ValueError(f"the run {twice} is named twice; name each once")
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m experiments.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directory, or its results.json")
    parser.add_argument("--table", choices=tuple(TABLES))
    parser.add_argument("--convention", choices=tuple(tables.CONVENTIONS))
    parser.add_argument("--format", choices=FORMATS, default="terminal")
    parser.add_argument("--certificates", metavar="PATH")
    parser.add_argument("--out", metavar="PATH")
    return parser


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
