"""How much each rule accepts: python -m experiments.acceptance --config=configs/acceptance.py

All rules on the same random tables and the same shapes of draft, as expected accepted tokens a step. On a small
vocabulary the draws are enumerated and the figures exact; on a larger one drafts are drawn, each draft's expectation
is computed, and the mean has an interval. What theory says of their order is checked, and a violation ends the program
with an error. Writes results.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, cast

import ml_collections
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments import _main
from specjax import analysis
from specjax.analysis.enumeration import DrawFn, Law, LawFn, branching_parents
from specjax.evaluation import results

SCHEMA = "specjax.acceptance/1"
WEIGHT = 9  # Probabilities are small integers over their sum, so that fractions stay short.
SLACK = 1e-9  # of comparisons between means of floats

Parents = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A rule with the way its drafts are made."""

    rule: str
    siblings: str

    @property
    def label(self) -> str:
        """As printed."""
        return f"{self.rule}, {self.siblings.replace('_', ' ')}"


CONTENDERS = (
    Contender("block", "iid"),
    Contender("traversal", "iid"),
    Contender("traversal", "without_replacement"),
    Contender("traversal", "chosen"),
    Contender("recursive", "iid"),
    Contender("recursive", "without_replacement"),
    Contender("k_seq", "iid"),
    Contender("one_hot", "iid"),
    Contender("one_hot", "without_replacement"),
    Contender("one_hot", "chosen"),
)
# In every tree, at least as many accepted tokens in every table. The first is a theorem of Sun et al. 2024 for chains.
THEOREMS = (("block, iid", "recursive, iid"),)
# Likewise, but not proved in general: how often it held is reported.
EXPECTED = (
    ("traversal, iid", "recursive, iid"),
    ("traversal, without replacement", "recursive, without replacement"),
    ("recursive, iid", "one_hot, iid"),
    ("recursive, without replacement", "recursive, iid"),
    ("one_hot, without replacement", "one_hot, iid"),
)


def main(config: ml_collections.ConfigDict) -> None:
    """Computes, checks, prints, writes."""
    console, workdir = _main.console(), _main.workdir()
    check(config)
    results.check_writable(workdir)
    rows: list[dict[str, Any]] = []
    trees = sorted(config.trees.items(), key=lambda item: len(branching_parents(item[1])))
    for (name, branching), exact in itertools.product(trees, (True, False)):
        with console.status(f"{name}, {'enumerated' if exact else 'drawn'}"):
            rows += measure(config, name, tuple(branching), exact)
    orders = [order for group in grouped(rows).values() for order in compare(group)]
    meta = results.describe(config.to_dict(), {"dtype": "fractions, float64"}, SCHEMA)
    results.write_json(workdir / "results.json", {"meta": meta, "rows": rows, "orders": orders})
    for table in tables(rows):
        console.print(table)
    for line in summary(orders):
        console.print(line, highlight=False)
    console.print(f"written to {workdir / 'results.json'}", highlight=False)
    if broken := [sentence(order) for order in orders if order["proved"] and order["held"] < order["tables"]]:
        raise ValueError(f"a theorem does not hold: {'; '.join(broken)}")


def check(config: ml_collections.ConfigDict) -> None:
    """Checks the settings.

    Raises:
        ValueError: one is out of range.
    """
    if config.tables < 1 or config.drafts < 2:
        raise ValueError(f"tables={config.tables}, drafts={config.drafts}; expected at least 1 and 2")
    if not 0 <= config.likeness < 1:
        raise ValueError(f"likeness={config.likeness}; expected a number in [0, 1)")
    if not config.trees:
        raise ValueError("trees is empty; expected at least one, as children a depth")
    for name, branching in config.trees.items():
        if not branching or min(branching) < 1 or max(branching) > config.exact_vocab:
            raise ValueError(
                f"tree {name!r} is {tuple(branching)}; expected 1 to exact_vocab={config.exact_vocab} children a depth"
            )
        if max(branching) > config.sampled_vocab:
            raise ValueError(
                f"sampled_vocab={config.sampled_vocab}; tree {name!r} needs at least {max(branching)} tokens"
            )


