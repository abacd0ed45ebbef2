"""Greedy speculative text against plain decoding's: python -m experiments.equality --config=configs/equality.py

At batch 1 and in ragged batches with slot refill. A text is equal, or it first parts at a near-tie (the gap of the two
best logits is below the stated bound, and rounding may choose either), or it is wrong. Writes equality.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_collections
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import _main
from experiments._prompts import load_groups
from specjax import build
from specjax.analysis import Divergence, GreedyComparison
from specjax.decoding import Completion, Request, check_requests
from specjax.evaluation import results
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.conversations import encode
from specjax.evaluation.prompts import Prompt
from specjax.evaluation.teacher import Teacher, rounding_bound

SCHEMA = "specjax.equality/1"


def main(config: ml_collections.ConfigDict) -> None:
    """Runs, compares, writes, prints; ends with an error where a text is wrong."""
    console, workdir = _main.console(), _main.first_workdir()
    if config.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={config.max_new_tokens}; expected at least 1")
    if not config.batches or min(config.batches) < 1:
        raise ValueError(f"batches={tuple(config.batches)}; expected one or more numbers, each at least 1")
    lineup = build.lineup_from_config(config)
    groups = load_groups(config, console)
    results.check_writable(workdir)
    for label in lineup.left_out:
        console.print(f"row {label!r} is left out: set --config.rows.{label}.source to compare it", style="yellow")
    target = build.placed_target(config)
    contenders = build.contenders(lineup, target)
    baseline = next((c for c in contenders if c.info.is_baseline), None)
    if not isinstance(baseline, LoopContender):
        raise ValueError("there is no row of the drafter autoregressive, which texts are compared with")
    bound = rounding_bound(target.config.dtype, config.precision, config.near_tie_bound)
    teacher = Teacher(baseline.loop.graph, baseline.weights.target, precision=config.precision)

    # All prompts in one call, so that one token buffer, and with it one set of programs, serves them all.
    prompts = [prompt for group in groups.values() for prompt in group]
    requests = [
        Request(encode(target, [{"role": "user", "content": p.turns[0]}]), config.max_new_tokens, id=i)
        for i, p in enumerate(prompts)
    ]
    check_requests(requests, target.context, target.config.vocab_size)
    console.print(f"plain text of {len(prompts)} prompts, batch 1")
    plain = baseline.complete_all(requests, 1)[0]

    rows: list[dict[str, Any]] = []
    for batch in config.batches:
        for contender in contenders:
            if isinstance(contender, LoopContender) and not (contender is baseline and batch == 1):
                done, took = contender.complete_all(requests, batch)
                first = 0
                for name, group in groups.items():
                    part = slice(first, first + len(group))
                    first = part.stop
                    found = teacher.compare(
                        [r.prompt for r in requests[part]],
                        [c.tokens for c in plain[part]],
                        [c.tokens for c in done[part]],
                        bound,
                    )
                    rows.append(row_of(contender, batch, name, group, done[part], found))
                    console.print(sentence(rows[-1]), highlight=False)
                console.print(f"  in {took.seconds:.0f} s, compiling included", highlight=False)

    precision = {"dtype": target.config.dtype, "matmul": config.precision, "near_tie_bound": bound}
    meta = results.describe(config.to_dict(), precision, SCHEMA)
    results.write_json(workdir / "equality.json", {"meta": meta, "rows": rows})
    console.print(table(rows))
    console.print(f"written to {workdir / 'equality.json'}", highlight=False)
    wrong = [f"{row['label']} at batch {row['batch']} on {row['prompts_from']}" for row in rows if row["different"]]
    if wrong:
        raise ValueError(f"greedy text differs from plain decoding's beyond near-ties: {'; '.join(wrong)}")


def row_of(
    contender: LoopContender,
    batch: int,
    name: str,
    prompts: Sequence[Prompt],
    done: Sequence[Completion],
    found: GreedyComparison,
) -> dict[str, Any]:
    """One row: a contender at a batch size on one group of prompts, against plain decoding at batch 1."""

    def listed(divergences: Sequence[Divergence]) -> list[dict[str, Any]]:
        return [
            {"prompt": prompts[d.row].id, "position": d.position, "plain": d.baseline, "here": d.other, "gap": d.gap}
            for d in divergences
        ]

    info = contender.info
    return {
        "label": info.label,
        "method": info.method,
        "rule": info.rule,
        "num_nodes": info.num_nodes,
        "prompts_from": name,
        "batch": batch,
        "prompts": len(prompts),
        "tokens": sum(len(c.tokens) for c in done),
        "tau": sum(c.emitted for c in done) / max(1, sum(c.steps for c in done)),
        "equal": found.equal,
        "near_ties": listed(found.near_ties),
        "different": listed(found.different),
    }


def sentence(row: dict[str, Any]) -> str:
    """A row in words."""
    gaps = "".join(f", gap {d['gap']:.1e}" for d in row["near_ties"])
    return (
        f"{row['prompts_from']}: {row['label']}, batch {row['batch']}: {row['equal']} of {row['prompts']} equal, "
        f"{len(row['near_ties'])} near-ties{gaps}, {len(row['different'])} different"
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """All rows."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("row", "prompts", "batch", "texts", "tokens", "tau", "equal", "near-ties", "different"):
        out.add_column(name, justify="left" if name in ("row", "prompts") else "right")
    for row in rows:
        counts = (row["batch"], row["prompts"], row["tokens"], f"{row['tau']:.2f}", row["equal"])
        cells = (row["label"], row["prompts_from"], *counts, len(row["near_ties"]), len(row["different"]))
        out.add_row(*map(str, cells))
    return out


if __name__ == "__main__":
    _main.run(main, config="configs/equality.py", workdir="runs/equality")
