"""Masks, depths and pointers of token trees against a hand-made one."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Draft
from specjax.decoding.tree import (
    TreeSpec,
    ancestors,
    chain,
    depths,
    draft_view,
    from_branching,
    from_choices,
    pointers,
    subtree,
)

# 0 and 3 under the root, 1 and 4 under 0, 2 under 1
PARENTS = jnp.asarray([[-1, 0, 1, -1, 0]], jnp.int32)


def draft(valid=(True,) * 5):
    return Draft(
        tokens=jnp.zeros((1, 5), jnp.int32),
        parents=PARENTS,
        valid=jnp.asarray([valid]),
        law=jnp.full((1, 5), -1),
        laws=jnp.zeros((1, 0, 1)),
    )


def test_ancestors_and_depths():
    expected = np.eye(6, dtype=bool)
    for node, above in {1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [0], 5: [0, 1]}.items():
        expected[node, above] = True
    np.testing.assert_array_equal(ancestors(PARENTS)[0], expected)
    np.testing.assert_array_equal(depths(PARENTS)[0], [0, 1, 2, 3, 1, 2])


def test_a_chain_sees_what_the_general_mask_says():
    tokens = jnp.zeros((2, 4), jnp.int32)
    fast = draft_view(chain(tokens, laws=None), jnp.asarray([3, 5]))
    slow = draft_view(chain(tokens, laws=None).replace(is_chain=False), jnp.asarray([3, 5]))
    np.testing.assert_array_equal(fast.mask, slow.mask)
    np.testing.assert_array_equal(fast.depths, slow.depths)
    np.testing.assert_array_equal(fast.positions, slow.positions)


def test_pointers_keep_order_and_leave_invalid_nodes_out():
    first, following = pointers(draft())
    np.testing.assert_array_equal(first[0], [0, 1, 2, -1, -1, -1])
    np.testing.assert_array_equal(following[0], [3, 4, -1, -1, -1])
    first, following = pointers(draft((True, False, True, True, True)))
    np.testing.assert_array_equal(first[0], [0, 4, 2, -1, -1, -1])
    np.testing.assert_array_equal(following[0], [3, -1, -1, -1, -1])


def test_ancestors_of_wide_trees_and_long_chains():
    rng = np.random.default_rng(0)
    parents = np.stack([[rng.integers(-1, node) for node in range(128)], list(range(-1, 127))])
    expected = np.zeros((2, 129, 129), bool)
    for row in range(2):
        for node in range(-1, 128):
            at = node
            while at >= 0:
                expected[row, node + 1, at + 1] = True
                at = parents[row, at]
            expected[row, node + 1, 0] = True
    np.testing.assert_array_equal(ancestors(jnp.asarray(parents)), expected)


def test_choices_and_branching_name_the_same_tree():
    choices = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    spec = from_choices(choices[::-1])
    assert spec == from_branching((2, 2)) == TreeSpec((-1, -1, 0, 0, 1, 1))
    assert hash(spec) == hash(from_branching([2, 2]))
    assert spec.child_ranks == (0, 1, 0, 1, 0, 1)
    assert (spec.num_nodes, spec.depth, spec.max_children) == (6, 2, 2)
    assert spec.levels == ((0, 1), (2, 3, 4, 5)) and not spec.is_chain
    assert from_branching((1, 1, 1)).is_chain


def test_ranks_may_leave_gaps():
    spec = from_choices([[0], [2], [0, 1]])
    assert spec.parents == (-1, -1, 0) and spec.child_ranks == (0, 2, 1) and spec.max_children == 3


def test_a_static_tree_as_a_draft():
    spec = from_branching((2, 1))
    drafted = spec.draft(jnp.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(drafted.parents, [[-1, -1, 0, 1]] * 2)
    assert not drafted.is_chain and (np.asarray(drafted.law) == -1).all() and drafted.laws.shape[1] == 0
    with pytest.raises(ValueError, match="3 tokens a row for a tree of 4 nodes"):
        spec.draft(jnp.zeros((1, 3), jnp.int32))


def test_candidates_chosen_per_row_keep_their_parents():
    parents = jnp.asarray([[-1, -1, 0, 0, 1, 4]] * 2)
    found = subtree(parents, jnp.asarray([[0, 2, 3], [1, 4, 5]]))
    np.testing.assert_array_equal(found, [[-1, 0, 0], [-1, 0, 1]])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TreeSpec((-1, 2, 1)), r"node 1 is its own ancestor"),
        (lambda: TreeSpec((-1, 1)), r"node 1 is its own ancestor"),
        (lambda: TreeSpec((1, -1)), r"node 0 comes before its parent 1"),
        (lambda: TreeSpec((-1, 0.5)), r"node 1 has parent 0.5; expected -1"),
        (lambda: TreeSpec((-1, 7)), r"node 1 has parent 7; expected -1 \(the root\) or a node in 0..1"),
        (lambda: TreeSpec(tuple(range(-1, 16))), r"node 16 lies at depth 17; expected at most 16"),
        (lambda: TreeSpec((-1,) * 129), r"the tree has 129 nodes; expected at most 128"),
        (lambda: TreeSpec((-1, -1), (0, 0)), r"nodes 0 and 1 both have rank 0"),
        (lambda: TreeSpec((-1, -1), (0,)), r"child_ranks has 1 entries for 2 nodes"),
        (
            lambda: from_branching((2, 1, 1)).require_depth(2, "2 heads"),
            r"node 4 lies at depth 3.*depth 2",
        ),
        (lambda: from_choices([(0,), (1, 0)]), r"path \(1, 0\) is given without its parent \(1,\)"),
        (lambda: from_choices([(0,), (0,)]), r"path \(0,\) is given twice"),
        (lambda: from_choices([()]), r"an empty path"),
        (lambda: from_branching((3, 0)), r"0 children at depth 1"),
        (lambda: from_branching((20, 20)), r"more than 128 nodes"),
        (lambda: TreeSpec(5), r"parents=5; expected a parent for each node"),
        (lambda: TreeSpec((-1, -1), 5), r"child_ranks=5; expected a rank for each node"),
        (lambda: TreeSpec((-1, -1), ("a", "b")), r"node 0 has rank 'a' among its siblings; expected a whole number"),
        (lambda: TreeSpec((-1, -1), (0, 1.5)), r"node 1 has rank 1.5 among its siblings; expected a whole number"),
        (lambda: from_choices(5), r"choices=5; expected paths of ranks"),
        (lambda: from_choices((5,)), r"path=5; expected paths of ranks"),
        (lambda: from_choices((("a",),)), r"path \('a',\) has rank 'a'; expected whole numbers"),
        (lambda: from_choices(((0,), (1.5,))), r"path \(1.5,\) has rank 1.5; expected whole numbers"),
        (lambda: from_branching(5), r"branching=5; expected how many children"),
        (lambda: from_branching(()), r"branching=\(\); expected how many children"),
    ],
)
def test_bad_trees_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
