"""Rows of results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specjax import analysis
from specjax.evaluation.results import apart, best_rows, lossy, select
from specjax.verification.registry import LOSSY

Row = Mapping[str, Any]
AIM = 2.0  # a best row below it is given with what holds it back


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
    shown = any("certificate" in row for row in chosen)
    if shown:
        table.add_column("certificate", no_wrap=True)
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
            *([row.get("certificate") or "–"] if shown else []),
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


def best_pair(rows: Sequence[Row], best: Row) -> str:
    """The fastest draft of this target alone, over all prompts and by category."""
    mine = [r for r in rows if r["label"] == best["label"] and r["category"] not in ("all", "all_without_loops")]
    by = ", ".join(f"{row['category'].replace('_', ' ')} {number(row['speedup'])}" for row in mine if row["speedup"])
    line = f"the best pair is {best['label']}: {with_interval(best['speedup'], best['speedup_ci'])}x, tau "
    line += with_interval(best["tau"], best["tau_ci"])
    if best.get("certificate"):
        line += f", certified {best['certificate']}"
    return line + (f"; by category {by}" if by else "")


def _spec_bench(row: Row, base: Row, accepted_n: np.ndarray) -> dict[str, Any]:
    return analysis.to_spec_bench(accepted_n, [row["tokens_per_second"]], [base["tokens_per_second"]])


CONVENTIONS: dict[str, Callable[[Row, Row, np.ndarray], dict[str, Any]]] = {
    "vllm": lambda row, base, accepted_n: analysis.to_vllm(accepted_n, len(row["accepted_histogram"]) - 1),
    "eagle": lambda row, base, accepted_n: analysis.to_eagle(accepted_n, len(row["accepted_histogram"]) - 1),
    "deepspec": lambda row, base, accepted_n: analysis.to_deepspec(accepted_n, len(row["accepted_histogram"]) - 1),
    "spec_bench": _spec_bench,
}


def convention_table(rows: Sequence[Row], name: str) -> Table:
    """The drafting rows over all prompts under the names and counts of another harness; positions of trees are depths.

    Args:
        rows: of one run.
        name: a key of `CONVENTIONS`.

    Raises:
        ValueError: the rows have no histograms: they were written before these were stored.
    """
    whole = select(apart(rows), category="all")
    table = Table(title=f"as {name} counts", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("row", overflow="fold", min_width=14)
    columns: dict[str, None] = {}
    lines: dict[str, dict[str, Any]] = {}
    for row in whole:
        if not row["num_nodes"]:
            continue
        if "accepted_histogram" not in row:
            raise ValueError(f"row {row['label']!r} has no accepted_histogram: measure again with this version")
        accepted_n = np.repeat(np.arange(len(row["accepted_histogram"])), row["accepted_histogram"])
        if not accepted_n.size or len(row["accepted_histogram"]) < 2:  # no pass, or a peer that counts none
            continue
        base = next(other for other in whole if other["label"] == row["baseline"])
        lines[named(row)] = CONVENTIONS[name](row, base, accepted_n)
        columns |= dict.fromkeys(lines[named(row)])
    for column in columns:
        table.add_column(column, justify="right")
    for label, found in lines.items():
        table.add_row(label, *(_plain(found.get(column)) for column in columns))
    return table


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return number(value, 3) if isinstance(value, float) or value is None else str(value)


def misses(rows: Sequence[Row]) -> list[str]:
    """Chains whose measured speedup is not within 10 % of the predicted one, each with the term that it is owed to.

    While decoding, measured over predicted is a product: tau over the E that the laws promise; drafts and target pass
    timed apart over the step in the loop; and plain decoding's step over its target pass timed apart.
    """
    lines = []
    whole = select(rows, category="all")
    for row in whole:
        if row["topology"] != "chain" or not row["speedup"] or not row["speedup_predicted"]:
            continue
        ratio = row["speedup"] / row["speedup_predicted"]
        base = next((other for other in whole if other["label"] == row["baseline"]), None)
        if 0.9 <= ratio <= 1.1 or base is None:
            continue
        line = f"{row['label']}: measured over predicted is {ratio:.2f}"
        if None not in (row["step_seconds"], base["step_seconds"], row["t_ratio"], row["speedup_decode_predicted"]):
            one = row["one_token_pass_seconds"]
            apart_seconds = one * (row["draft_passes"] * row["draft_cost"] + row["t_ratio"])
            expected = row["speedup_decode_predicted"] * apart_seconds / one
            terms = {
                "acceptance (tau over E)": row["tau"] / expected,
                "the step (draft and target pass apart over the step in the loop)": apart_seconds / row["step_seconds"],
                "the baseline (plain step over its target pass apart)": base["step_seconds"] / one,
            }
            most = max(terms, key=lambda name: abs(np.log(terms[name])))
            line += f", most of it {most} {terms[most]:.2f}"
        lines.append(line)
    return lines


def limit(row: Row) -> str | None:
    """What holds a chain back most, of acceptance, draft cost and the wider target pass; None where it is not known."""
    if row["topology"] != "chain" or None in (row["speedup_decode_predicted"], row["draft_cost"], row["t_ratio"]):
        return None
    drafts, wide = row["draft_passes"] * row["draft_cost"], row["t_ratio"]
    expected = row["speedup_decode_predicted"] * (drafts + wide)
    without = {
        "acceptance": (row["num_nodes"] + 1) / (drafts + wide),
        "the cost of drafts": expected / wide,
        "the wider target pass": expected / (drafts + 1),
    }
    most = max(without, key=lambda name: without[name])
    return f"held back most by {most} ({without[most]:.2f}x without)"


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
        if row["speedup"] < AIM and (held := limit(row)):
            line += f", {held}"
        without = next(iter(select(rows, label=row["label"], category="all_without_loops")), None)
        if without is None:
            line += f"; the text of all {row['prompts']} prompts loops, which flatters drafts that look text up"
        elif without["prompts"] < row["prompts"]:
            looping = row["prompts"] - without["prompts"]
            line += (
                f"; {number(without['speedup'])}x without the {looping} of {row['prompts']} prompts whose text loops"
            )
        lines.append(line)
    lines += [best_pair(rows, row) for row in best[:1]]
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
    lines += misses(rows)
    wrong = [row["label"] for row in select(rows, category="all") if row["matches_baseline"] is False]
    if wrong:
        lines.append(f"NOT EQUAL to plain greedy decoding: {', '.join(wrong)}")
    return lines
