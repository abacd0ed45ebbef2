"""Chooses what to draft here: python -m experiments.plan --config=configs/plan.py:smollm2

Measures t(T) of the target and the cost of drafts, at every batch size and context length of the config, and acceptance
on a few calibration prompts; then the planner picks drafter, draft length or static tree, or plain decoding where
nothing pays. On other prompts the choice (or, with check=sweep, every row) is measured beside plain decoding, so that
predicted stands against measured.

Writes to the workdir: plan.json (costs, acceptance, plans), results.json (rows as of a benchmark, with `planned` and
`speedup_planned`, the prediction for `speedup_decode`; in its meta, how far the plan is from the best that was
measured), tokens.json, config.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _main
from experiments._calibration import Parts, Place, acceptance, candidate, requests, time_parts
from experiments._identity import identity
from experiments._plan_check import DEFINED, advice, batch_table, by_row, comparison, held_against, verdicts
from experiments._prompts import prompts_from_config
from specjax import build
from specjax.analysis import Candidate, Curve, Plan, plan, target_curve
from specjax.evaluation import results
from specjax.evaluation.benchmark import Settings
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import buffer_for, fitting
from specjax.evaluation.lineup import Lineup
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.rows import DEFINITIONS
from specjax.models import Target

SCHEMA = "specjax.plan/1"
CHECKS = ("plan", "sweep", "none")


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
    (calibration, skipped), (held_out, others) = (fitting(target, part, settings) for part in parts)
    tell_skipped([*skipped, *others], console)
    results.write_json(workdir / "config.json", config.to_dict())

    found = calibrate(lineup, calibration, target, settings, config, console)
    plans = {
        place: plan(found.candidates[place], found.curve(place), margin=found.margin(place, config.margin))
        for place in found.parts
    }
    precision = {"dtype": target.config.dtype, "matmul": config.precision, "layout": config.layout}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(workdir / "plan.json", {"meta": meta, **found.as_json(), "plans": _plans(plans)})
    console.print(_table(plans))
    for place, made in plans.items():
        console.print(f"batch {place[0]}, context {place[1]}: {advice(made)}", highlight=False, markup=False)

    if config.check != "none":
        here = {(batch, context): made for (batch, context), made in plans.items() if context == config.contexts[0]}
        curves = {place: found.curve(place) for place in here}
        rows, texts = held_against(lineup, here, found.candidates, curves, held_out, target, settings, config, console)
        whole = results.select(rows, category="all")
        meta = results.describe(config.to_dict(), precision) | identity(target, settings.template)
        meta |= {
            "definitions": DEFINITIONS | DEFINED,
            "plans": _plans(plans),
            "skipped_prompts": [*skipped, *others],
            "verdicts": verdicts(whole),
        }
        results.write_json(workdir / "tokens.json", {"meta": {"schema": meta["schema"]}, "texts": texts})
        results.write_json(workdir / "results.json", {"meta": meta, "rows": rows})
        console.print(comparison(whole))
        if len(config.batches) > 1:
            console.print(batch_table(whole))
        for verdict in meta["verdicts"]:
            console.print(verdict["said"], highlight=False, markup=False)
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
    if min(config.rounds, config.repeat, config.calibration_per_category) < 1 or (config.margin or 0.0) < 0:
        raise ValueError("rounds, repeat and calibration_per_category must be at least 1, margin None or at least 0")


def tell_skipped(ids: Sequence[str], console: Console) -> None:
    """Says how many prompts were beyond the context, where there are any."""
    if ids:
        console.print(f"{len(ids)} prompts beyond the context were skipped", style="yellow")


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
        parts: what was timed, by place.
        candidates: by place.
    """

    parts: dict[Place, Parts]
    candidates: dict[Place, list[Candidate]]

    def curve(self, place: Place) -> Curve:
        """t(T) at a batch size and context."""
        return target_curve(self.parts[place].timings, batch=place[0], context=place[1])

    def margin(self, place: Place, given: float | None) -> float:
        """What a predicted speedup must be above 1: as given, or the noise of the timings where it is None."""
        return self.parts[place].noise if given is None else given

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        one = next(iter(self.candidates.values()))
        return {
            "target_passes": [dataclasses.asdict(t) for parts in self.parts.values() for t in parts.timings],
            "drafting": [
                {"batch": batch, "context": context, "row": label, "seconds": seconds}
                for (batch, context), parts in self.parts.items()
                for label, seconds in parts.drafting.items()
            ],
            "overheads": [
                {"batch": batch, "context": context, "row": one.method, "seconds": one.overhead}
                for (batch, context), found in self.candidates.items()
                for one in found
            ],
            "noise": [{"batch": b, "context": c, "relative": parts.noise} for (b, c), parts in self.parts.items()],
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
    """Acceptance by each row's longest draft, and the costs of all of its lengths, or of its tree's depths."""
    timed = with_depths(lineup)
    shallow = timed.kept.keys() - lineup.kept.keys()
    contenders = [
        c
        for c in build.contenders(timed, target)
        # A tree that takes one pass costs the same at every depth.
        if isinstance(c, LoopContender) and (c.info.label not in shallow or c.info.draft_passes > 1)
    ]
    margin = max(max(c.loop.drafter.depth + 1, c.loop.chunk) for c in contenders)
    buffer = max(buffer_for(target, prompts, settings, margin), *(c + 2 * margin for c in config.contexts))
    for contender in contenders:
        contender.buffer = -(-buffer // contender.loop.chunk) * contender.loop.chunk
    baselines = [c for c in contenders if c.info.is_baseline]
    if not baselines:
        raise ValueError("no row decodes plainly; add one of the drafter autoregressive")
    members = dict(by_row(lineup, [c for c in contenders if not c.info.is_baseline]))
    rates: dict[str, np.ndarray] = {}
    longest_of: dict[str, LoopContender] = {}
    with console.status("") as status:
        for row, mine in members.items():
            longest = max(mine, key=lambda c: (c.loop.drafter.depth, c.info.num_nodes))
            status.update(f"acceptance of {row}")
            longest_of[row] = longest
            asked = requests(prompts, longest, target, settings)
            longest.prepare(asked[0], longest.buffer)
            rates[row] = acceptance(longest, asked)
    asked = requests(prompts, baselines[0], target, settings)
    middle = sorted(asked, key=lambda request: len(request.prompt))[len(asked) // 2]
    parts = time_parts(contenders, longest_of, middle, target, config, console)
    candidates = {
        place: [candidate(row, mine, rates[row], here) for row, mine in members.items()]
        for place, here in parts.items()
    }
    return Calibration(parts, candidates)


def with_depths(lineup: Lineup) -> Lineup:
    """The rows, and each static tree also as far as every lesser depth, so that drafts of all depths can be timed."""
    rows: dict[str, Mapping[str, Any]] = {}
    for label, row in lineup.kept.items():
        rows[label] = row
        choices = row.get("choices") or ()
        for depth in range(1, max(map(len, choices), default=0)):
            rows[f"{label} to {depth}"] = {**row, "choices": tuple(path for path in choices if len(path) <= depth)}
    return dataclasses.replace(lineup, rows=rows, only=())


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


if __name__ == "__main__":
    _main.run(main, config="configs/plan.py", workdir="runs/plan")
