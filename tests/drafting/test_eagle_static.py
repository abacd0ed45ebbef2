"""EAGLE's static tree: the nodes that the dynamic tree has where both hold all candidates, and the contract."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from specjax import decoding
from specjax.decoding import Request
from specjax.decoding.tree import from_branching, from_choices
from specjax.drafting import registry
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.eagle_static import EagleStatic
from specjax.models import merge
from specjax.models.eagle import EagleConfig, draft_layer
from specjax.testing import contract
from specjax.verification import Recursive
from tests.drafting import common

CONFIG = EagleConfig(layer=draft_layer(common.config(1), intermediate_size=16, head_size=common.VOCAB))
FULL = from_branching((2, 2))
UNEVEN = from_choices([(0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 2)])


def static(tree):
    return EagleStatic(CONFIG, tree.num_nodes, tree=tree)


def paths(draft, row):
    found = {-1: ()}
    for node, (token, parent) in enumerate(zip(draft.tokens[row], draft.parents[row], strict=True)):
        found[node] = (*found[int(parent)], int(token))
    return [path for node, path in found.items() if node >= 0]


def test_it_has_the_nodes_of_the_dynamic_tree_where_both_have_all():
    sub = common.subject(static(FULL), layers=1)
    loop, weights = sub.loop(Recursive)
    prompts = [(1, 3, 4, 1), (7, 0, 2)]
    state = decoding.prefill(loop, weights, [Request(p, 8) for p in prompts], context=64, seed=0)
    target, dynamic = merge(sub.graph, sub.target), EagleTree(CONFIG, 6, levels=2, top_k=2)

    @jax.jit
    def drafts(s):
        arguments = (sub.params, sub.tables, target, s.cache, s.drafter, s.context, None)
        return [d.propose(*arguments)[0] for d in (sub.drafter, dynamic)]

    mine, theirs = jax.device_get(drafts(state))
    for row in range(2):
        assert len(set(paths(mine, row))) == 6
        assert set(paths(mine, row)) == set(paths(theirs, row))
        # Ranks are the dynamic tree's order.
        assert [p for p in paths(mine, row) if len(p) == 1] == [p for p in paths(theirs, row) if len(p) == 1]


def test_contract_of_an_uneven_tree():
    sub = common.subject(static(UNEVEN), layers=1)
    contract.check_drafter(sub, Recursive)
    done = contract.check_equals_autoregressive(dataclasses.replace(sub, eos=()), Recursive, common.looping_requests())
    assert sum(c.accepted[1:].sum() for c in done) > 0


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="num_nodes=5 with a tree of 6 nodes; expected as many"):
        EagleStatic(CONFIG, 5, tree=FULL)
    with pytest.raises(ValueError, match="a node has 20 children, the draft vocabulary only 13 tokens"):
        static(from_choices([(19,)]))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_heads_of_both_kinds_draft_a_tree_by_its_choices(name, monkeypatch):
    saved = SimpleNamespace(config=CONFIG, params={}, tables={})
    monkeypatch.setattr(registry, "_trained", lambda *_: saved)
    made = registry.DRAFTERS[name](None, source="x", choices=((0,), (1,), (0, 0)))
    assert made.name == name and made.drafter == EagleStatic(CONFIG, 3, tree=from_choices([(0,), (1,), (0, 0)]))
    if name == "eagle3":
        with pytest.raises(ValueError, match="levels=2 and choices: a tree is dynamic or static"):
            registry.DRAFTERS[name](None, source="x", choices=((0,),), levels=2)
