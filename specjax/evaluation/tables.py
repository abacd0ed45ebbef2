"""Rows of results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specjax.evaluation.results import apart, best_rows, lossy, select
from specjax.verification.registry import LOSSY

Row = Mapping[str, Any]


def headline_table(rows: Sequence[Row]) -> Table:
    """One line a contender, over all prompts."""
    rows = apart(rows)
    chosen = select(rows, category="all")
    best = {(row["label"]) for row in best_rows(rows)[:1]}
    batches = ", ".join(str(batch) for batch in dict.fromkeys(row["batch"] for row in chosen))
    title = f"all {chosen[0]['prompts']} prompts, batch {batches}" if chosen else "no rows"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("row", overflow="fold", min_width=14)
    for name in ("tau", "alpha", "c", "t ratio", "tok/s", "speedup", "predicted", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in chosen:
        table.add_row(
            named(row),
            number(row["tau"]),
            number(row["alpha"]),
            number(row["draft_cost"], 3),
            number(row["t_ratio"]),
            number(row["tokens_per_second"], 1),
            with_interval(row["speedup"], row["speedup_ci"]),
            number(row["speedup_predicted"]),
            equality(row),
            style="bold" if row["label"] in best else None,
        )
    return table


def category_table(rows: Sequence[Row], value: str = "speedup") -> Table:
    """One line a contender, one column a category."""
    rows = apart(rows)
    categories = [c for c in dict.fromkeys(row["category"] for row in rows) if c != "all"]
    table = Table(title=f"{value} by category", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("row", overflow="fold", min_width=14)
    for category in categories:
        table.add_column(category.replace("_", " "), justify="right")
    for label in dict.fromkeys(row["label"] for row in rows):
        cells = [next(iter(select(rows, label=label, category=c)), {}).get(value) for c in categories]
        table.add_row(label, *(number(cell) for cell in cells))
    return table


def named(row: Row) -> str:
    """A row's label; a lossy one says so."""
    return f"{row['label']} (lossy)" if lossy(row) else row["label"]


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """A value and its interval, where it has one."""
    if value is None or interval is None or interval[0] == interval[1]:
        return number(value)
    return f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def equality(row: Row) -> str:
    """Whether greedy text equals plain decoding's, in a word."""
    if row["matches_baseline"] is None or row["label"] == row["baseline"]:
        return "–"
    if not row["matches_baseline"]:
        return "NO"
    return "yes" if not row["near_ties"] else f"yes, {row['near_ties']} near-ties"


def findings(rows: Sequence[Row]) -> list[str]:
    """The result in sentences: the best draft length of each method, what held it back, what loops do to it."""
    rows = apart(rows)
    lines, best, several = [], best_rows(rows), len({row["batch"] for row in rows}) > 1
    if best and best[0]["speedup"] < 1:
        lines.append("no drafter was faster than plain decoding here")
    for row in best:
        line = f"{row['method']} at temperature {row['temperature']:g}"
        line += f", batch {row['batch']}" if several else ""
        line += f": best with {row['num_nodes']} draft tokens, "
        line += f"{with_interval(row['speedup'], row['speedup_ci'])}x"
        if row["speedup_predicted"]:
            line += f" (predicted {row['speedup_predicted']:.2f}x)"
        without = next(iter(select(rows, label=row["label"], category="all_without_loops")), None)
        if without is None:
            line += f"; the text of all {row['prompts']} prompts loops, which flatters drafts that look text up"
        elif without["prompts"] < row["prompts"]:
            looping = row["prompts"] - without["prompts"]
            line += (
                f"; {number(without['speedup'])}x without the {looping} of {row['prompts']} prompts whose text loops"
            )
        lines.append(line)
    for row in select(rows, category="all"):
        if row["method"].startswith("transformers"):
            ratio = with_interval(row["baseline_over_this"], row["baseline_over_this_ci"])
            lines.append(f"{row['baseline']} runs at {ratio}x the tokens/s of {row['label']}")
    lines += [
        f"{row['label']} is lossy ({row['rule'].removesuffix(LOSSY)}): its "
        f"{with_interval(row['speedup'], row['speedup_ci'])}x are of text under another law than the target's"
        for row in select(rows, category="all")
        if lossy(row)
    ]
    wrong = [row["label"] for row in select(rows, category="all") if row["matches_baseline"] is False]
    if wrong:
        lines.append(f"NOT EQUAL to plain greedy decoding: {', '.join(wrong)}")
    return lines
