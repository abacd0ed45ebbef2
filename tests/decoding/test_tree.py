"""Masks, depths and pointers of token trees against a hand-made one."""

import jax.numpy as jnp
import numpy as np

from specjax.decoding import Draft
from specjax.decoding.tree import ancestors, chain, depths, draft_view, pointers

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
