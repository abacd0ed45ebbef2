"""Ensembles of drafters against their members, from a benchmark: python -m experiments.ensembles runs/ensembles

Reads results.json and tokens.json of a run of configs/ensembles.py, prints and writes `ensembles.json` beside them:
what each ensemble gains over its best member and over the members' mean, at equal draft length, in points of acceptance
at position 1 and over all that were tried (the best member is the one of the greatest accepted length, both times),
with 95 % intervals by resampling prompts; code and maths apart from the rest, with the
target's entropy there; whether that bears out +5 to +15 points; speed beside the best member's; by category the
target's entropy and the mean probability of its likeliest token; of votes, how often tokens were accepted by the share
of the voters that agreed; bytes of every member.

Then, or without a run, the points that N drafters must gain to be as fast as one of them: 1 B beside 70 B on the
rooflines of a TPU v5p and an H200, and with the costs of the run's best member.

    --alpha   acceptance of the one drafter on the rooflines (0.7)
    --gamma   draft length there (4)
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from etils import epath
from rich.table import Table

from experiments import _main
from experiments._arguments import Parser
from specjax.analysis import Chip, PassCost, ensemble_break_even
from specjax.analysis.ensembles import (
    STATISTICS,
    claim_verdict,
    ensemble_gain,
    roofline_break_even,
)
from specjax.evaluation.results import describe, read_results, write_json

SCHEMA = "specjax.ensembles/1"
PEAKED = ("code", "coding", "humaneval", "maths", "math", "math_reasoning", "gsm8k")
AGAINST = ("best", "mean")
PEAKEDNESS = ("target_entropy", "target_top1")
MOST = 8  # drafters of the break-even table
# Bytes and operations a second, as published for dense bfloat16.
CHIPS = {"TPU v5p": Chip(2.765e12, 459e12), "H200": Chip(4.8e12, 989e12)}
TARGET, DRAFT = PassCost(140e9, 140e9), PassCost(2e9, 2e9)  # 70 B and 1 B parameters in two bytes each


def main(arguments: Sequence[str]) -> None:
    """Compares, prints, writes.

    Raises:
        FileNotFoundError: the run lacks a file.
        ValueError: no benchmark's, or one without an ensemble and its members.
    """
    parser = Parser(
        "python -m experiments.ensembles", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory of a benchmark of configs/ensembles.py")
    parser.add_argument("--alpha", type=float, default=0.7)
    parser.add_argument("--gamma", type=int, default=4)
    options = parser.parse_args(arguments)
    if not 0 < options.alpha < 1 or options.gamma < 1:
        raise ValueError(f"--alpha={options.alpha}, --gamma={options.gamma}; expected within (0, 1), and at least 1")
    console = _main.console()
    if options.run:
        run = epath.Path(options.run)
        document = compare(read_results(run / "results.json"), read_texts(run / "tokens.json"))
        write_json(run / "ensembles.json", document)
        console.print(gains_table(document["rows"]))
        console.print(categories_table(document["categories"]))
        console.print(agreement_table(document["by_agreement"]))
        console.print(members_table(document["members"]))
        console.print(measured_table(document["break_even"]))
    console.print(rooflines_table(options.alpha, options.gamma))


def read_texts(path: epath.Path) -> list[dict[str, Any]]:
    """The texts of a benchmark's tokens.json."""
    if not path.exists():
        raise FileNotFoundError(f"no {path}; expected that of the same benchmark as results.json")
    return json.loads(path.read_text())["texts"]


