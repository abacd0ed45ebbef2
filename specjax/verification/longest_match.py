"""The walk that greedy and one-hot verification share: follow the target's own choice while it was drafted."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Scores, Verdict
from specjax.decoding.tree import pointers
from specjax.verification.faults import find_fault
from specjax.verification.paths import find_paths


def longest_match(draft: Draft, scores: Scores, choice_bm: jax.Array, overlap_bn: jax.Array, depth: int) -> Verdict:
    """Accepts the path along which every node equals the target's choice at its parent.

    Args:
        draft: any tree.
        scores: for NaN detection.
        choice_bm: `[B, N + 1]` int32, the token that the target chose at root and nodes; where its choices do not lead
            to, it may be -1 for none.
        overlap_bn: `[B, N]` float32, p(x) of each node under its parent's law (0 or 1 when greedy).
        depth: D.
    """
    batch, nodes = draft.tokens.shape
    choice_at_parent = jnp.take_along_axis(choice_bm, draft.parents + 1, axis=1)
    match = draft.valid & (draft.tokens == choice_at_parent)
    if draft.is_chain:
        path, overlap = _chain(match, draft.valid, overlap_bn)
    else:
        path, overlap = _tree(draft, match, overlap_bn, depth)
    num_accepted = (path >= 0).sum(-1).astype(jnp.int32)
    last = jnp.take_along_axis(jnp.concatenate([jnp.full((batch, 1), -1), path], axis=1), num_accepted[:, None], axis=1)
    next_token = jnp.take_along_axis(choice_bm, last + 1, axis=1)[:, 0]
    return Verdict(path, num_accepted, next_token, overlap, find_fault(path, scores))


def _chain(match_bn: jax.Array, valid_bn: jax.Array, overlap_bn: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, nodes = match_bn.shape
    if not nodes:
        return jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0))
    accepted = jnp.cumprod(match_bn, axis=1).astype(bool)
    reached = jnp.concatenate([jnp.ones((batch, 1), bool), accepted[:, :-1]], axis=1) & valid_bn
    path = jnp.where(accepted, jnp.arange(nodes), -1).astype(jnp.int32)
    return path, jnp.where(reached, overlap_bn, jnp.nan)


def _tree(draft: Draft, match_bn: jax.Array, overlap_bn: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    """The longest path of matches, the first among equals: siblings may repeat a token, and only one goes on."""
    paths = find_paths(draft, match_bn)
    deepest = jnp.argmax(paths.alive & (paths.depths == paths.longest[:, None]), axis=-1)
    path = paths.down_to(deepest, depth)
    child = jnp.take_along_axis(pointers(draft)[0], jnp.maximum(path[:, :-1] + 1, 0), axis=1)
    tried = jnp.take_along_axis(overlap_bn, jnp.maximum(child, 0), axis=1)
    return jnp.maximum(path[:, 1:], -1), jnp.where((path[:, :-1] >= -1) & (child >= 0), tried, jnp.nan)
