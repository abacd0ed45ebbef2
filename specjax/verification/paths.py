"""Paths in a token tree, all nodes at once: what is reached over good nodes only, and the way down to a node."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft
from specjax.decoding.tree import ancestors
from specjax.verification.laws import pick


@flax.struct.dataclass
class Paths:
    """Index 0 of M = N + 1 is the root.

    Attributes:
        mask: `[B, M, M]` bool, row i marks i and its ancestors.
        depths: `[B, M]` int32.
        alive: `[B, M]` bool, all nodes on the way down are good; the root is.
    """

    mask: jax.Array
    depths: jax.Array
    alive: jax.Array

    @property
    def longest(self) -> jax.Array:
        """`[B]` int32, the depth of the deepest node that is alive."""
        return jnp.max(jnp.where(self.alive, self.depths, 0), axis=-1)

    def down_to(self, slot_b: jax.Array, depth: int) -> jax.Array:
        """`[B, D + 1]` int32: the root's -1, then the nodes down to the one in `slot` (0 the root), -2 behind it."""
        level = pick(self.mask, slot_b)[:, None, :] & (self.depths[:, None, :] == jnp.arange(depth + 1)[:, None])
        return jnp.where(level.any(-1), jnp.argmax(level, -1) - 1, -2).astype(jnp.int32)


def find_paths(draft: Draft, good_bn: jax.Array) -> Paths:
    """The paths of a draft whose nodes are good or not; invalid ones are not."""
    mask = ancestors(draft.parents)
    root = jnp.ones((mask.shape[0], 1), bool)
    bad = ~jnp.concatenate([root, good_bn & draft.valid], axis=1)
    return Paths(mask, mask.sum(-1).astype(jnp.int32) - 1, ~jnp.any(mask & bad[:, None, :], axis=-1))
