"""Several candidate continuations as one tree: common prefixes merged, the most frequent nodes kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding import Draft


def prefix_tree(tokens_bcj: jax.Array, valid_bcj: jax.Array, num_nodes: int) -> Draft:
    """The tree of the prefixes that most candidates share (the trie of REST, He et al. 2023, section 3.2).

    Candidates that begin alike share nodes, so the walk of a rule, which takes the first child that fits, loses no
    continuation, and siblings differ.

    Args:
        tokens_bcj: C candidates of J tokens.
        valid_bcj: which tokens are there; a token behind a missing one is not.
        num_nodes: N, at most C * J. Kept are the prefixes that begin most candidates, shorter ones first.

    Returns:
        A draft of fixed choices; surplus nodes are invalid.
    """
    return counted_prefix_tree(tokens_bcj, valid_bcj, num_nodes)[0]


def counted_prefix_tree(tokens_bcj: jax.Array, valid_bcj: jax.Array, num_nodes: int) -> tuple[Draft, jax.Array]:
    """`prefix_tree`, and how many candidates begin as each node's path: int32 `[B, N]`, 0 for surplus nodes."""
    batch, candidates, length = tokens_bcj.shape
    valid = jnp.cumprod(valid_bcj, axis=2).astype(bool)
    alike = jnp.cumprod(tokens_bcj[:, :, None] == tokens_bcj[:, None], axis=3).astype(bool)  # [B, C, C, J]
    alike &= valid[:, :, None] & valid[:, None]
    owner = jnp.argmax(alike, axis=2)  # the first candidate with this prefix
    own = valid & (owner == jnp.arange(candidates)[:, None])
    # By count; of equal counts the shorter, then the earlier: a parent comes before its children.
    order = length * candidates - 1 - (jnp.arange(length) * candidates + jnp.arange(candidates)[:, None])
    value = jnp.where(own, alike.sum(2) * length * candidates + order, -1)
    best, chosen = jax.lax.top_k(value.reshape(batch, -1), num_nodes)
    candidate, depth = chosen // length, chosen % length

    def at(array_bcj: jax.Array, candidate: jax.Array, depth: jax.Array) -> jax.Array:
        return jnp.take_along_axis(array_bcj.reshape(batch, -1), candidate * length + depth, axis=1)

    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    place = jax.vmap(lambda where: jnp.zeros((candidates * length,), jnp.int32).at[where].set(nodes))(chosen)
    above = jnp.maximum(depth - 1, 0)
    parent = at(place.reshape(batch, candidates, length), at(owner, candidate, above), above)
    there = best >= 0
    draft = Draft(
        tokens=at(tokens_bcj, candidate, depth).astype(jnp.int32),
        parents=jnp.where(there & (depth > 0), parent, -1),
        valid=there,
        law=jnp.full((batch, num_nodes), -1, jnp.int32),
        laws=jnp.zeros((batch, 0, 1), jnp.float32),
    )
    return draft, jnp.where(there, best // (length * candidates), 0).astype(jnp.int32)
