"""Sweeps: many runs of one config that differ in few fields, and what came of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specjax.checkpoints.rundir import RunDirectory

Point = dict[str, Any]
LONGEST = 120  # Characters of a run's name.
EXPORTED = ("drafter/config.json", "target/config.json")  # One of them is written last: of training, of pretraining.


def expand(sweep: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> list[Point]:
    """The points of a sweep, in order: a grid `{field: values}` or a list of points `{field: value}`.

    Raises:
        ValueError: it has no points, a field without values or with one bare value, or one point twice.
    """
    if isinstance(sweep, Mapping):
        for field, values in sweep.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise ValueError(f"sweep field {field!r} has {values!r}; expected a list of at least one value")
        points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    else:
        points = [dict(point) for point in sweep]
    if not points or not all(points):
        raise ValueError("the sweep has no points: expected {field: values}, or a list of {field: value}")
    for i, point in enumerate(points):
        if point in points[:i]:
            raise ValueError(f"the sweep has the point {point} twice; name each once")
    return points


def varying(points: Sequence[Point]) -> list[str]:
    """The fields whose values differ among the points, in order; a point without a field differs in it."""
    fields = dict.fromkeys(field for point in points for field in point)
    return [f for f in fields if any(p.get(f, ...) != points[0].get(f, ...) for p in points)]


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted name, or as many parts as tell it from the others."""
    found = {}
    for field in fields:
        parts = field.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(f == name or f.endswith(f".{name}") for f in fields) == 1:
                break
        found[field] = name
    return found


def run_names(points: Sequence[Point]) -> list[str]:
    """A directory name for each point, from the values that vary: adding a point renames no run.

    Raises:
        ValueError: two points would share a name.
    """
    fields = list(dict.fromkeys(field for point in points for field in point))
    names = short_names(fields)

    def name(point: Point) -> str:
        text = "-".join(f"{names[f]}={point[f]}" for f in fields if f in point)
        return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", text)[:LONGEST]

    found = [name(point) for point in points]
    if len(set(found)) != len(found):
        twice = next(n for i, n in enumerate(found) if n in found[:i])
        raise ValueError(f"two points of the sweep would both be called {twice!r}; give values that differ sooner")
    return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one point.

    Attributes:
        name: of its run directory.
        point: its fields.
        metric: held-out figure that runs are compared by.
        value: the best of its checkpoints', None for a run that has none yet.
        at_step: of that checkpoint.
        step: that training has reached.
        steps: that it is to reach.
        saved: whether the last checkpoint, and the drafter or target that is made of the best, are there.
    """

    name: str
    point: Point
    metric: str
    value: float | None
    at_step: int
    step: int
    steps: int
    saved: bool

    @property
    def finished(self) -> bool:
        """Whether it has been trained to the end, and nothing of it would be lost or missing."""
        return self.step >= self.steps and self.saved


def outcome(name: str, point: Point, run: RunDirectory, metric: str, steps: int) -> Outcome:
    """What a run directory says of its run; one that does not exist has reached nothing."""
    rows = run.metrics()
    scored = [(row[metric], -row["step"]) for row in rows if math.isfinite(row.get(metric, math.nan))]
    best = max(scored, default=(None, 0))
    reached = max((row["step"] for row in rows), default=-1)
    # Metrics are ahead of the checkpoint, which is written in the background, and of what is made of it in the end.
    checkpointed = run.checkpointed
    saved = checkpointed is not None and checkpointed >= steps and any((run.path / path).exists() for path in EXPORTED)
    return Outcome(name, point, metric, best[0], -best[1], reached, steps, saved)


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row for all runs that differ in seeds alone, the best first; runs without a figure come last.

    A row has `point` (the varying fields but seeds), `mean`, `sd` (None for one run), `runs`, `of` (runs that there
    should be), `best` (name of the best run) and `at_step` of it.
    """
    fields = [f for f in varying([o.point for o in outcomes]) if not is_seed(f)]
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(repr([o.point.get(f) for f in fields]), []).append(o)
    rows = []
    for group in groups.values():
        done = [o for o in group if o.value is not None]
        values = np.asarray([o.value for o in done], float)
        best = max(done, key=lambda o: o.value or 0.0, default=None)
        rows.append(
            {
                "point": {f: group[0].point.get(f) for f in fields},
                "mean": float(values.mean()) if done else None,
                "sd": float(values.std(ddof=1)) if len(done) > 1 else None,
                "runs": len(done),
                "of": len(group),
                "unfinished": [o.name for o in group if not o.finished],
                "best": best.name if best else None,
                "at_step": best.at_step if best else None,
            }
        )
    return sorted(rows, key=lambda row: -math.inf if row["mean"] is None else row["mean"], reverse=True)


def table(rows: Sequence[Mapping[str, Any]], metric: str) -> Table:
    """The summary for a terminal: the fields that vary, and the figure."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    fields = list(rows[0]["point"]) if rows else []
    names = short_names(fields)
    for field in fields:
        made.add_column(names[field], justify="right")
    for column in (metric, "sd", "runs", "step"):
        made.add_column(column, justify="right")
    for i, row in enumerate(rows):
        open_runs = f" ({len(row['unfinished'])} not finished)" if row["unfinished"] else ""
        made.add_row(
            *(str(row["point"][field]) for field in fields),
            "–" if row["mean"] is None else f"{row['mean']:.4f}",
            "–" if row["sd"] is None else f"{row['sd']:.4f}",
            f"{row['runs']} of {row['of']}{open_runs}",
            "–" if row["at_step"] is None else str(row["at_step"]),
            style="bold" if i == 0 and row["mean"] is not None else None,
        )
    return made


def is_seed(field: str) -> bool:
    """Whether a field is a seed, over whose values figures are averaged."""
    return field.split(".")[-1] == "seed"
