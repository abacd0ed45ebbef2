"""Which choices pay: python -m experiments.ablate --config=configs/ablations.py:smollm2 --workdir=runs/ablations

Trains the cells of the config's pairs at equal tokens, measures each on held-out rows (or prompts), and says of each
pair whether the claim holds: `agrees` where the paired bootstrap interval of the difference lies above 0, `refutes`
where it lies below, else `undecided`. The interval is over rows (or prompts) of one training each: what another seed
would have trained is not in it. All cells have the base's optimizer. Cells are kept in the run directory, and an
interrupted one goes on where it was. Writes results.json.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from absl import logging
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import _cells, _main
from experiments._prompts import prompts_from_config
from specjax import build
from specjax.analysis import bootstrap_interval
from specjax.evaluation import results
from specjax.evaluation.lineup import several_hint
from specjax.models import Target

SCHEMA = "specjax.ablations/1"


def main(config: ml_collections.ConfigDict) -> None:
    """Trains and measures what is missing, compares, writes."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes.
    console, workdir = _main.console(), _main.workdir()
    pairs = check(config)
    results.check_writable(workdir)
    target = build.target_from_config(config.base.target)
    cells: dict[str, dict[str, Any]] = {}
    for name in needed(config, pairs):
        cells[name] = cell(config, name, target, console)
        console.print(f"{name}: {summary(cells[name])}", highlight=False)
    rows = [compare(name, config.pairs[name].to_dict(), cells, config) for name in pairs]
    parts = by_category(config, pairs, cells)
    show(console, [*rows, *parts])
    precision = {"dtype": config.base.target.dtype, "matmul": config.base.train.precision}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(workdir / "results.json", {"meta": meta, "rows": rows, "by_category": parts, "cells": cells})
    console.print(f"written to {workdir / 'results.json'}", highlight=False)


def check(config: ml_collections.ConfigDict) -> list[str]:
    """The pairs to compare.

    Raises:
        ValueError: a pair, a cell or a cell's head that is not there, or a confidence out of range.
    """
    unknown = [name for name in config.only if name not in config.pairs]
    if unknown:
        raise ValueError(
            f"only={unknown[0]!r} is no pair of the config; it has {', '.join(config.pairs)}{several_hint(unknown[0])}"
        )
    if not 0 < config.confidence < 1 or config.resamples < 1:
        raise ValueError(
            f"confidence={config.confidence}, resamples={config.resamples}; expected a number in (0, 1), and at least 1"
        )
    pairs = [name for name in config.pairs if name in config.only or not config.only]
    for name in pairs:
        for side in ("better", "worse"):
            cell = config.pairs[name][side]
            if cell not in config.cells:
                raise ValueError(f"pair {name!r} names the cell {cell!r}; the config has {', '.join(config.cells)}")
            head = config.cells[cell].get("head")
            if head is not None and "objective" not in config.cells.get(head, {}):
                raise ValueError(f"cell {cell!r} decodes with the head of {head!r}, which is no cell that is trained")
    return pairs


def needed(config: ml_collections.ConfigDict, pairs: Sequence[str]) -> list[str]:
    """The cells of some pairs, those whose heads others decode with first."""
    names: list[str] = []
    for name in pairs:
        for side in ("worse", "better"):
            cell = config.pairs[name][side]
            head = config.cells[cell].get("head")
            names += [n for n in (head, cell) if n is not None and n not in names]
    return names