def compare(results: Mapping[str, Any], texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document that is written.

    Args:
        results: a benchmark's.
        texts: of the same run.

    Raises:
        ValueError: no ensemble whose members are rows too; or one that drafts other lengths than they.
    """
    settings = results["meta"]["config"]["rows"]
    members = members_of(settings)
    if not members:
        raise ValueError(
            f"the rows {', '.join(settings)} hold no ensemble whose members are rows of their own; expected a run of "
            "configs/ensembles.py"
        )
    overall = [row for row in results["rows"] if row["category"] == "all"]
    rows, costs = [], []
    temperatures = sorted({row["temperature"] for row in overall})
    for temperature in temperatures:
        here = {name_of(row, settings): row for row in overall if row["temperature"] == temperature}
        for ensemble, own in members.items():
            if ensemble in here and all(name in here for name in own):
                rows += gains(ensemble, own, here, texts)
        alone = [here[name] for name in sorted({n for own in members.values() for n in own}) if name in here]
        costs += [measured_costs(max(alone, key=lambda row: row["tau"] or 0.0))] if alone else []
    meta = describe({"rows": settings}, results["meta"]["precision"], SCHEMA)
    sizes = ("label", "method", "temperature", "draft_param_bytes", "kv_bytes_draft")
    return {
        "meta": meta | {"results": {key: results["meta"][key] for key in ("created", "machine", "commit")}},
        "rows": rows,
        "categories": [row for t in temperatures for row in peakedness(t, overall, settings, texts)],
        "by_agreement": by_agreement(texts),
        "members": [{key: row[key] for key in sizes} for row in overall if row["num_nodes"]],
        "break_even": costs,
    }


def members_of(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Of every ensemble among a benchmark's rows, the rows that measure its members alone."""
    found = {}
    for label, row in settings.items():
        alone = [
            next((name for name, other in settings.items() if "members" not in other and dict(other) == dict(m)), None)
            for m in row.get("members", ())
        ]
        names = [name for name in alone if name is not None]
        if names and len(names) == len(alone):
            found[label] = names
    return found


def name_of(row: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The label of the row's settings: its own, less the temperature where several were run."""
    plain = row["label"].removesuffix(f" T={row['temperature']:g}")
    return plain if plain in settings else row["label"]


def gains(
    ensemble: str, members: Sequence[str], here: Mapping[str, Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of one ensemble at one temperature: by group of prompts, against best and mean member, by statistic."""
    names = [ensemble, *members]
    counts = {name: by_prompt(texts, here[name]["label"]) for name in names}
    categories = {t["prompt"]: t["category"] for t in texts if t["label"] == here[ensemble]["label"]}
    depths = {name: len(next(iter(counts[name].values()))) - 1 for name in names}
    if len(set(depths.values())) > 1:
        lengths = ", ".join(f"{name} {depth}" for name, depth in depths.items())
        raise ValueError(f"draft lengths differ ({lengths}): an ensemble is held against members of its own length")
    best = max(members, key=lambda name: here[name]["speedup"] or 0.0)
    rows = []
    for group, prompts in groups(categories).items():
        own, *alone = (np.stack([counts[name][p] for p in prompts]) for name in names)
        entropies = [
            t["target_entropy"] for t in texts if t["label"] == here[ensemble]["label"] and t["prompt"] in prompts
        ]
        for against in AGAINST:
            for statistic in STATISTICS:
                gain = ensemble_gain(own, np.stack(alone), against=against, statistic=statistic)  # type: ignore[arg-type]
                interval = [gain.low, gain.high] if gain.low <= gain.high else None
                of = STATISTICS[statistic]
                rows.append(
                    {
                        "ensemble": ensemble,
                        "temperature": here[ensemble]["temperature"],
                        "group": group,
                        "prompts": len(prompts),
                        "against": against,
                        "statistic": statistic,
                        "acceptance": _number(of(own)),
                        "members": {n: _number(of(a)) for n, a in zip(members, alone, strict=True)},
                        "gain": _number(gain.estimate),
                        "gain_ci": interval,
                        "verdict": claim_verdict(gain),
                        "target_entropy": float(np.mean([e for e in entropies if e is not None])),
                        "speedup": here[ensemble]["speedup"],
                        "speedup_ci": here[ensemble]["speedup_ci"],
                        "speedup_best_member": here[best]["speedup"],
                        "best_member": best,
                    }
                )
    return rows


def by_prompt(texts: Iterable[Mapping[str, Any]], label: str) -> dict[str, np.ndarray]:
    """Passes by accepted draft tokens, of every prompt, its turns together."""
    found: dict[str, np.ndarray] = {}
    for text in texts:
        if text["label"] == label:
            found[text["prompt"]] = found.get(text["prompt"], 0) + np.asarray(text["accepted"])
    if not found:
        raise ValueError(f"tokens.json has no text of row {label!r}: it is of another run than results.json")
    return found


def peakedness(
    temperature: float,
    overall: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    texts: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """How sure the target was of plain decoding's texts, by category."""
    plain = [
        row["label"]
        for row in overall
        if row["temperature"] == temperature and settings[name_of(row, settings)]["name"] == "autoregressive"
    ]
    mine = [t for t in texts if t["label"] in plain and t["target_entropy"] is not None]
    return [
        {"temperature": temperature, "category": category}
        | {key: float(np.mean([t[key] for t in mine if t["category"] == category])) for key in PEAKEDNESS}
        for category in dict.fromkeys(t["category"] for t in mine)
    ]


def by_agreement(texts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Voted tokens that were verified and accepted, by row, group of prompts and share of the voters that agreed."""
    found: dict[tuple[str, str, str], np.ndarray] = {}
    for text in texts:
        for share, counts in text.get("observed", {}).get("by_agreement", {}).items():
            for group in groups({text["prompt"]: text["category"]}):
                key = text["label"], group, share
                found[key] = found.get(key, 0) + np.asarray(counts)
    return [
        {"label": label, "group": group, "share": share, "verified": int(n), "accepted": int(a)}
        for (label, group, share), (n, a) in sorted(
            found.items(), key=lambda item: (*item[0][:2], Fraction(item[0][2]))
        )
    ]


def groups(categories: Mapping[str, str]) -> dict[str, list[str]]:
    """Prompts of code and maths, of the rest, and all; a group without any is left out."""
    found = collections.defaultdict(list)
    for prompt, category in categories.items():
        found["code and maths" if category in PEAKED else "the rest"].append(prompt)
        found["all"].append(prompt)
    return dict(found)


def measured_costs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Points that N drafters like this row's must gain to be as fast as it alone, by its own costs."""
    costs = {key: row[key] for key in ("label", "temperature", "alpha", "draft_cost", "t_ratio", "num_nodes")}
    if not all(costs[key] is not None for key in ("alpha", "draft_cost", "t_ratio")) or not 0 < costs["alpha"] < 1:
        return {**costs, "points": None}
    needed = [
        ensemble_break_even(n, costs["draft_cost"], costs["t_ratio"], alpha=costs["alpha"], gamma=costs["num_nodes"])
        for n in range(1, MOST + 1)
    ]
    return {**costs, "points": [_number(d) for d in needed]}


def gains_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every comparison on a line."""
    table = Table(title="Ensembles against their members, points of acceptance at equal draft length (95 % interval)")
    for column in (
        "ensemble",
        "T",
        "prompts",
        "entropy",
        "against",
        "alpha",
        "own",
        "gain",
        "+5 to +15",
        "speed, best",
    ):
        table.add_column(column)
    for row in rows:
        ci, gain = row["gain_ci"], row["gain"]
        spread = f" [{100 * ci[0]:+.1f}, {100 * ci[1]:+.1f}]" if ci else ""
        speeds = [f"{x:.2f}x" if x is not None else "-" for x in (row["speedup"], row["speedup_best_member"])]
        table.add_row(
            row["ensemble"],
            f"{row['temperature']:g}",
            f"{row['group']} ({row['prompts']})",
            f"{row['target_entropy']:.2f}",
            row["against"],
            {"first": "position 1", "mean": "mean"}[row["statistic"]],
            "-" if row["acceptance"] is None else f"{row['acceptance']:.3f}",
            "-" if gain is None else f"{100 * gain:+.1f}{spread}",
            row["verdict"],
            ", ".join(speeds),
        )
    return table


def categories_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How peaked the target is."""
    table = Table(title="The target on plain decoding's texts: entropy in nats, probability of the likeliest token")
    for column in ("category", "T", "entropy", "likeliest"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["category"], f"{row['temperature']:g}", *(f"{row[key]:.3f}" for key in PEAKEDNESS))
    return table


def agreement_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Acceptance by agreement."""
    table = Table(title="Acceptance by the share of the voters that agreed")
    for column in ("row", "prompts", "share", "verified", "accepted"):
        table.add_column(column)
    for row in rows:
        share = f"{row['accepted'] / row['verified']:.3f}"
        table.add_row(row["label"], row["group"], row["share"], str(row["verified"]), share)
    return table


def members_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What every drafter adds to memory, and reads in every pass of its own."""
    table = Table(title="Bytes of drafters")
    for column in ("row", "method", "weights and tables", "state at batch 1"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["label"], row["method"], *(f"{row[k] / 2**20:.2f} MiB" for k in ("draft_param_bytes", "kv_bytes_draft"))
        )
    return table


def measured_table(costs: Sequence[Mapping[str, Any]]) -> Table:
    """Break-even by the run's own costs."""
    table = _break_even("Points that N drafters like the best member must gain, by its measured costs")
    for cost in costs:
        if cost["points"]:
            about = f"{cost['label']}: alpha {cost['alpha']:.2f}, c {cost['draft_cost']:.3f}, t {cost['t_ratio']:.2f}"
            table.add_row(about, *map(_points, cost["points"]))
    return table


def rooflines_table(alpha: float, gamma: int) -> Table:
    """Break-even of 1 B drafters beside a 70 B target, members one after another."""
    table = _break_even(f"Points that N drafters of 1 B beside a 70 B target must gain: alpha {alpha}, {gamma} tokens")
    for name, chip in CHIPS.items():
        for shape, tree in (("one chain", False), ("union", True)):
            costs: dict[str, Any] = {"target": TARGET, "draft": DRAFT, "chip": chip, "alpha": alpha, "gamma": gamma}
            needed = [roofline_break_even(n, tree=tree, **costs) for n in range(1, MOST + 1)]
            table.add_row(f"{name}, {shape}", *(_points(_number(d)) for d in needed))
    return table


def _break_even(title: str) -> Table:
    table = Table(title=title)
    table.add_column("")
    for n in range(1, MOST + 1):
        table.add_column(f"N={n}", justify="right")
    return table


def _points(needed: float | None) -> str:
    return "never" if needed is None else f"{100 * needed:+.1f}"


def _number(value: float) -> float | None:
    """For JSON, which has no word for NaN and infinity."""
    return float(value) if np.isfinite(value) else None


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
