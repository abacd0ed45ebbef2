"""Does multi-token pretraining improve the model? python -m experiments.next_token runs/mtp_sweep/*/

    python -m experiments.sweep --config=configs/mtp.py:small --program=experiments.pretrain --workdir=runs/mtp_sweep

Reads the results.json of pretraining runs (same text, same tokens; heads and seeds differ) and prints, by held-out set,
the next token's loss of each kind and number of heads, mean over seeds with their spread, and its distance to one head:
held-out rows and the seeds that both have are resampled, runs of one seed together. Below 0 is better. An interval
around 0 says that this many rows and seeds show no difference; with one seed it is of that seed alone. A further head
is one layer more: runs are equal in text, not in size.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from rich.table import Table
from scipy import stats

from experiments import _main
from experiments._arguments import Parser
from experiments._next_token import SCHEMA, per_token
from specjax.analysis import Interval

# Kind and heads of a run; with one head there is no kind.
Key = tuple[str, int]
ONE: Key = ("independent", 1)


def main(arguments: Sequence[str]) -> None:
    """Compares and prints.

    Raises:
        FileNotFoundError: a run has no results.json.
        ValueError: one of another program, of other text, or nothing to compare with.
    """
    parser = Parser(
        "python -m experiments.next_token", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory of experiments.pretrain")
    rows = [row for run in parser.parse_args(arguments).runs for row in read_rows(epath.Path(run))]
    console = _main.console()
    for name in dict.fromkeys(row["set"] for row in rows):
        console.print(comparison(name, [row for row in rows if row["set"] == name]))


def read_rows(run: epath.Path) -> list[dict[str, Any]]:
    """The rows of a run's results."""
    path = run / "results.json"
    if not path.exists():
        raise FileNotFoundError(f"no {path}; expected the directory of a finished run of experiments.pretrain")
    document = json.loads(path.read_text())
    if (schema := document.get("meta", {}).get("schema")) != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, expected {SCHEMA!r}: that of multi-token pretraining")
    return document["rows"]


def comparison(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One held-out set as a table.

    Raises:
        ValueError: runs on other rows or steps, one of them twice, or none with one head.
    """
    table = Table(title=f"next token on held-out {name}, nats a token")
    for column in ("heads", "seeds", "loss", "spread", "less one head's (95 %)"):
        table.add_column(column)
    runs = by_key(name, rows)
    base = runs.get(ONE)
    if base is None:
        raise ValueError(f"no run with heads=1 among these, on {name!r}: there is nothing to compare with")
    for (kind, heads), seeds in sorted(runs.items(), key=lambda item: item[0][::-1]):
        losses = [per_token(sums) for sums in seeds.values()]
        spread = f"{np.std(losses, ddof=1):.4f}" if len(losses) > 1 else "-"
        label = f"{heads}" + (f" ({kind})" if heads > 1 else "")
        less = "" if (kind, heads) == ONE else _told(difference(seeds, base))
        table.add_row(label, str(len(losses)), f"{np.mean(losses):.4f}", spread, less)
    return table


def by_key(name: str, rows: Sequence[dict[str, Any]]) -> dict[Key, dict[int, np.ndarray]]:
    """Sums and counts `[R, 2]` by kind and heads, and by seed."""
    found: dict[Key, dict[int, np.ndarray]] = collections.defaultdict(dict)
    for row in rows:
        key = (row["kind"] if row["heads"] > 1 else ONE[0], row["heads"])
        if row["seed"] in found[key]:
            raise ValueError(
                f"two runs with heads={row['heads']}, kind={row['kind']}, seed={row['seed']}; name each once"
            )
        found[key][row["seed"]] = np.asarray(row["by_row"], np.float64)
    first = rows[0]
    for row in rows:
        other = [c for _, c in row["by_row"]] != [c for _, c in first["by_row"]]
        if other or row["steps"] != first["steps"]:
            raise ValueError(
                f"runs on {name!r} differ in held-out text or steps ({row['steps']} and {first['steps']}): only those "
                "of one sweep can be compared row by row"
            )
    return dict(found)


def difference(
    seeds: dict[int, np.ndarray], base: dict[int, np.ndarray], resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Loss less the base's over the seeds that both have, with its bootstrap interval over rows and over seeds.

    Of one seed the interval knows nothing about others. Of few, their spread is widened by sqrt(S / (S - 1)), what
    drawing S of S with replacement leaves out, and by Student's quantile for S - 1 over the normal one.

    Raises:
        ValueError: no seed in common.
    """
    both = sorted(seeds.keys() & base.keys())
    if not both:
        raise ValueError(f"seeds {sorted(seeds)} and {sorted(base)} have none in common; train both with the same")
    less_sr = np.stack([seeds[seed][:, 0] - base[seed][:, 0] for seed in both])
    count_r = base[both[0]][:, 1]
    rng, size = np.random.default_rng(0), len(both)
    tail = (1 + confidence) / 2
    wide = (size / (size - 1)) ** 0.5 * stats.t.ppf(tail, size - 1) / stats.norm.ppf(tail) if size > 1 else 1.0
    draws = []
    for _ in range(resamples):
        rows, picked = rng.integers(len(count_r), size=len(count_r)), rng.integers(size, size=size)
        by_seed = less_sr[:, rows].sum(axis=1) / count_r[rows].sum()
        draws.append(by_seed.mean() + wide * (by_seed[picked].mean() - by_seed.mean()))
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(less_sr.mean(axis=0).sum() / count_r.sum()), float(low), float(high))


def _told(less: Interval) -> str:
    verdict = "no difference shown"
    if less.high < 0 or less.low > 0:
        verdict = "better" if less.high < 0 else "worse"
    return f"{less.estimate:+.4f} [{less.low:+.4f}, {less.high:+.4f}] {verdict}"


if __name__ == "__main__":
    with _main.one_line_errors():
        main(sys.argv[1:])
