"""A draft model's tree: what it draws, from which laws, and that rules stay exact over it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding
from specjax.analysis import g_test
from specjax.decoding import Request
from specjax.decoding.sampling import DRAFT, Keys, request_keys
from specjax.decoding.tree import TreeSpec, from_branching
from specjax.drafting import DraftTree
from specjax.models import merge
from specjax.testing import contract
from specjax.testing.markov import markov_config, markov_params, random_law
from specjax.verification import KSeq, OneHot, Recursive, Traversal

from .common import VOCAB, config, subject

WAYS = ("iid", "without_replacement")
TREE = from_branching((3, 2, 1))


@pytest.mark.parametrize("siblings", [WAYS[1], pytest.param(WAYS[0], marks=pytest.mark.slow)])
def test_contract(siblings: Any) -> None:
    sub = subject(DraftTree(config(1), TREE, siblings, shares=("embed",)))
    contract.check_drafter(sub, Recursive)
    requests = [Request(tuple(np.arange(n) % VOCAB), 60, id=n) for n in (20, 30, 40)]
    done = contract.check_equals_autoregressive(sub, Recursive, requests)
    assert sum(c.accepted[1:].sum() for c in done) > 0


def markov_tree(drafter: type[DraftTree], siblings: Any, tree: TreeSpec = TREE) -> tuple[DraftTree, Any, Any]:
    """Over the four-token Markov target, the draft another Markov model."""
    return drafter(markov_config(4), tree, siblings), markov_params(random_law(4, 7, sharpness=1.0)), {}


@pytest.mark.parametrize(
    ("siblings", "rule"),
    [
        ("without_replacement", Recursive),
        pytest.param("iid", KSeq, marks=pytest.mark.slow),
        pytest.param("iid", Recursive, marks=pytest.mark.slow),
        pytest.param("iid", Traversal, marks=pytest.mark.slow),
        pytest.param("without_replacement", Traversal, marks=pytest.mark.slow),
    ],
)
def test_law_of_whole_decodes(siblings: Any, rule: Any) -> None:
    assert contract.law_p_value(*markov_tree(DraftTree, siblings), rule, draws=1 << 15) > 1e-6


class Swapped(DraftTree):
    """The planted fault: siblings drawn in one way and declared to be drawn in the other."""

    def propose(self, *args: Any) -> Any:
        draft, state, cache = super().propose(*args)
        other = "iid" if self.siblings == "without_replacement" else "without_replacement"
        return dataclasses.replace(draft, siblings=other), state, cache


@pytest.mark.parametrize(
    ("siblings", "draws"), [(WAYS[1], 1 << 14), pytest.param(WAYS[0], 1 << 17, marks=pytest.mark.slow)]
)
def test_siblings_declared_wrongly_are_caught(siblings: Any, draws: int) -> None:
    assert contract.law_p_value(*markov_tree(Swapped, siblings), Recursive, draws=draws) < 1e-6


GAPS = {  # ranks drawn and not given out, or given out in another order
    "the root are of ranks 1": TreeSpec((-1,), (1,)),
    "the root are of ranks 0, 2": TreeSpec((-1, -1), (0, 2)),
    "the root are of ranks 1, 0": TreeSpec((-1, -1), (1, 0)),
    "node 0 are of ranks 1": TreeSpec((-1, 0), (0, 1)),
}


@pytest.mark.parametrize("says", GAPS)
def test_draws_that_are_no_nodes_are_refused(says: str) -> None:
    """Nothing would take them out of the law of those behind them."""
    with pytest.raises(ValueError, match=f"the children of {says};.* or siblings='iid'"):
        DraftTree(markov_config(4), GAPS[says], "without_replacement")


def test_independent_siblings_may_leave_ranks_out() -> None:
    made = markov_tree(DraftTree, "iid", TreeSpec((-1, -1, 0), (2, 0, 1)))
    assert contract.law_p_value(*made, Recursive, draws=1 << 14) > 1e-6


def first_drafts(sub: contract.Subject, requests: list[Request]) -> tuple[Any, Any]:
    """Drafts of the first step, and the context that they are drawn in."""
    loop, weights = sub.loop(OneHot)
    state = decoding.prefill(loop, weights, requests, context=64, seed=0)

    @jax.jit
    def propose(weights: Any, state: Any) -> Any:
        target, keys = merge(sub.graph, weights.target), Keys(state.request, state.length)
        parts = weights.drafter, weights.tables, target, state.cache, state.drafter
        return sub.drafter.propose(*parts, state.context, keys)[0]

    return jax.tree.map(np.asarray, propose(weights, state)), state.context


def path_to(drafts: Any, row: int, node: int) -> list[int]:
    """Tokens in front of a node, from the root's first child on."""
    found, at = [], TREE.parents[node]
    while at >= 0:
        found.insert(0, int(drafts.tokens[row, at]))
        at = TREE.parents[at]
    return found


