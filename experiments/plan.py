"""Chooses what to draft here: python -m experiments.plan --config=configs/plan.py:smollm2

Measures t(T) of the target and the cost of drafts, at every batch size and context length of the config, and acceptance
on a few calibration prompts; then the planner picks drafter, draft length or static tree, or plain decoding where
nothing pays. On other prompts the choice (or, with check=sweep, every row) is measured beside plain decoding, so that
predicted stands against measured.

Writes to the workdir: plan.json (costs, acceptance, plans), results.json (rows as of a benchmark, with `planned` and
`speedup_planned`, the prediction for `speedup_decode`), config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main
from experiments._calibration import Place, acceptance, candidate, requests, time_parts
from experiments._prompts import prompts_from_config
from specjax import build
from specjax.analysis import Candidate, Curve, Plan, Timing, plan, predict, target_curve
from specjax.evaluation import results, tables
from specjax.evaluation.benchmark import Settings, measure
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import buffer_for, fitting
from specjax.evaluation.lineup import Lineup
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.rows import DEFINITIONS, summarise
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target

SCHEMA = "specjax.plan/1"
CHECKS = ("plan", "sweep", "none")
DEFINED = {
    "planned": "whether the planner chose this row",
    "speedup_planned": "the planner's prediction of speedup_decode, from acceptance on other prompts",
}


def main(config: ml_collections.ConfigDict) -> None:
    """Measures, plans, checks, writes, prints."""
    console, workdir = _main.console(), _main.workdir()
    check(config)
    lineup, settings = build.lineup_from_config(config), build.settings_from_config(config)
    parts = split(prompts_from_config(config, console), config.calibration_per_category)
    results.check_writable(workdir)
    for label in lineup.left_out:
        console.print(f"row {label!r} is left out: set --config.rows.{label}.source to plan with it", style="yellow")
    target = build.target_from_config(config.target)
    calibration, held_out = (fitting(target, part, settings)[0] for part in parts)
    results.write_json(workdir / "config.json", config.to_dict())

    found = calibrate(lineup, calibration, target, settings, config, console)
    plans = {place: plan(found.candidates[place], found.curve(place), margin=config.margin) for place in found.drafting}
    precision = {"dtype": target.config.dtype, "matmul": config.precision, "layout": config.layout}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(workdir / "plan.json", {"meta": meta, **found.as_json(), "plans": _plans(plans)})
    console.print(_table(plans))
    for place, made in plans.items():
        console.print(f"batch {place[0]}, context {place[1]}: {advice(made)}", highlight=False, markup=False)

    if config.check != "none":
        rows = held_against(lineup, plans, found, held_out, target, settings, config, console)
        meta = results.describe(config.to_dict(), precision) | {
            "definitions": DEFINITIONS | DEFINED,
            "plans": _plans(plans),
        }
        results.write_json(workdir / "results.json", {"meta": meta, "rows": rows})
        console.print(_comparison(results.select(rows, category="all")))
    console.print(f"plan and results: {workdir}", highlight=False)


def check(config: ml_collections.ConfigDict) -> None:
    """Checks the settings.

    Raises:
        ValueError: one is out of range.
    """
    if config.check not in CHECKS:
        raise ValueError(f"check={config.check!r}; expected one of {', '.join(CHECKS)}")
    if len(config.temperatures) != 1:
        raise ValueError(f"temperatures={tuple(config.temperatures)}; a plan is for one temperature")
    for name in ("tokens", "batches", "contexts"):
        if not config[name] or min(config[name]) < 1:
            raise ValueError(f"{name}={tuple(config[name])}; expected numbers of at least 1")
    if tuple(sorted(set(config.tokens))) != tuple(config.tokens) or config.tokens[0] != 1 or len(config.tokens) < 2:
        raise ValueError(f"tokens={tuple(config.tokens)}; expected 1 and rising numbers after it")
    if min(config.rounds, config.repeat, config.calibration_per_category) < 1 or config.margin < 0:
        raise ValueError("rounds, repeat and calibration_per_category must be at least 1, and margin at least 0")


def split(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first `count` prompts of each category to calibrate on, the rest to check on.

    Raises:
        ValueError: nothing is left to check on.
    """
    seen: dict[str, int] = {}
    calibration: list[Prompt] = []
    held_out: list[Prompt] = []
    for prompt in prompts:
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        (calibration if seen[prompt.category] <= count else held_out).append(prompt)
    if not held_out:
        raise ValueError(f"all {len(prompts)} prompts are for calibration: raise prompts_per_category above {count}")
    return calibration, held_out


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        timings: target passes.
        drafting: seconds of drafts by place and label.
        candidates: by place.
    """

    timings: list[Timing]
    drafting: dict[Place, dict[str, float]]
    candidates: dict[Place, list[Candidate]]

    def curve(self, place: Place) -> Curve:
        """t(T) at a batch size and context."""
        return target_curve(self.timings, batch=place[0], context=place[1])

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        one = next(iter(self.candidates.values()))
        return {
            "target_passes": [dataclasses.asdict(timing) for timing in self.timings],
            "drafting": [
                {"batch": batch, "context": context, "row": label, "seconds": seconds}
                for (batch, context), by_label in self.drafting.items()
                for label, seconds in by_label.items()
            ],
            "acceptance_by_depth_and_rank": {c.method: c.acceptance_dr.tolist() for c in one},
        }


def calibrate(
    lineup: Lineup,
    prompts: Sequence[Prompt],
    target: Target,
    settings: Settings,
    config: ml_collections.ConfigDict,
    console: Console,
) -> Calibration:
    """Acceptance by each row's longest draft, and the costs of all of its lengths."""
    contenders = [c for c in build.contenders(lineup, target) if isinstance(c, LoopContender)]
    margin = max(max(c.loop.drafter.depth + 1, c.loop.chunk) for c in contenders)
    buffer = max(buffer_for(target, prompts, settings, margin), *(c + 2 * margin for c in config.contexts))
    for contender in contenders:
        contender.buffer = -(-buffer // contender.loop.chunk) * contender.loop.chunk
    baselines = [c for c in contenders if c.info.is_baseline]
    if not baselines:
        raise ValueError("no row decodes plainly; add one of the drafter autoregressive")
    members = dict(by_row(lineup, [c for c in contenders if not c.info.is_baseline]))
    rates = {}
    with console.status("") as status:
        for row, mine in members.items():
            longest = max(mine, key=lambda c: (c.loop.drafter.depth, c.info.num_nodes))
            status.update(f"acceptance of {row}")
            asked = requests(prompts, longest, target, settings)
            longest.prepare(asked[0], longest.buffer)
            rates[row] = acceptance(longest, asked)
    asked = requests(prompts, baselines[0], target, settings)
    middle = sorted(asked, key=lambda request: len(request.prompt))[len(asked) // 2]
    timings, drafting = time_parts(contenders, middle, target, config, console)
    candidates = {
        place: [candidate(row, mine, rates[row], seconds) for row, mine in members.items()]
        for place, seconds in drafting.items()
    }
    return Calibration(timings, drafting, candidates)


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
    found: Calibration,
    prompts: Sequence[Prompt],
    target: Target,
    settings: Settings,
    config: ml_collections.ConfigDict,
    console: Console,
) -> list[dict[str, Any]]:
    """Rows of a benchmark of the plans on other prompts, each with what was predicted for it."""
    rows: list[dict[str, Any]] = []
    bound = rounding_bound(target.config.dtype, config.precision, config.near_tie_bound)
    for batch in config.batches:
        place = (batch, config.contexts[0])
        made = plans[place]
        chosen = with_plan(lineup, made, sweep=config.check == "sweep")
        contenders = [c for c in build.contenders(chosen, target) if isinstance(c, LoopContender)]
        here = dataclasses.replace(settings, batch=batch)
        with console.status("") as status:
            measured = measure(contenders, prompts, target, here, lambda what, *_: status.update(what))
        one = contenders[0]
        teacher = Teacher(one.loop.graph, one.weights.target, precision=one.loop.precision, chunk=one.loop.chunk)
        known = {c.method: c for c in found.candidates[place]}
        owners = {c.info.label: row for row, mine in by_row(chosen, contenders) for c in mine}
        for row in summarise(measured, here, teacher, bound):
            owner = owners[row["label"]].removesuffix(PLANNED)
            paths = made.paths if owners[row["label"]].endswith(PLANNED) else _chain(row["num_nodes"])
            row["planned"] = owners[row["label"]].endswith(PLANNED) or (not made.paths and not row["num_nodes"])
            row["speedup_planned"] = _prediction(known.get(owner), paths, found.curve(place), row["topology"])
            rows.append(row)
    return rows


PLANNED = " as planned"


def with_plan(lineup: Lineup, made: Plan, *, sweep: bool) -> Lineup:
    """Plain decoding and the plan's row, or with `sweep` all rows and the plan's."""
    rows = {label: row for label, row in lineup.kept.items() if sweep or row["name"] == "autoregressive"}
    if made.paths:
        row = dict(lineup.kept[made.method])
        if made.is_chain and "choices" not in row:
            row["num_nodes"] = made.num_nodes
        else:
            row |= {"tree": "choices", "choices": made.paths}
        rows[made.method + PLANNED] = row
    return dataclasses.replace(lineup, rows=rows, only=())


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


def _plans(plans: Mapping[Place, Plan]) -> list[dict[str, Any]]:
    return [
        {"batch": batch, "context": context, "num_nodes": made.num_nodes, "depth": made.depth}
        | dataclasses.asdict(made)
        for (batch, context), made in plans.items()
    ]


def _table(plans: Mapping[Place, Plan]) -> Table:
    table = Table(title="what to draft", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("batch", "context", "row", "nodes", "depth", "E", "step ms", "predicted"):
        table.add_column(name, justify="right")
    for (batch, context), made in plans.items():
        cells = (f"{made.expected_tokens:.2f}", f"{1e3 * made.step_seconds:.1f}", f"{made.speedup:.2f}")
        table.add_row(str(batch), str(context), made.method, str(made.num_nodes), str(made.depth), *cells)
    return table


def _comparison(rows: Sequence[Mapping[str, Any]]) -> Table:
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


if __name__ == "__main__":
    _main.run(main, config="configs/plan.py", workdir="runs/plan")
