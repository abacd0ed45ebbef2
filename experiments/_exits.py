"""What LayerSkip training did: accuracy and perplexity behind every layer, before and after."""

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

SCHEMA = "specjax.layerskip/1"


def report(config: ml_collections.ConfigDict, after: Mapping[str, float], sets: Iterable[str], layers: int) -> None:
    """Writes `results.json` to the run directory, and prints it as a table.

    Args:
        config: of the run.
        after: held-out metrics of the exported checkpoint; those of before are the run's own at step 0.
        sets: names of the held-out sets.
        layers: of the model.
    """
    workdir = _main.workdir()
    before = next(row for row in RunDirectory(workdir).metrics() if row["step"] == 0)
    found = [row for name in sets for row in rows(name, before, after, layers)]
    precision = {"dtype": "float32", "matmul": config.train.precision}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(workdir / "results.json", {"meta": meta, "rows": found})
    _main.console().print(table(found))


def rows(name: str, before: Mapping[str, Any], after: Mapping[str, Any], layers: int) -> list[dict[str, Any]]:
    """A row an exit: how often its first choice is the text's next token, and its perplexity."""
    found = []
    for exit_layer in range(1, layers + 1):
        row: dict[str, Any] = {"set": name, "exit_layer": exit_layer}
        for when, metrics in (("before", before), ("after", after)):
            row[f"accuracy_{when}"] = metrics[f"{name}/match_exit_{exit_layer}"]
            row[f"perplexity_{when}"] = math.exp(metrics[f"{name}/loss_exit_{exit_layer}"])
        found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> Table:
    """For the terminal; the last layer is the model itself."""
    made = Table(box=SIMPLE_HEAD, title="behind each layer")
    columns = ("accuracy_before", "accuracy_after", "perplexity_before", "perplexity_after")
    for column in ("set", "exit_layer", *columns):
        made.add_column(column.replace("_", " "), justify="left" if column == "set" else "right")
    for row in found:
        numbers = [f"{row[c]:.3f}" if "accuracy" in c else f"{row[c]:.4g}" for c in columns]
        made.add_row(row["set"], str(row["exit_layer"]), *numbers)
    return made
