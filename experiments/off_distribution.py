"""One good draft made worse: python -m experiments.off_distribution --config=configs/off_distribution.py

Every row of the config is a version of one draft: noise on its weights, another draft temperature, text that the target
did not write; `templates` adds prompts that are not in the template that target and draft were trained with. For each
the program measures alpha, tau and speedup beside the speedup that theory predicts, how fluent the draft still is (its
perplexity on the target's text), and what the planner would do with that draft alone.

Writes to the workdir: results.json (rows as of a benchmark, with what `DEFINED` says, and the study's verdict in its
meta), tokens.json, config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main, plan
from experiments._degraded import Fluency, fluency
from experiments._identity import identity
from experiments._prompts import prompts_from_config
from specjax import analysis, build
from specjax.drafting import DraftModel
from specjax.evaluation import results, tables
from specjax.evaluation.benchmark import Measured, Settings, measure
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import fitting
from specjax.evaluation.lineup import Lineup
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.rows import DEFINITIONS, summarise
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target

# A draft is fluent whose perplexity on the target's text is at most this many times that of the least perplexed one.
FLUENT = 2.0
DEFINED = {
    "template": "how prompts were put to target and draft: chat, the target's own; plain, text alone; or the name of "
    "another model's template",
    "draft_perplexity": "of the draft on the texts of plain decoding, over the tokens in its vocabulary",
    "draft_coverage": "share of those tokens that are in its vocabulary",
    "planned_nodes": "draft length that the planner chooses for this draft alone; 0 is plain decoding",
    "planned_speedup": "decoding speedup that it predicts for that, from acceptance on other prompts",
}


def main(config: ml_collections.ConfigDict) -> None:
    """Measures every condition, writes, prints."""
    console, workdir = _main.console(), _main.workdir()
    check(config)
    settings, lineup = build.settings_from_config(config), build.lineup_from_config(config)
    prompts = plan.split(prompts_from_config(config, console), config.calibration_per_category)
    results.check_writable(workdir)
    for label in lineup.left_out:
        console.print(f"row {label!r} is left out: set --config.rows.{label}.source to measure it", style="yellow")
    target = build.target_from_config(config.target)
    results.write_json(workdir / "config.json", config.to_dict())

    rows: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    skipped: dict[str, None] = {}
    for where, here, chosen in conditions(config, settings, lineup):
        console.print(where, highlight=False)
        (calibration, left), (held_out, others) = (fitting(target, part, here) for part in prompts)
        skipped |= dict.fromkeys((*left, *others))
        choices = planned(chosen, calibration, target, here, config, console)
        more = measured_rows(chosen, choices, held_out, target, here, config, console)
        rows += more[0]
        texts += more[1]
    plan.tell_skipped(list(skipped), console)
    precision = {"dtype": target.config.dtype, "matmul": config.precision, "layout": config.layout}
    verdict = judge(results.select(rows, category="all"))
    meta = results.describe(config.to_dict(), precision) | identity(target, "chat")
    meta |= {
        "definitions": DEFINITIONS | DEFINED,
        "skipped_prompts": list(skipped),
        "verdict": verdict,
    }
    results.write_json(workdir / "tokens.json", {"meta": {"schema": meta["schema"]}, "texts": texts})
    results.write_json(workdir / "results.json", {"meta": meta, "rows": rows})
    console.print(table(results.select(rows, category="all")))
    for line in findings(results.select(rows, category="all")):
        console.print(line, highlight=False, markup=False)
    console.print(verdict["said"], highlight=False, markup=False)
    console.print(f"results: {workdir}", highlight=False)


def check(config: ml_collections.ConfigDict) -> None:
    """Checks what the planner's own check does not.

    Raises:
        ValueError: a setting is out of range, or a template names no row.
    """
    for temperature in config.temperatures:
        alone = ml_collections.ConfigDict(config.to_dict() | {"temperatures": (temperature,), "check": "none"})
        plan.check(alone)
    if len(config.batches) != 1 or len(config.contexts) != 1:
        raise ValueError(f"batches={config.batches}, contexts={config.contexts}; this study takes one of each")
    for template, only in config.templates.items():
        unknown = [label for label in only if label not in config.rows]
        if unknown:
            raise ValueError(f"templates.{template} names {unknown[0]!r}; there are the rows {', '.join(config.rows)}")


def conditions(
    config: ml_collections.ConfigDict, settings: Settings, lineup: Lineup
) -> Iterator[tuple[str, Settings, Lineup]]:
    """Every template at every temperature, with the rows that are measured there.

    Greedy drafts are the likeliest tokens whatever the draft's temperature: such rows are left to temperatures above 0.
    """
    for template, only in config.templates.items():
        for temperature in config.temperatures:
            rows = {
                label: row
                for label, row in lineup.kept.items()
                if (not only or label in only) and (temperature > 0 or row.get("temperature", 1.0) == 1.0)
            }
            here = dataclasses.replace(lineup, rows=rows, only=(), temperatures=(temperature,))
            where = f"template {template}, temperature {temperature:g}"
            yield where, dataclasses.replace(settings, template=template, batch=config.batches[0]), here


def planned(
    lineup: Lineup,
    prompts: Sequence[Prompt],
    target: Target,
    settings: Settings,
    config: ml_collections.ConfigDict,
    console: Console,
) -> dict[str, analysis.Plan]:
    """For each row what the planner does if that draft is all there is."""
    found = plan.calibrate(lineup, prompts, target, settings, config, console)
    place = (config.batches[0], config.contexts[0])
    return {c.method: analysis.plan([c], found.curve(place), margin=config.margin) for c in found.candidates[place]}


def measured_rows(
    lineup: Lineup,
    choices: Mapping[str, analysis.Plan],
    prompts: Sequence[Prompt],
    target: Target,
    settings: Settings,
    config: ml_collections.ConfigDict,
    console: Console,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a benchmark at each row's longest draft, and their texts."""
    bound = rounding_bound(target.config.dtype, config.precision, config.near_tie_bound)
    longest = dataclasses.replace(lineup, rows={label: _longest(row) for label, row in lineup.rows.items()})
    contenders = [c for c in build.contenders(longest, target) if isinstance(c, LoopContender)]
    with console.status("") as status:
        measured = measure(contenders, prompts, target, settings, lambda what, *_: status.update(what))
    one = contenders[0]
    teacher = Teacher(one.loop.graph, one.weights.target, precision=one.loop.precision, chunk=one.loop.chunk)
    fluent = fluencies(contenders, measured)
    rows = []
    for row in summarise(measured, settings, teacher, bound):
        choice, said = choices.get(row["label"]), fluent.get(row["label"])
        row |= {
            "template": settings.template,
            "draft_perplexity": said.perplexity if said else None,
            "draft_coverage": said.coverage if said else None,
            "planned_nodes": choice.num_nodes if choice else None,
            "planned_speedup": choice.speedup if choice else None,
        }
        if settings.template != "chat":
            # Rows of one label are one contender to whoever reads results.
            row |= {name: f"{row[name]}, {settings.template} template" for name in ("label", "baseline")}
        rows.append(row)
    texts = [{"template": settings.template, **text} for text in results.texts(measured, teacher)]
    return rows, texts


