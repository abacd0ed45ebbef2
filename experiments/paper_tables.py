"""What a notebook needs of a paper's small study: its committed summary, and what the rows say of a claim.

A claim is a question that two numbers of one run answer; speeds and acceptance that are measured twice differ, so
differences within `NOISE` decide nothing. It imports nothing heavy: a notebook that decodes nothing takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "notebooks" / "results"
# Of a study that is run again: beside other runs, and not in the place of what is committed.
AGAIN = Path("runs/rerun")
# What is measured twice differs by this much.
NOISE = 0.03
MISSING = "undecided: the rows are missing"

Row = Mapping[str, Any]
# From a study's rows: what to show as ours, and the verdict.
Check = Callable[[Sequence[Row]], tuple[str, str]]
# What is claimed, what the paper has, how it is checked.
Claim = tuple[str, str, Check]


def study(name: str, rerun: bool = False) -> list[dict[str, Any]] | None:
    """The rows of a study, after a line on where they come from, or on what makes them.

    Args:
        name: of `experiments.small`.
        rerun: whether to run it again; started again it goes on where it was.

    Returns:
        Rows as of results.json, all categories; None where no summary is committed.

    Raises:
        subprocess.CalledProcessError: the study failed; it has printed why.
    """
    folder = COMMITTED
    if rerun:
        folder = ROOT / AGAIN / "results"
        again = [f"--runs={AGAIN}", f"--out={AGAIN}/results"]
        subprocess.run([sys.executable, "-m", "experiments.small", name, *again], cwd=ROOT, check=True)
    file = folder / f"{name}.json"
    if not file.exists():
        print(f"no run of {name} is committed; python -m experiments.small {name} makes notebooks/results/{name}.json")
        return None
    found = json.loads(file.read_text())
    print(origin(found["meta"]))
    return found["rows"]


def origin(meta: Mapping[str, Any]) -> str:
    """One line on a summary: its command and machine, and what has to be known of how it was made."""
    machine = meta["machine"]
    said = f"{meta['command']}\non {machine['processor']}, {machine['cores']} cores, {', '.join(machine['devices'])}"
    return said + (f"; {meta['note']}" if meta.get("note") else "")


def pick(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """The rows with these values, over all prompts where no category is among them."""
    wanted = {"category": "all"} | fields
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def verdict(ratios: Sequence[float]) -> str:
    """What pairs say of a claim that the second is above the first, from the second over the first of each."""
    if not ratios:
        return MISSING
    above, below = (sum(r > 1 + NOISE for r in ratios), sum(r < 1 - NOISE for r in ratios))
    if above and below:
        return "undecided: some pairs agree, some refute"
    if above:
        return "agrees" if above == len(ratios) else "agrees in part"
    if below:
        return "refutes, at this scale" if below == len(ratios) else "refutes in part, at this scale"
    return "undecided: within noise"


def rising(labels: Sequence[str], value: str = "tau", **fields: Any) -> Check:
    """A check whether a value rises along rows with these labels."""

    def check(rows: Sequence[Row]) -> tuple[str, str]:
        found = {label: pick(rows, label=label, **fields) for label in labels}
        if not all(found.values()):
            return "not run", MISSING
        values = [found[label][0][value] for label in labels]
        shown = ", ".join(f"{label} {x:.2f}" for label, x in zip(labels, values, strict=True))
        return f"{value}: {shown}", verdict([b / a for a, b in zip(values, values[1:], strict=False)])

    return check


def compare(low: str, high: str, value: str = "tau", above: float = -1.0) -> Check:
    """A check whether a row is above another, at every draft length and temperature (above a bound) of both."""

    def check(rows: Sequence[Row]) -> tuple[str, str]:
        pairs = []
        for a in pick(rows):
            name, *rest = a["label"].split(" ")
            if name == low and a["temperature"] > above:
                pairs += [(a[value], b[value]) for b in pick(rows, label=" ".join([high, *rest]))]
        shown = ", ".join(f"{a:.2f} -> {b:.2f}" for a, b in pairs) or "not run"
        return f"{value}: {shown}" if pairs else shown, verdict([b / a for a, b in pairs])

    return check


def paired(pair: str) -> Check:
    """A check of a pair of `experiments.ablate`, which has a verdict of its own from a paired bootstrap interval."""

    def check(rows: Sequence[Row]) -> tuple[str, str]:
        for row in rows:
            if row["pair"] == pair:
                low, high = row["difference_ci"] or (float("nan"), float("nan"))
                means = f"{row['value_worse']:.3f} -> {row['value_better']:.3f}"
                return f"{row['metric']}: {means} [{low:+.3f}, {high:+.3f}]", row["verdict"]
        return "not run", MISSING

    return check


def judge(claims: Sequence[Claim], rows: Sequence[Row] | None) -> None:
    """Prints claim, paper, ours and verdict; ours is undecided where there are no rows."""
    for claim, paper, check in claims:
        ours, found = ("not run", "undecided") if rows is None else check(rows)
        print(f"{claim}\n    paper: {paper}\n    ours:  {ours}\n    {found}")
