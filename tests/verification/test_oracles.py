"""Compiled rules against the exact oracles, draft by draft, on random tables with zeros among their probabilities."""

from __future__ import annotations

import pytest

from specjax import analysis
from specjax.verification import Block, KSeq, OneHot, Recursive, Traversal
from tests.verification import oracle

TREE = (-1, -1, 0, 0, 1)
CHAIN = analysis.chain_parents(3)


@pytest.mark.parametrize(
    ("reference", "rule", "siblings"),
    [
        ("recursive", Recursive, "iid"),
        ("recursive", Recursive, "without_replacement"),
        ("traversal", Traversal, "iid"),
        ("traversal", Traversal, "without_replacement"),
        ("k_seq", KSeq, "iid"),
    ],
)
def test_tree_rules(reference, rule, siblings):
    oracle.check(rule(2), oracle.make_cases(reference, TREE, siblings))


@pytest.mark.parametrize(("reference", "rule"), [("one_hot", OneHot), ("traversal", Traversal)])
def test_chosen_trees(reference, rule):
    """Siblings may repeat a token here."""
    oracle.check(rule(2), oracle.make_cases(reference, TREE, one_hot=True), one_hot=True)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize(("reference", "rule"), [("block", Block), ("block", Traversal), ("speculative", Recursive)])
def test_chains(reference, rule, one_hot):
    oracle.check(rule(3), oracle.make_cases(reference, CHAIN, one_hot=one_hot), is_chain=True, one_hot=one_hot)
