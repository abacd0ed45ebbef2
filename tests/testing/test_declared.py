"""A draft that is not what its drafter declares is named: the loop itself would decode on, wrongly."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from specjax.decoding import Draft, make_sampling
from specjax.decoding.tree import TreeSpec, chain
from specjax.drafting import PromptLookup
from specjax.testing.contract import assert_declared
from specjax.testing.tables import TableTree

VOCAB, ROWS = 4, 2
SPEC = TreeSpec((-1, -1, 0))
DRAWN, GREEDY = make_sampling([1.0] * ROWS), make_sampling([0.0] * ROWS)
LAWS = jnp.broadcast_to(jnp.log(jnp.asarray([[0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4]])), (ROWS, 2, VOCAB))


def draft(tokens=(0, 1, 3), **changes) -> Draft:
    law = jnp.broadcast_to(jnp.asarray([0, 0, 1]), (ROWS, 3))
    made = SPEC.draft(jnp.broadcast_to(jnp.asarray(tokens), (ROWS, 3)), law=law, laws=LAWS)
    return dataclasses.replace(made, **changes)


def parents(*row: int) -> dict:
    return {"parents": jnp.broadcast_to(jnp.asarray(row), (ROWS, 3))}


def test_what_is_as_declared():
    assert_declared(draft(), TableTree(SPEC), VOCAB, DRAWN)
    # In the draft's own ids, and where an invalid node holds anything.
    assert_declared(draft(tokens=(3, 2, 0), vocab=jnp.asarray([3, 2, 1, 0])), TableTree(SPEC), VOCAB, DRAWN)
    nothing = draft(tokens=(0, 1, 99), valid=jnp.asarray([[True, True, False]] * ROWS))
    assert_declared(nothing, TableTree(SPEC), VOCAB, DRAWN)


@pytest.mark.parametrize(
    ("made", "spec", "sampling", "message"),
    [
        (draft(), TreeSpec((-1, -1)), DRAWN, "the draft has 3 nodes; the drafter declares 2"),
        (draft(**parents(-1, 2, -1)), SPEC, DRAWN, "row 0: node 1 comes before its parent 2"),
        (draft(**parents(-1, 2, 1)), SPEC, DRAWN, "row 0: node 1 is its own ancestor"),
        (draft(**parents(-1, 0, 1)), SPEC, DRAWN, "row 0: node 2 lies at depth 3; the drafter declares depth 2"),
        (draft(is_chain=True), SPEC, DRAWN, r"the draft says it is a chain, its parents are \[-1, -1, 0\]"),
        (draft(), SPEC, GREEDY, "row 0, node 0: drawn from law 0, but the drafter's kind is 'fixed'"),
        (draft(tokens=(0, 1, 4)), SPEC, DRAWN, "row 0, node 2: token 4; expected an id in 0..3"),
        (draft(tokens=(0, 2, 3)), SPEC, DRAWN, "row 0, node 1: token 2 has no mass under the law"),
        (draft(vocab=jnp.asarray([3, 2, 1, 0])), SPEC, DRAWN, "row 0, node 0: token 0 has no mass under the law"),
        (draft(laws=jnp.exp(LAWS)), SPEC, DRAWN, "row 0, node 0: its law sums to .*; expected log-probabilities"),
        (draft(laws=LAWS.astype(jnp.bfloat16)), SPEC, DRAWN, "law 0 of 2 in bfloat16; expected float32 laws"),
        (draft(laws=LAWS[:, :1]), SPEC, DRAWN, "row 0, node 2: law 1 of 1"),
    ],
)
def test_what_is_not(made, spec, sampling, message):
    with pytest.raises(AssertionError, match=message):
        assert_declared(made, TableTree(spec), VOCAB, sampling)


def test_a_chain_may_be_longer_than_a_tree_is_deep():
    long = chain(jnp.zeros((1, 40), jnp.int32), laws=None)
    assert_declared(long, PromptLookup(num_nodes=40), VOCAB, make_sampling([0.0]))
