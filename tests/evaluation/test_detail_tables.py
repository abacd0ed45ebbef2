"""What the second tables of the terminal say."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from specjax.evaluation.detail_tables import adaptive_table, detail_table

INNER = {"name": "draft_model", "source": "some", "num_nodes": 4}
SETTINGS = {
    "plain": {"name": "autoregressive"},
    "draft": {**INNER, "num_nodes": (2, 4), "rule": ""},
    "bad": {**INNER, "source": "other"},
    "adaptive": {"name": "adaptive", "inner": INNER, "widths": (0, 2, 4)},
}


def row(label: str, category: str = "all", **fields: Any) -> dict[str, Any]:
    made = {
        "label": label,
        "category": category,
        "temperature": 0.0,
        "tau": 2.0,
        "speedup": 1.5,
        "speedup_ci": None,
        "alpha_by_position": [0.8, 0.6, None],
        "distinct_bigram_ratio": 0.7,
        "kv_bytes_target": 3 << 20,
        "kv_bytes_draft": 0,
        "draft_param_bytes": 12 << 20,
    }
    return made | fields


def printed(table: Table | None) -> list[str]:
    assert table is not None
    stream = io.StringIO()
    Console(file=stream, width=100).print(table)
    return [" ".join(line.split()) for line in stream.getvalue().splitlines()]


def test_memory_text_and_positions():
    rows = [row("draft"), row("draft", "all_without_loops", tau=1.75, speedup=1.25), row("plain", alpha_by_position=[])]
    lines = printed(detail_table(rows))
    assert "draft 1.75 1.25 0.80 0.60 – 0.70 3.0 12.0 0.0" in lines
    assert "plain – – – 0.70 3.0 12.0 0.0" in lines


def test_adaptive_beside_the_best_fixed_length_by_category():
    rows = [
        row(label, category, speedup=speedup)
        for category, speedups in {"all": (1.0, 1.4, 1.6, 2.0, 1.52), "code": (1.0, 0.8, 0.7, 2.0, 0.98)}.items()
        for label, speedup in zip(("plain", "draft 2", "draft 4", "bad", "adaptive"), speedups, strict=True)
    ]
    lines = printed(adaptive_table(rows, SETTINGS))
    # Another drafter is no comparison; plain decoding is the best length where drafting does not pay.
    assert "adaptive all draft 4 1.60 1.52 0.95" in lines and "adaptive code plain 1.00 0.98 0.98" in lines
    assert adaptive_table(rows, {key: SETTINGS[key] for key in ("plain", "draft")}) is None
