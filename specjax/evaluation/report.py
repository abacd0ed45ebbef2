"""Results as HTML pages that need nothing but themselves: one of a run, one of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.evaluation import figures, grid, markup, tables
from specjax.evaluation.figures import Point
from specjax.evaluation.markup import Cell, cell, escape, section
from specjax.evaluation.results import apart, best_rows, select

Row = Mapping[str, Any]
PROVENANCE = ("created", "commit", "machine", "versions", "precision", "config")


@dataclass(frozen=True)
class ColouredText:
    """A text whose pieces say whether they were drafted.

    Attributes:
        title: what it is.
        question: the user's turn.
        pieces: `(text, accepted from the draft)` in order.
    """

    title: str
    question: str
    pieces: tuple[tuple[str, bool], ...]


def page(
    meta: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    title: str,
    definitions: Mapping[str, str],
    texts: Sequence[Mapping[str, Any]] = (),
    coloured: Sequence[ColouredText] = (),
) -> str:
    """One run as HTML; every text that a model or a user wrote is escaped.

    Args:
        meta: of the results.
        rows: of the results.
        title: heading.
        definitions: what each number counts.
        texts: of the run's tokens.json, for acceptance by prompt.
        coloured: texts to show with their drafted tokens marked.
    """
    rows = apart(rows)
    whole = select(rows, category="all")
    points = prompt_points(texts)
    return markup.document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(line)}</p>" for line in tables.findings(rows)),
            markup.image(figures.plot(rows), "speedup and tau of every row"),
            section("All prompts", _headline(whole, rows)),
            section("Speedup by category", _by_category(rows, "speedup")),
            section("tau by category", _by_category(rows, "tau")),
            *_findings_in_depth(rows),
            section("Where the time of a step goes", _step(whole)),
            section(
                "Entropy and acceptance by prompt",
                markup.image(figures.entropy_plot(points), "alpha against the target's entropy"),
                _by_prompt(points),
            ),
            *_texts(coloured),
            section("What is counted", markup.definitions(definitions)),
            section("Where this comes from", _provenance(meta)),
        ],
    )


def merged_page(runs: Sequence[grid.Run], *, title: str) -> str:
    """Several runs as one page.

    Args:
        runs: at least one; their names differ.
        title: heading.

    Raises:
        ValueError: no runs.
    """
    if not runs:
        raise ValueError("there are no runs to report; expected at least one")
    rows = apart(_named(runs))
    whole = select(rows, category="all")
    categories = any(row["category"] not in grid.SUMMARIES for row in rows)
    definitions = {name: said for run in runs for name, said in run.meta.get("definitions", {}).items()}
    return markup.document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            *(f"<p>{escape(run.name)}: {escape(line)}</p>" for run in runs for line in tables.findings(run.rows)),
            section("All prompts of every run", _headline(whole, rows, run=True)),
            section("Speedup / tau by data set", _block(grid.methods_by_dataset(runs)) if categories else ""),
            markup.image(figures.plot(rows), "speedup and tau of every row"),
            *_findings_in_depth(rows),
            section("What is counted", markup.definitions(definitions)),
            section("Where this comes from", *(f"<h3>{escape(run.name)}</h3>{_provenance(run.meta)}" for run in runs)),
        ],
    )


def prompt_points(texts: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Entropy and acceptance of every drafting row on every prompt, its turns together.

    Args:
        texts: as `results.texts` makes them; those without an entropy (of older runs) give no point.
    """
    turns: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for text in texts:
        if text.get("target_entropy") is not None:
            turns.setdefault((text["label"], text["prompt"]), []).append(text)
    points = []
    for (label, prompt), mine in turns.items():
        verified = sum(sum(text["reached"]) for text in mine)
        if verified:
            entropy = float(np.mean([text["target_entropy"] for text in mine]))
            points.append(Point(label, prompt, entropy, sum(sum(text["overlap"]) for text in mine) / verified))
    return points


def _named(runs: Sequence[grid.Run]) -> list[dict[str, Any]]:
    """All rows, with their run and target; labels tell the runs apart where there are several."""
    several = len(runs) > 1
    return [
        {
            **row,
            "run": run.name,
            "target": run.target,
            "label": f"{run.name}: {row['label']}" if several else row["label"],
        }
        for run in runs
        for row in run.rows
    ]


