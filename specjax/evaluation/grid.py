"""Methods by data set, speedup / tau in each cell as the papers print it: for the terminal, LaTeX, Markdown and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from specjax.evaluation.results import lossy, select
from specjax.evaluation.tables import number, with_interval

# Rows over several categories; the rest are data sets.
SUMMARIES = ("all", "all_without_loops")
MEAN = "mean"
VALUES = ("speedup", "tau")
# What makes two rows of one label the same contender.
IDENTITY = ("method", "rule", "num_nodes", "topology", "top_k", "top_p", "draft_param_bytes", "layout")
# LaTeX's special characters.
LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One results file.

    Attributes:
        name: what tells it apart, its directory's name for instance.
        meta: of the file.
        rows: of the file.
    """

    name: str
    meta: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def target(self) -> str:
        """What was decoded with."""
        return str(self.meta["config"]["target"]["source"])


@dataclasses.dataclass(frozen=True)
class Line:
    """One contender: by column, and by `speedup` or `tau` within it, a number or None; and the speedups' intervals.

    A lossy one says so in its label, and is the best of nothing.
    """

    label: str
    cells: Mapping[str, Mapping[str, float | None]]
    lossy: bool = False
    intervals: Mapping[str, Sequence[float] | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Block:
    """Contenders that may be compared: one target, temperature and batch size."""

    target: str
    temperature: float
    batch: int
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        """In words."""
        return f"{self.target}, T = {self.temperature:g}, batch {self.batch}"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks over the same columns.

    Attributes:
        columns: data sets, the mean last.
        blocks: in order of target, temperature and batch.
        caption: what the numbers count.
        intervals: whether a speedup is shown with its interval.
    """

    columns: tuple[str, ...]
    blocks: tuple[Block, ...]
    caption: str
    intervals: bool = False


@dataclasses.dataclass
class _Contender:
    """One label of one run, by category; above batch 1, where no category has a time, also over all prompts."""

    run: str
    identity: tuple[Any, ...]
    lossy: bool
    whole: float | None
    cells: dict[str, dict[str, float | None]] = dataclasses.field(default_factory=dict)
    intervals: dict[str, Sequence[float] | None] = dataclasses.field(default_factory=dict)


def methods_by_dataset(runs: Sequence[Run]) -> Grid:
    """One line a contender, one column a category, and the mean over the columns, each weighing the same.

    A contender of the same label and settings in several runs is one line where they measured different categories, and
    one line a run, named by it, where they measured the same. The mean is left out where a column is missing. Above
    batch 1 only all prompts together have a time: the speedup in the place of the mean is theirs.

    Raises:
        ValueError: no run has a row of a category.
    """
    blocks: dict[tuple[str, float, int], dict[str, list[_Contender]]] = {}
    columns: dict[str, None] = {}
    for run in runs:
        batched = [row for row in select(run.rows, category="all") if row["batch"] > 1]
        whole = {(row["label"], row["temperature"], row["batch"]): row["speedup"] for row in batched}
        for row in run.rows:
            if row["category"] in SUMMARIES:
                continue
            columns[row["category"]] = None
            block = blocks.setdefault((run.target, row["temperature"], row["batch"]), {})
            found = block.setdefault(row["label"], [])
            if not found or found[-1].run != run.name:
                identity = (*(row.get(name) for name in IDENTITY), *_settings(run))
                together = whole.get((row["label"], row["temperature"], row["batch"]))
                found.append(_Contender(run.name, identity, lossy(row), together))
            found[-1].cells[row["category"]] = {value: row[value] for value in VALUES}
            found[-1].intervals[row["category"]] = row["speedup_ci"]
    if not columns:
        raise ValueError(f"the runs {', '.join(run.name for run in runs) or '(none)'} hold no rows of any category")
    made = tuple(
        Block(*key, tuple(line for label, found in block.items() for line in _lines(label, _merged(found), columns)))
        for key, block in sorted(blocks.items())
    )
    return Grid((*columns, MEAN), made, caption(runs))


def with_intervals(runs: Sequence[Run]) -> Grid:
    """`methods_by_dataset`, each speedup of a data set with its interval, bootstrapped over the prompts."""
    made = methods_by_dataset(runs)
    return dataclasses.replace(made, caption=f"{made.caption} In brackets 95 % intervals over prompts.", intervals=True)


def caption(runs: Sequence[Run]) -> str:
    """What is in a cell, with the definitions that the results carry."""
    definitions: Mapping[str, str] = runs[0].meta.get("definitions", {}) if runs else {}
    said = " ".join(f"{name}: {definitions[name]}." for name in VALUES if name in definitions)
    what = "Speedup / tau by data set; the mean weighs each data set the same, above batch 1 its speedup is of all "
    return f"{what}prompts together; the best lossless in bold. {said}".strip()


def is_best(block: Block, line: Line, column: str, value: str) -> bool:
    """Whether no lossless line has a higher value in the column, as printed; never of a lossy line."""
    found = [cell for one in block.lines if not one.lossy and (cell := one.cells[column][value]) is not None]
    mine = line.cells[column][value]
    return mine is not None and not line.lossy and round(mine, 2) == round(max(found), 2)


def as_table(grid: Grid) -> Table:
    """For the terminal."""
    table = Table(title="speedup / tau", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold", min_width=14)
    for column in grid.columns:
        table.add_column(_words(column), justify="right")
    for block in grid.blocks:
        table.add_row(f"[italic]{escape(block.title)}[/italic]")
        for line in block.lines:
            table.add_row(escape(line.label), *_cells(grid, block, line, "[bold]{}[/bold]".format, "–"))
    return table


def as_markdown(grid: Grid) -> str:
    """A GitHub table a block, captioned."""
    parts = []
    for block in grid.blocks:
        lines = [f"**{_markdown(block.title)}**", ""]
        lines.append("| | " + " | ".join(_markdown(_words(column)) for column in grid.columns) + " |")
        lines.append("|---|" + "---:|" * len(grid.columns))
        for line in block.lines:
            cells = _cells(grid, block, line, "**{}**".format, "–")
            lines.append(f"| {_markdown(line.label)} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, grid.caption]) + "\n"


def as_latex(grid: Grid) -> str:
    """A table for the package booktabs."""
    width = len(grid.columns) + 1
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(grid.caption)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(grid.columns)}}}", r"\toprule"]
    lines.append(" & ".join(["", *(_latex(_words(column)) for column in grid.columns)]) + r" \\")
    for block in grid.blocks:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{l}}{{\emph{{{_latex(block.title)}}}}} \\"]
        for line in block.lines:
            cells = _cells(grid, block, line, r"\textbf{{{}}}".format, "--")
            lines.append(" & ".join([_latex(line.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def as_csv(grid: Grid) -> str:
    """Every number as it was stored, two columns a data set; nothing is rounded or marked."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = [(column, value) for column in grid.columns for value in VALUES]
    writer.writerow(["target", "temperature", "batch", "row", *(f"{c} {v}" for c, v in numbers)])
    for block in grid.blocks:
        for line in block.lines:
            values = [line.cells[column][value] for column, value in numbers]
            start = [block.target, block.temperature, block.batch, line.label]
            writer.writerow([*start, *("" if value is None else repr(value) for value in values)])
    return out.getvalue()


def _settings(run: Run) -> tuple[str, ...]:
    """What of a run makes its contenders others than those of the same name elsewhere: drafts, budget, machine."""
    config = run.meta["config"]
    parts = config.get("rows"), config.get("max_new_tokens"), run.meta.get("machine")
    return tuple(json.dumps(part, sort_keys=True) for part in parts)


def _merged(found: Sequence[_Contender]) -> list[_Contender]:
    """Runs of the same contender over different data sets become one."""
    merged: list[_Contender] = []
    for one in found:
        for other in merged:
            if other.identity == one.identity and not other.cells.keys() & one.cells.keys():
                other.cells |= one.cells
                other.intervals |= one.intervals
                other.whole = None
                break
        else:
            merged.append(dataclasses.replace(one, cells=dict(one.cells), intervals=dict(one.intervals)))
    return merged


def _lines(label: str, found: Sequence[_Contender], columns: Mapping[str, None]) -> list[Line]:
    none: dict[str, float | None] = dict.fromkeys(VALUES)
    lines = []
    for one in found:
        cells = {column: one.cells.get(column, none) for column in columns}
        cells[MEAN] = {value: _mean([cell[value] for cell in cells.values()]) for value in VALUES}
        if one.whole is not None:
            cells[MEAN]["speedup"] = one.whole
        notes = [*(["lossy"] if one.lossy else []), *([one.run] if len(found) > 1 else [])]
        lines.append(Line(" ".join([label, *(f"({note})" for note in notes)]), cells, one.lossy, one.intervals))
    return lines


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _cells(grid: Grid, block: Block, line: Line, bold: Callable[[str], str], missing: str) -> list[str]:
    """One text a column, the best of the block in bold."""
    texts = []
    for column in grid.columns:
        pair = []
        for name in VALUES:
            value = line.cells[column][name]
            text = missing if value is None else number(value)
            if name == "speedup" and grid.intervals:
                text = with_interval(value, line.intervals.get(column)) if value is not None else missing
            pair.append(bold(text) if is_best(block, line, column, name) else text)
        texts.append(" / ".join(pair) if pair != [missing, missing] else missing)
    return texts


def _words(column: str) -> str:
    return column.replace("_", " ")


def _latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in text)


def _markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;")


FORMATS: dict[str, Callable[[Grid], str]] = {"latex": as_latex, "markdown": as_markdown, "csv": as_csv}


def run_of(name: str, document: Mapping[str, Any]) -> Run:
    """A run from a results file's contents."""
    return Run(name, document["meta"], document["rows"])


def overview(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The rows over all prompts of every run, each with its run's name and target."""
    return [{"run": run.name, "target": run.target, **row} for run in runs for row in select(run.rows, category="all")]