def measure(
    config: ml_collections.ConfigDict, name: str, branching: Sequence[int], exact: bool
) -> list[dict[str, Any]]:
    """One row a contender that takes this tree."""
    parents = branching_parents(branching)
    chain, one_level = max(branching) == 1, len(branching) == 1
    vocab = config.exact_vocab if exact else config.sampled_vocab
    found: dict[str, list[tuple[float, float]]] = {}
    bounds: list[float] = []
    known: dict[str, list[float]] = {}
    for seed in range(config.seed, config.seed + config.tables):
        target = random_law(f"p {seed}", vocab, exact)
        draft = likened(target, random_law(f"q {seed}", vocab, exact), config.likeness)
        if one_level:
            bounds.append(most_that_any_rule_accepts(target(()), draft(()), branching[0]))
        if len(parents) == 1:
            pairs = list(zip(target(()), draft(()), strict=True))
            known.setdefault("recursive, iid", []).append(float(sum(min(p, q) for p, q in pairs)))
            known.setdefault("one_hot, iid", []).append(float(sum(p * q for p, q in pairs)))
        for contender in CONTENDERS:
            # Without siblings it does not matter how they relate; block verification takes nothing else.
            if contender.siblings != "without_replacement" if chain else contender.rule != "block":
                rng = random.Random(f"{seed} {contender.siblings}")
                value = accepted(contender, target, draft, parents, vocab, None if exact else config.drafts, rng)
                found.setdefault(contender.label, []).append(value)
    rows = [
        {
            "tree": name,
            "nodes": len(parents),
            "vocab": vocab,
            "exact": exact,
            "rule": label,
            "accepted": statistics.fmean(mean for mean, _ in values),
            # Of the mean over these tables: the tables are given, the drafts are drawn.
            "half_width": 1.96 * sum(error**2 for _, error in values) ** 0.5 / len(values),
            "by_table": [mean for mean, _ in values],
            "errors": [error for _, error in values],
            "bound": statistics.fmean(bounds) if bounds else None,
            "bound_by_table": bounds,
            "known_by_table": known.get(label, []),
        }
        for label, values in found.items()
    ]
    # Rules that accept equally much keep the order of CONTENDERS.
    return sorted(rows, key=lambda row: -row["accepted"])


# ---- Tables ----


def random_law(name: str, vocab: int, exact: bool) -> LawFn:
    """A law after every context, fixed by the name: fractions, or floats where exact ones would be slow."""

    @cache
    def law(context: tuple[int, ...]) -> Law:
        rng = random.Random(f"{name} {context}")
        weights = [rng.randint(1, WEIGHT) ** 2 for _ in range(vocab)]
        return cast(Law, tuple(Fraction(w, sum(weights)) if exact else w / sum(weights) for w in weights))

    return law


def likened(target: LawFn, own: LawFn, likeness: float) -> LawFn:
    """The draft's law: `likeness` of the target's, the rest its own."""
    share = Fraction(likeness).limit_denominator(100)

    @cache
    def law(context: tuple[int, ...]) -> Law:
        p, r = target(context), own(context)
        part = share if isinstance(p[0], Fraction) else float(share)
        return cast(Law, tuple(part * a + (1 - part) * b for a, b in zip(p, r, strict=True)))

    return law


def most_that_any_rule_accepts(p: Sequence[Any], q: Sequence[Any], children: int) -> float:
    """sum min(p, 1 - (1 - q)^k): a token can be accepted only where it is among k independent children."""
    return float(sum(min(a, 1 - (1 - b) ** children) for a, b in zip(p, q, strict=True)))


# ---- Acceptance ----


def accepted(
    contender: Contender,
    target: LawFn,
    draft: LawFn,
    parents: Parents,
    vocab: int,
    drafts: int | None,
    rng: random.Random,
) -> tuple[float, float]:
    """Expected accepted tokens and their standard error; every draft is enumerated where `drafts` is None."""
    rule = analysis.REFERENCE_RULES[contender.rule]
    if contender.siblings == "chosen":
        draws = analysis.fixed_draws(lambda context, rank: ranked(draft(context))[rank], parents, vocab)
        return of_draft(rule, next(iter(draws(())))[1], target), 0.0
    if drafts is None:
        exact: DrawFn = analysis.sampled_draws(draft, parents, cast(Any, contender.siblings))
        return float(analysis.enumerate_step(rule, target, exact).expected_accepted), 0.0
    values = [of_draft(rule, draw(draft, parents, contender.siblings, rng), target) for _ in range(drafts)]
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def of_draft(rule: analysis.enumeration.Rule, tree: analysis.DraftTree, target: LawFn) -> float:
    """Expected accepted tokens of one realised draft."""
    return float(sum(chance * len(path) for (path, _), chance in rule(tree, target).items()))


def draw(draft: LawFn, parents: Parents, siblings: str, rng: random.Random) -> analysis.DraftTree:
    """One draft, with the law that each node was drawn from."""
    tokens: list[int] = []
    laws: list[Law] = []
    for node, parent in enumerate(parents):
        context: tuple[int, ...] = ()
        while parent >= 0:
            context, parent = (tokens[parent], *context), parents[parent]
        law = list(draft(context))
        if siblings == "without_replacement":
            for sibling in range(node):
                if parents[sibling] == parents[node]:
                    law[tokens[sibling]] = cast(Fraction, 0.0)
            law = [x / sum(law) for x in law]
        laws.append(tuple(law))
        tokens += rng.choices(range(len(law)), [float(x) for x in law])
    return analysis.DraftTree(parents, tuple(tokens), tuple(laws))


