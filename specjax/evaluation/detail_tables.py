"""Second tables of results for the terminal: what a row costs and how its text is, adaptive beside fixed lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from specjax.evaluation.results import select
from specjax.evaluation.tables import number, with_interval

Row = Mapping[str, Any]
MIB = 1 << 20
POSITIONS = 4  # of which acceptance is shown
PLAIN = {"name": "autoregressive"}


def detail_table(rows: Sequence[Row]) -> Table:
    """One line a contender, over all prompts: without looping text, acceptance by position, text, MiB of memory."""
    table = Table(title="in detail", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("row", overflow="fold", min_width=14)
    names = ("tau*", "speedup*", f"alpha 1..{POSITIONS}", "bigrams", "KV", "draft", "draft KV")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in select(rows, category="all"):
        without = next(iter(select(rows, label=row["label"], category="all_without_loops")), {})
        memory = (row.get(name) for name in ("kv_bytes_target", "draft_param_bytes", "kv_bytes_draft"))
        table.add_row(
            row["label"],
            number(without.get("tau")),
            number(without.get("speedup")),
            " ".join(number(rate) for rate in row["alpha_by_position"][:POSITIONS]) or "–",
            number(row["distinct_bigram_ratio"]),
            *(number(None if size is None else size / MIB, 1) for size in memory),
        )
    table.caption = "* without the prompts whose text loops; bigrams: distinct over all; memory in MiB"
    return table


def adaptive_table(rows: Sequence[Row], settings: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """Each adaptive row beside the best fixed length of its inner drafter, plain decoding among them, by category.

    Args:
        rows: of results.
        settings: the rows of the config, by label.

    Returns:
        None where no row is adaptive.
    """
    table = Table(title="adaptive and the best fixed length", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("row", "category", "fixed", "speedup", "adaptive", "ratio"):
        table.add_column(name, justify="left" if name in ("row", "category", "fixed") else "right", no_wrap=True)
    for key, given in settings.items():
        if given["name"] != "adaptive":
            continue
        fixed = [other for other, row in settings.items() if _drafter(row) in (_drafter(given["inner"]), PLAIN)]
        for mine in (row for row in rows if _is_of(row, key)):
            beside = [
                row
                for row in select(rows, category=mine["category"])
                if row["temperature"] == mine["temperature"] and any(_is_of(row, other) for other in fixed)
            ]
            if not beside or mine["speedup"] is None:
                continue
            best = max(beside, key=lambda row: row["speedup"] or 0.0)
            table.add_row(
                mine["label"],
                mine["category"],
                best["label"],
                with_interval(best["speedup"], best["speedup_ci"]),
                with_interval(mine["speedup"], mine["speedup_ci"]),
                number(mine["speedup"] / best["speedup"]),
            )
    return table if table.rows else None


def _drafter(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's settings without its length and rule."""
    return {key: value for key, value in row.items() if key not in ("num_nodes", "rule", "rule_options", "lossless")}


def _is_of(row: Row, key: str) -> bool:
    """Whether a row of results is one of the config's row `key`; lengths and temperatures stand behind its name."""
    return row["label"] == key or row["label"].startswith(f"{key} ")
