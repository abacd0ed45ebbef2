"""A plan held against what is measured on other prompts: beside plain decoding, or beside a sweep of all rows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments._calibration import Place
from specjax import build
from specjax.analysis import Candidate, Curve, Plan, best_trees, predict
from specjax.evaluation import results, tables
from specjax.evaluation.benchmark import Settings, measure
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.lineup import Lineup
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.rows import summarise
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target

DEFINED = {
    "planned": "whether the planner chose this row",
    "speedup_planned": "the planner's prediction of speedup_decode, from acceptance on other prompts",
}
PLANNED = " as planned"
TREES = 6  # static trees of a sweep, of sizes evenly apart
WITHIN = 0.95  # of the best that was measured


def by_row(lineup: Lineup, contenders: Sequence[LoopContender]) -> Iterator[tuple[str, list[LoopContender]]]:
    """The contenders of each row of the config: their labels start with the row's."""
    for row in lineup.kept:
        others = [name for name in lineup.kept if name.startswith(f"{row} ")]
        mine = [c for c in contenders if _is_of(c.info.label, row) and not any(_is_of(c.info.label, o) for o in others)]
        if mine:
            yield row, mine


def _is_of(label: str, row: str) -> bool:
    return label == row or label.startswith(f"{row} ")


def held_against(
    lineup: Lineup,
    plans: Mapping[Place, Plan],
    candidates: Mapping[Place, Sequence[Candidate]],
    curves: Mapping[Place, Curve],
    prompts: Sequence[Prompt],
    target: Target,
    settings: Settings,
    config: ml_collections.ConfigDict,
    console: Console,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a benchmark of the plans on other prompts, each with what was predicted for it; and their texts.

    Args:
        lineup: rows of the config.
        plans: one a batch size.
        candidates: what was planned with, by place.
        curves: t(T), by place.
        prompts: others than those of the calibration.
        target: to decode with.
        settings: how to measure.
        config: of the program; `check` says whether all rows are measured.
        console: for progress.
    """
    rows: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    bound = rounding_bound(target.config.dtype, config.precision, config.near_tie_bound)
    for place, made in plans.items():
        batch, curve, sweep = place[0], curves[place], config.check == "sweep"
        trees = spread_trees(candidates[place], curve) if sweep else {}
        chosen = with_plan(lineup, made, sweep=sweep, trees=trees)
        contenders = [c for c in build.contenders(chosen, target) if isinstance(c, LoopContender)]
        here = dataclasses.replace(settings, batch=batch)
        with console.status("") as status:
            measured = measure(contenders, prompts, target, here, lambda what, *_: status.update(what))
        one = contenders[0]
        teacher = Teacher(one.loop.graph, one.weights.target, precision=one.loop.precision, chunk=one.loop.chunk)
        texts += [{"batch": batch, **text} for text in results.texts(measured, teacher)]
        known = {c.method: c for c in candidates[place]}
        plan_of = {made.method + PLANNED: made, **trees}
        owners = {c.info.label: row for row, mine in by_row(chosen, contenders) for c in mine}
        for row in summarise(measured, here, teacher, bound):
            owner = owners[row["label"]]
            is_plan = owner.endswith(PLANNED)
            row["planned"] = is_plan or (not made.paths and not row["num_nodes"])
            method, paths = owner, _chain(row["num_nodes"])
            if owner in plan_of:
                method, paths = plan_of[owner].method, plan_of[owner].paths
            row["speedup_planned"] = _prediction(known.get(method), paths, curve, row["topology"])
            rows.append(row)
    return rows, texts


def spread_trees(candidates: Sequence[Candidate], curve: Curve) -> dict[str, Plan]:
    """By label, the best static trees of a few sizes of every candidate that can make trees, as deep as it goes."""
    found: dict[str, Plan] = {}
    for one in candidates:
        if one.acceptance_dr.shape[1] == 1:
            continue
        trees = best_trees(one.acceptance_dr, depth=one.depth, max_nodes=curve.counts[-1] - 1)
        sizes = [n for n in range(1, trees.tokens.size) if np.isfinite(trees.tokens[n])]
        for n in sorted({sizes[round(i)] for i in np.linspace(0, len(sizes) - 1, TREES)}):
            paths = trees.paths(n)
            if max(map(len, paths)) >= one.drafting.counts[0]:
                found[f"{one.method} of {n} nodes"] = predict(one, paths, curve)
    return found


def with_plan(lineup: Lineup, made: Plan, *, sweep: bool, trees: Mapping[str, Plan] | None = None) -> Lineup:
    """Plain decoding and the plan's row, or with `sweep` all rows and the plan's; and further trees by label."""
    rows = {label: row for label, row in lineup.kept.items() if sweep or row["name"] == "autoregressive"}
    for label, one in {made.method + PLANNED: made, **(trees or {})}.items():
        if one.paths:
            rows[label] = planned_row(lineup.kept[one.method], one)
    return dataclasses.replace(lineup, rows=rows, only=())


def planned_row(row: Mapping[str, Any], made: Plan) -> dict[str, Any]:
    """A row's options with the plan's draft: its length, or its tree in the words of the row's maker."""
    parameters = inspect.signature(build.lookup(build.DRAFTERS, row["name"], "drafter")).parameters
    by_choices = "choices" in parameters and ("choices" in row or "num_nodes" not in parameters)
    if made.is_chain and not by_choices:
        return {**row, "num_nodes": made.num_nodes}
    if "choices" not in parameters:
        raise ValueError(f"the drafter {row['name']!r} drafts no static trees; plan a chain with it")
    rest = {name: value for name, value in row.items() if name != "num_nodes"}
    return {**rest, **({"tree": "choices"} if "tree" in parameters else {}), "choices": made.paths}


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each batch size how the plan's row stands to the fastest lossless one that was measured.

    Args:
        rows: over all prompts.

    Returns:
        `batch`, labels `planned` and `best`, `ratio` of their decoding speeds, whether the plan is `within` 5 % of the
        best, whether it is `inside` the best's interval, `agrees` where it is either, and all of it `said`.
    """
    found = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        here = [r for r in rows if r["batch"] == batch and r["speedup_decode"] is not None and not results.lossy(r)]
        mine = next((row for row in here if row["planned"]), None)
        if mine is None:
            continue
        best = max(here, key=lambda row: row["speedup_decode"])
        ratio = mine["speedup_decode"] / best["speedup_decode"]
        low = (best["speedup_decode_ci"] or [best["speedup_decode"]])[0]
        within, inside = ratio >= WITHIN, mine["speedup_decode"] >= low
        said = f"batch {batch}: the plan {mine['label']!r} decodes at {mine['speedup_decode']:.2f}x, "
        said += f"the best of {len(here)} rows, {best['label']!r}, at {best['speedup_decode']:.2f}x: "
        said += "within 5 %" if within else "inside its interval" if inside else "MISSED"
        found.append(
            {"batch": batch, "planned": mine["label"], "best": best["label"], "rows": len(here), "ratio": ratio}
            | {"within": within, "inside": inside, "agrees": within or inside, "said": said}
        )
    return found


def _prediction(owner: Candidate | None, paths: Sequence[Any], curve: Curve, topology: str) -> float | None:
    """None where the calibration does not reach, or a row's tree is not known here."""
    if owner is None or not paths or (topology != "chain" and len(paths) == len(paths[-1])):
        return None
    known = owner.drafting.counts[0] <= len(paths[-1]) <= owner.depth and len(paths) < curve.counts[-1]
    return predict(owner, paths, curve).speedup if known else None


def _chain(nodes: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) * depth for depth in range(1, nodes + 1))