@pytest.mark.parametrize("siblings", [WAYS[1], pytest.param(WAYS[0], marks=pytest.mark.slow)])
def test_drafts(siblings: Any) -> None:
    """Laws are those of a fresh pass over text and path; siblings without replacement differ, and end with the law."""
    sub = subject(DraftTree(config(1), TREE, siblings))
    drafts, context = first_drafts(sub, [Request((1, 2, 3, 4), 20, temperature=1.0, top_k=2, id=i) for i in range(8)])
    network = merge(sub.drafter.graph, sub.params)
    texts, nodes = [], list(itertools.product(range(8), range(TREE.num_nodes)))
    length = int(context.length[0])
    for row, node in nodes:
        text = [*np.asarray(context.tokens)[row, :length].tolist(), *path_to(drafts, row, node)]
        texts.append(text + [0] * (length + TREE.depth - len(text)))
    tokens = np.asarray(texts, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    out = network.full(tokens, positions, np.zeros_like(tokens), taps=("normed",))
    logits = np.asarray(network.logits(out.taps["normed"]), np.float64)
    for place, (row, node) in enumerate(nodes):
        behind = logits[place, length + TREE.node_depths[node] - 2]
        kept = behind >= np.sort(behind)[-2]
        law = np.where(kept, behind, -np.inf) - np.logaddexp.reduce(behind[kept])
        np.testing.assert_allclose(drafts.laws[row, drafts.law[row, node]], law, atol=1e-4)
    top = TREE.levels[0]
    if siblings == "iid":
        assert drafts.valid.all()
    else:  # two tokens for three children
        assert (drafts.valid[:, top] == [True, True, False]).all()
        assert (drafts.tokens[:, top[0]] != drafts.tokens[:, top[1]]).all()


def test_draws_without_replacement() -> None:
    """Ordered pairs have the law p(x) p(y) / (1 - p(x))."""
    law, draws = np.array([0.5, 0.3, 0.15, 0.05]), 1 << 16
    keys = Keys(request_keys(0, list(range(draws))), jnp.full((draws,), 9, jnp.int32))
    log_law = jnp.broadcast_to(jnp.log(jnp.asarray(law, jnp.float32)), (draws, 4))
    pairs = np.asarray(keys.sample_distinct(DRAFT, 0, log_law, 2))
    counts = np.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    expected = np.array(
        [0 if x == y else law[x] * law[y] / (1 - law[x]) for x, y in itertools.product(range(4), repeat=2)]
    )
    assert counts[expected == 0].sum() == 0
    assert g_test(counts[expected > 0], expected[expected > 0]).p_value > 1e-6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tree": TreeSpec(())}, "a tree without nodes"),
        ({"siblings": "both"}, "siblings='both'; expected 'iid' or 'without_replacement'"),
        ({"temperature": 0.0}, "temperature=0.0 of a draft model"),
        ({"tree": from_branching((VOCAB + 1,))}, f"a node has {VOCAB + 1} children"),
    ],
)
def test_options_out_of_range(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DraftTree(**({"config": config(1), "tree": TREE} | change))