def cell(config: ml_collections.ConfigDict, name: str, target: Target, console: Console) -> dict[str, Any]:
    """What is known of a cell, measured now if it was not before."""
    folder = _main.workdir() / "cells" / name
    head = config.cells[name].get("head")
    spec = {"cell": config.cells[name].to_dict(), "base": config.base.to_dict()}
    if config.cells[name].get("human"):
        spec["human"] = list(config.human)
    if head is not None:
        decoding = {key: config[key] for key in ("prompts", "prompts_per_category", "max_prompts", "max_new_tokens")}
        spec |= {"head": config.cells[head].to_dict(), **decoding}
    found = _cells.kept(folder, spec)
    if found is None:
        with console.status(f"{name}") as status:
            if head is not None:
                prompts = prompts_from_config(config, console)
                found = _cells.decoded(config, name, folder.parent / head, target, prompts)
            else:
                data = Path(os.environ.get("SPECJAX_DATA", _main.DATA))

                def report(step: int, steps: int) -> None:
                    status.update(f"{name}: step {step} of {steps}")

                found = _cells.trained(config, name, target, folder, data, report)
        _cells.keep(folder, spec, found)
    return found


def compare(
    name: str, pair: Mapping[str, Any], cells: Mapping[str, Mapping[str, Any]], config: ml_collections.ConfigDict
) -> dict[str, Any]:
    """A pair's row: both means, their difference with its interval, and what that says of the claim.

    Raises:
        ValueError: the cells lack the measure.
    """
    sides = {}
    for side in ("better", "worse"):
        measures = cells[pair[side]]["measures"]
        if pair["metric"] not in measures:
            raise ValueError(f"cell {pair[side]!r} has no {pair['metric']!r}; it has {', '.join(sorted(measures))}")
        sides[side] = measures[pair["metric"]]
    both = [(a, b) for a, b in zip(sides["better"], sides["worse"], strict=True) if a is not None and b is not None]
    if not both:
        raise ValueError(f"pair {name!r}: no held-out row has {pair['metric']!r}; give more held-out rows")
    values = np.asarray(both)
    found = bootstrap_interval(
        values[:, 0] - values[:, 1], seed=config.seed, resamples=config.resamples, confidence=config.confidence
    )
    spread = math.isfinite(found.low)
    return {
        "pair": name,
        **pair,
        "units": len(both),
        "value_better": float(values[:, 0].mean()),
        "value_worse": float(values[:, 1].mean()),
        "difference": found.estimate,
        "difference_ci": [found.low, found.high] if spread else None,
        "tokens": [cells[pair[side]].get("tokens") for side in ("better", "worse")],
        "verdict": verdict(found.low, found.high),
    }


def by_category(
    config: ml_collections.ConfigDict, pairs: Sequence[str], cells: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of pairs that decode, once more for the prompts of each category."""
    rows = []
    for name in pairs:
        pair = config.pairs[name].to_dict()
        measures = cells[pair["better"]]["measures"]
        kinds = [key for key in measures if key.startswith(f"{pair['metric']}/") and any(measures[key])]
        # One category is all of them.
        rows += [compare(name, {**pair, "metric": key}, cells, config) for key in kinds if len(kinds) > 1]
    return rows


def verdict(low: float, high: float) -> str:
    """What an interval of the difference says of the claim that it is positive."""
    return "agrees" if low > 0 else "refutes" if high < 0 else "undecided"


def summary(found: Mapping[str, Any]) -> str:
    """A cell's means."""
    shown = [key for key in found["measures"] if key.rpartition("/")[2] in ("alpha", "accepted", "match", "tau")]
    means = {key: [x for x in found["measures"][key] if x is not None] for key in shown}
    return "  ".join(f"{key} {np.mean(values):.4f}" for key, values in means.items() if values)


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the pairs."""
    table = Table(title="claims, held-out", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("pair", "better", "worse", "measure"):
        table.add_column(name)
    for name in ("difference", "interval", "units"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for r in rows:
        interval = "" if r["difference_ci"] is None else "[{:+.4f}, {:+.4f}]".format(*r["difference_ci"])
        better, worse = (f"{r[side]} {r[f'value_{side}']:.4f}" for side in ("better", "worse"))
        cells = [r["pair"], better, worse, r["metric"], f"{r['difference']:+.4f}", interval, str(r["units"])]
        table.add_row(*cells, r["verdict"])
    console.print(table)


if __name__ == "__main__":
    _main.run(main, config="configs/ablations.py", workdir="runs/ablations")