def judge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether a fluent draft fell below plain decoding, its text still exact, and the planner would not have used it.

    Args:
        rows: over all prompts.

    Returns:
        `cases`: of each fluent draft below 1: label, temperature, perplexity, speedup, whether its greedy text is
        `exact` (None above temperature 0) and whether the planner `refused` it; `holds` where one has all; and `said`.
    """
    drafts = [row for row in rows if row["draft_perplexity"] is not None]
    bar = FLUENT * min((row["draft_perplexity"] for row in drafts), default=0.0)
    cases = [
        {name: row[name] for name in ("label", "temperature", "draft_perplexity", "speedup")}
        | {"exact": row["matches_baseline"], "refused": row["planned_nodes"] == 0}
        for row in drafts
        if row["draft_perplexity"] <= bar and row["speedup"] is not None and row["speedup"] < 1
    ]
    shown = [case["label"] for case in cases if case["exact"] and case["refused"]]
    said = f"fluent (perplexity up to {bar:.1f}), slower than plain decoding, exact, and refused by the planner: "
    return {"fluent_up_to": bar, "cases": cases, "holds": bool(shown), "said": said + (", ".join(shown) or "none")}


def fluencies(contenders: Sequence[LoopContender], measured: Measured) -> dict[str, Fluency]:
    """By label, of the draft models among the contenders on what plain decoding wrote."""
    plain = next(i for i, c in enumerate(contenders) if c.info.is_baseline)
    turns = [turn for p in range(len(measured.prompts)) for turn in measured.turns[plain, p]]
    texts = [(turn.prompt, turn.completion.tokens) for turn in turns]
    return {
        c.info.label: fluency(c.loop, c.weights, texts) for c in contenders if isinstance(c.loop.drafter, DraftModel)
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a condition."""
    made = Table(title="one draft, degraded", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("T", "row", "perplexity", "alpha", "tau", "speedup", "predicted", "planner", "equal"):
        made.add_column(name, justify="right")
    for row in rows:
        nodes = row["planned_nodes"]
        made.add_row(
            f"{row['temperature']:g}",
            row["label"],
            tables.number(row["draft_perplexity"], 1),
            tables.number(row["alpha"]),
            tables.number(row["tau"]),
            tables.with_interval(row["speedup"], row["speedup_ci"]),
            tables.number(row["speedup_predicted"]),
            "–" if nodes is None else f"{nodes} tokens" if nodes else "none",
            tables.equality(row),
        )
    return made


def findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which drafts cost more than they gave, and what the planner did about it."""
    lines = []
    for row in rows:
        if row["planned_nodes"] is None or row["speedup"] is None or row["speedup"] >= 1:
            continue
        where = f"{row['label']} at T = {row['temperature']:g}"
        does = f"would draft {row['planned_nodes']} tokens" if row["planned_nodes"] else "picks no speculation"
        lines.append(
            f"{where}: {row['speedup']:.2f}x with perplexity {tables.number(row['draft_perplexity'], 1)}; "
            f"the planner {does}"
        )
    return lines or ["every draft was faster than plain decoding"]


def _longest(row: Mapping[str, Any]) -> dict[str, Any]:
    sizes = row.get("num_nodes")
    return {**row, "num_nodes": max(sizes)} if isinstance(sizes, tuple) else dict(row)


if __name__ == "__main__":
    _main.run(main, config="configs/off_distribution.py", workdir="runs/off_distribution")