def advice(made: Plan) -> str:
    """The plan as options of a config's row."""
    if not made.paths:
        return "nothing pays; decode plainly"
    options = f"num_nodes={made.num_nodes}" if made.is_chain else f"tree='choices', choices={list(made.paths)}"
    return f"row {made.method!r} with {options}: predicted {made.speedup:.2f}x"


def comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Predicted beside measured, one line a row over all prompts."""
    table = Table(title="predicted and measured", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "row", "tau", "predicted", "decode only", "speedup", "planned"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            row["label"],
            tables.number(row["tau"]),
            tables.number(row["speedup_planned"]),
            tables.number(row["speedup_decode"]),
            tables.with_interval(row["speedup"], row["speedup_ci"]),
            "yes" if row["planned"] else "",
        )
    return table


def batch_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Tokens a second by batch size, of plain decoding and of the plan; while decoding, and with prefills."""
    table = Table(title="tokens/s by batch", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "live rows", "plain", "planned", "ratio", "plain whole", "planned whole", "ratio", "plan"):
        table.add_column(name, justify="right")
    for batch in dict.fromkeys(row["batch"] for row in rows):
        here = [row for row in rows if row["batch"] == batch]
        mine = next((row for row in here if row["planned"]), None)
        if mine is None:
            continue
        plain = next(row for row in here if row["label"] == mine["baseline"])
        cells = [str(batch), tables.number(mine["live_rows"], 1)]
        for name in ("decode_tokens_per_second", "tokens_per_second"):
            pair = [plain[name], mine[name]]
            ratio = None if None in pair else mine[name] / plain[name]
            cells += [*(tables.number(value, 1) for value in pair), tables.number(ratio)]
        table.add_row(*cells, mine["label"])
    return table