def _headline(chosen: Sequence[Row], rows: Sequence[Row], *, run: bool = False) -> str:
    # Rows of several runs need not share a target: none of them is the best.
    best = {row["label"] for row in best_rows(rows)[:1]} if not run else set()
    head = ["row", *(["target"] if run else []), "rule", "T", *(["batch", "prompts"] if run else [])]
    head += ["tau", "speedup", "predicted", "measured / predicted", "alpha", "c", "t(g+1)/t(1)", "tok/s", "equal"]
    head += ["decode only", "predicted", "bigrams", "entropy", "draft MB"]
    shown = any("certificate" in row for row in chosen)
    head += ["certificate"] if shown else []
    body = []
    for row in chosen:
        cells = [cell(tables.named(row)), *([cell(row["target"])] if run else []), cell(row["rule"])]
        cells.append(cell(row["temperature"], f"{row['temperature']:g}"))
        cells += [cell(row["batch"]), cell(row["prompts"])] if run else []
        cells += [
            _interval(row, "tau"),
            _interval(row, "speedup"),
            _number(row["speedup_predicted"]),
            _number(_ratio(row)),
            _interval(row, "alpha"),
            _number(row["draft_cost"], 3),
            _number(row["t_ratio"]),
            _number(row["tokens_per_second"], 1),
            cell(tables.equality(row)),
            _number(row["speedup_decode"]),
            _number(row["speedup_decode_predicted"]),
            _number(row["distinct_bigram_ratio"]),
            _number(row["target_entropy"]),
            _number(row["draft_param_bytes"] / 1e6, 1),
        ]
        cells += [cell(row.get("certificate") or "–")] if shown else []
        body.append(cells)
    return markup.table(head, body, [i for i, row in enumerate(chosen) if row["label"] in best])


def _ratio(row: Row) -> float | None:
    return row["speedup"] / row["speedup_predicted"] if row["speedup"] and row["speedup_predicted"] else None


def _by_category(rows: Sequence[Row], value: str) -> str:
    categories = [c for c in dict.fromkeys(row["category"] for row in rows) if c not in grid.SUMMARIES]
    body = []
    for label in dict.fromkeys(row["label"] for row in rows):
        values = [next(iter(select(rows, label=label, category=c)), {}).get(value) for c in categories]
        body.append([cell(label), *map(_number, values)])
    return markup.table(["row", *(c.replace("_", " ") for c in categories)], body)


def _findings_in_depth(rows: Sequence[Row]) -> list[str]:
    """Acceptance by position, and measured against predicted."""
    return [
        section(
            "Measured against predicted",
            markup.image(figures.prediction_plot(rows), "measured against predicted speedup, with the band of 10 %"),
        ),
        section(
            "Acceptance by draft position",
            markup.image(figures.acceptance_plot(rows), "acceptance by draft position"),
            _by_position(select(rows, category="all")),
        ),
    ]


def _step(chosen: Sequence[Row]) -> str:
    """Milliseconds of a step in the loop, and of its parts timed apart; what is left is the rule and the commit."""
    body = []
    for row in chosen:
        one, step = row["one_token_pass_seconds"], row["step_seconds"]
        if one is None or step is None or row["t_ratio"] is None:
            continue
        draft, scoring = row["draft_cost"] * row["draft_passes"] * one, row["t_ratio"] * one
        parts = (step, draft, scoring, step - draft - scoring, one)
        body.append([cell(row["label"]), *(_number(1e3 * seconds, 1) for seconds in parts)])
    return markup.table(["ms", "step", "draft", "target pass", "the rest", "one-token pass"], body)


def _by_position(chosen: Sequence[Row]) -> str:
    width = max((len(row["alpha_by_position"]) for row in chosen), default=0)
    if not width:
        return "<p>No row drafts.</p>"
    body = [
        [cell(row["label"]), *map(_number, row["alpha_by_position"]), *[Cell("", None)] * missing]
        for row in chosen
        if (missing := width - len(row["alpha_by_position"])) < width
    ]
    return markup.table(["row", *map(str, range(1, width + 1))], body)


def _by_prompt(points: Sequence[Point]) -> str:
    body = [[cell(p.prompt), cell(p.label), _number(p.entropy), _number(p.alpha)] for p in points]
    return markup.table(["prompt", "row", "entropy", "alpha"], body) if body else ""


def _block(made: grid.Grid) -> str:
    parts = []
    for block in made.blocks:
        body = []
        for line in block.lines:
            cells = [cell(line.label)]
            for column in made.columns:
                speedup, tau = (line.cells[column][value] for value in grid.VALUES)
                strong = tuple(grid.is_best(block, line, column, value) for value in grid.VALUES)
                cells.append(Cell((tables.number(speedup), tables.number(tau)), speedup, strong))
            body.append(cells)
        head = ["row", *(column.replace("_", " ") for column in made.columns)]
        parts.append(f"<h3>{escape(block.title)}</h3>{markup.table(head, body)}")
    return f"{''.join(parts)}<p>{escape(made.caption)}</p>"


def _texts(coloured: Sequence[ColouredText]) -> list[str]:
    if not coloured:
        return []
    parts = ["<h2>Drafted tokens</h2><p>Marked text was drafted and accepted; the rest the target added itself.</p>"]
    for text in coloured:
        body = "".join(f"<mark>{escape(t)}</mark>" if drafted else escape(t) for t, drafted in text.pieces)
        parts.append(f"<h3>{escape(text.title)}</h3><pre class=question>{escape(text.question)}</pre>")
        parts.append(f"<pre>{body}</pre>")
    return parts


def _provenance(meta: Mapping[str, Any]) -> str:
    return markup.definitions({name: meta[name] for name in PROVENANCE})


def _number(value: float | None, digits: int = 2) -> Cell:
    return Cell(tables.number(value, digits), value)


def _interval(row: Row, name: str) -> Cell:
    return Cell(tables.with_interval(row[name], row[f"{name}_ci"]), row[name])
