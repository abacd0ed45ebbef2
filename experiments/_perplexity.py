"""What joint training did to a target: its perplexity, and what its heads have accepted, before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import _main
from specjax.checkpoints.rundir import RunDirectory
from specjax.evaluation import results

SCHEMA = "specjax.joint_training/1"
COLUMNS = ("perplexity", "accuracy", "accepted")


def report(config: ml_collections.ConfigDict, after: Mapping[str, float], sets: Iterable[str]) -> None:
    """Writes `results.json` to the run directory, and prints it as a table.

    Args:
        config: of the run.
        after: held-out metrics of the exported checkpoint; those of before are the run's own at step 0.
        sets: names of the held-out sets.
    """
    workdir = _main.workdir()
    before = next(row for row in RunDirectory(workdir).metrics() if row["step"] == 0)
    found = [row(name, before, after) for name in sets]
    precision = {"dtype": "float32", "matmul": config.train.precision}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(workdir / "results.json", {"meta": meta, "rows": found})
    _main.console().print(table(found))


def row(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A held-out set: the target's perplexity and accuracy, and how many heads in a row are right."""
    made: dict[str, Any] = {"set": name}
    for when, metrics in (("before", before), ("after", after)):
        made[f"perplexity_{when}"] = math.exp(metrics[f"{name}/loss_next"])
        made[f"accuracy_{when}"] = metrics[f"{name}/match"]
        made[f"accepted_{when}"] = metrics[f"{name}/accepted"]
    return made


def table(found: list[dict[str, Any]]) -> Table:
    """For the terminal."""
    made = Table(box=SIMPLE_HEAD, title="the target, and its heads")
    made.add_column("set")
    for column in COLUMNS:
        made.add_column(f"{column} before", justify="right")
        made.add_column("after", justify="right")
    for one in found:
        made.add_row(one["set"], *(f"{one[f'{c}_{when}']:.4g}" for c in COLUMNS for when in ("before", "after")))
    return made