def ranked(law: Sequence[Any]) -> list[int]:
    """Ids, the likeliest first."""
    return sorted(range(len(law)), key=lambda x: (-law[x], x))


# ---- Orders and tables ----


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, bool], list[Mapping[str, Any]]]:
    """Rows by tree and by whether they are exact."""
    groups: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tree"], row["exact"]), []).append(row)
    return groups


def compare(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In how many tables each order of theory held, within five standard errors where drafts were drawn."""
    by_rule = {row["rule"]: row for row in rows}
    pairs = [(a, b, True) for a, b in THEOREMS] + [(a, b, False) for a, b in EXPECTED]
    orders = [
        order(rows, f"{a} >= {b}", proved, by_rule[a], by_rule[b]["by_table"], by_rule[b]["errors"])
        for a, b, proved in pairs
        if a in by_rule and b in by_rule
    ]
    for row in rows:
        bounds, exact = row["bound_by_table"], [0.0] * len(row["by_table"])
        if bounds and row["rule"].endswith("iid"):
            flipped = {**row, "by_table": bounds, "errors": exact}
            orders.append(order(rows, f"the bound >= {row['rule']}", True, flipped, row["by_table"], row["errors"]))
        if known := row["known_by_table"]:
            says = f"{row['rule']} = {'sum p q' if 'one_hot' in row['rule'] else 'sum min(p, q)'}"
            above = order(rows, says, True, row, known, exact)
            below = order(rows, says, True, {**row, "by_table": known}, row["by_table"], exact)
            orders.append(min(above, below, key=lambda found: found["held"]))
        if bounds and row["rule"] == "k_seq, iid":
            least = [(1 - 1 / math.e) * bound for bound in bounds]
            orders.append(order(rows, "k_seq, iid >= (1 - 1/e) of the bound", True, row, least, exact))
    return orders


def order(
    rows: Sequence[Mapping[str, Any]],
    says: str,
    proved: bool,
    more: Mapping[str, Any],
    less: Sequence[float],
    errors: Sequence[float],
) -> dict[str, Any]:
    """One comparison, table by table."""
    held = sum(
        a + 5 * (e**2 + f**2) ** 0.5 + SLACK >= b
        for a, e, b, f in zip(more["by_table"], more["errors"], less, errors, strict=True)
    )
    return {
        "tree": rows[0]["tree"],
        "exact": rows[0]["exact"],
        "says": says,
        "proved": proved,
        "held": held,
        "tables": len(less),
    }


def sentence(order: Mapping[str, Any]) -> str:
    """A comparison in words."""
    how = "enumerated" if order["exact"] else "drawn"
    kind = "proved" if order["proved"] else "expected"
    return f"{order['tree']}, {how}: {order['says']} in {order['held']} of {order['tables']} tables ({kind})"


def summary(orders: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many of the orders held in all tables, and those that did not."""
    lines = []
    for proved, kind in ((True, "proved"), (False, "expected")):
        some = [order for order in orders if order["proved"] == proved]
        failed = [order for order in some if order["held"] < order["tables"]]
        lines.append(f"{len(some) - len(failed)} of {len(some)} {kind} orders hold in every table")
        lines += [f"  {sentence(order)}" for order in failed]
    return lines


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """One table a tree, the rule that accepts most first; the enumerated and the drawn figures side by side."""
    found: dict[str, dict[str, dict[bool, Mapping[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["tree"], {}).setdefault(row["rule"], {})[row["exact"]] = row
    printed: list[Table] = []
    columns: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
        ("exact", lambda row: f"{row['accepted']:.4f}"),
        ("drawn", lambda row: f"{row['accepted']:.3f} ± {row['half_width']:.3f}"),
    )
    for tree, by_rule in found.items():
        table = Table(title=f"accepted tokens a step, {tree}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("rule, children")
        first = next(iter(by_rule.values()))
        for (name, _), exact in zip(columns, (True, False), strict=True):
            bound = first[exact]["bound"]
            most = f", at most {bound:.4f} of iid" if bound is not None else ""
            table.add_column(f"{name}, V = {first[exact]['vocab']}{most}", justify="right")
        for rule, values in by_rule.items():
            table.add_row(rule, *(show(values[exact]) for (_, show), exact in zip(columns, (True, False), strict=True)))
        printed.append(table)
    return printed


if __name__ == "__main__":
    _main.run(main, config="configs/acceptance.py", workdir="runs/acceptance")
