"""The largest tree that is allowed, 128 nodes of depth 16, through every rule and through the loop."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.decoding import Scores, TreeSpec
from specjax.decoding.tree import MAX_DEPTH, MAX_NODES, depths
from specjax.testing import contract, laws
from specjax.testing.rule_contract import assert_well_formed, verify
from specjax.verification import KSeq, OneHot, Recursive, Traversal
from tests.contract.scripted import REQUESTS, ROWS, plain, scripted

EACH = MAX_NODES // MAX_DEPTH
# At every depth as many siblings, under the last of those above.
TREE = TreeSpec(tuple(EACH * (node // EACH) - 1 for node in range(MAX_NODES)))
LAST = tuple(range(EACH - 1, MAX_NODES, EACH))


def test_the_tree_is_as_large_as_may_be():
    assert (TREE.num_nodes, TREE.depth, TREE.max_children) == (MAX_NODES, MAX_DEPTH, EACH)


@pytest.mark.parametrize("rule", [KSeq, OneHot, Recursive, Traversal])
def test_rules(rule):
    """Draft and target have one law: a node's first child is taken, by the one-hot rule where it says what is drawn."""
    rows = 64
    keys, sampling = laws.step_keys(rows, 0), laws.plain(rows)
    law = jax.nn.log_softmax(jnp.asarray([2.0, 0.0, 0.5, -1.0]))
    tokens = jax.random.categorical(jax.random.key(1), law, shape=(rows, MAX_NODES))
    draft = TREE.draft(
        tokens,
        law=jnp.zeros((rows, MAX_NODES), jnp.int32),
        laws=jnp.broadcast_to(law, (rows, 1, laws.VOCAB)),
    )
    logits = jnp.broadcast_to(law, (rows, MAX_NODES + 1, laws.VOCAB))
    scores = Scores(logits, jnp.argmax(logits, -1).astype(jnp.int32), depths(draft.parents), {})
    deep = draft.replace(valid=draft.valid & jnp.isin(jnp.arange(MAX_NODES), jnp.asarray(LAST)))
    verdict = verify(rule(MAX_DEPTH), deep, scores, sampling, keys)
    assert_well_formed(rule(MAX_DEPTH), deep, verdict)
    if rule is not OneHot:
        assert (verdict.num_accepted == MAX_DEPTH).all() and (verdict.path == LAST).all()
    verdict = verify(rule(MAX_DEPTH), draft, scores, sampling, keys)
    assert_well_formed(rule(MAX_DEPTH), draft, verdict)
    assert verdict.num_accepted.max() > 1 if rule is OneHot else (verdict.path[:, 0] == 0).all()


def test_loop():
    """Seventeen tokens a pass, along the last-born of every depth; the cache is right with drawn tokens too."""
    sub = scripted(TREE, LAST, (1.0,) * ROWS)
    done = contract.complete(*sub.loop(OneHot), REQUESTS)
    assert [d.tokens for d in done] == [d.tokens for d in plain()]
    assert all(d.accepted[MAX_DEPTH] > 0 for d in done)
    sampled = [dataclasses.replace(request, temperature=0.7) for request in REQUESTS]
    contract.check_cache(sub, Recursive, sampled, steps=4)
