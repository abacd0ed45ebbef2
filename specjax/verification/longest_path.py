"""What the lossy rules that judge each token by itself share: the longest path of acceptable nodes is taken."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Scores, Verdict
from specjax.decoding.sampling import RESIDUAL, Keys
from specjax.decoding.tree import pointers
from specjax.verification.faults import find_fault
from specjax.verification.laws import draft_law, pick
from specjax.verification.paths import find_paths


def log_at_nodes(draft: Draft, laws_bmv: jax.Array) -> jax.Array:
    """`[B, N]`: log p(x) of each node under its parent's law."""
    per_parent = jax.vmap(lambda law, parent, token: law[parent + 1, token])
    return per_parent(laws_bmv, draft.parents, draft.tokens)


def longest_path(
    draft: Draft, scores: Scores, laws_bmv: jax.Array, accepted_bn: jax.Array, keys: Keys, depth: int
) -> Verdict:
    """Accepts the longest path of nodes that are all accepted, the likeliest among equally long ones, and draws the
    next token from p.

    Args:
        draft: any tree.
        scores: for NaN detection.
        laws_bmv: `[B, N + 1, V]` the target's log-probabilities at root and nodes.
        accepted_bn: `[B, N]` bool, what the rule says of each node by itself.
        keys: of the step.
        depth: D.
    """
    paths = find_paths(draft, accepted_bn)
    log_p = jnp.pad(log_at_nodes(draft, laws_bmv), ((0, 0), (1, 0)))
    likelihood = jnp.where(paths.mask, log_p[:, None, :], 0.0).sum(-1)
    longest = paths.longest
    best = paths.alive & (paths.depths == longest[:, None])
    slot = jnp.argmax(jnp.where(best, likelihood, -jnp.inf), axis=-1)
    path = paths.down_to(slot, depth)
    accepted = jnp.maximum(path[:, 1:], -1)
    return Verdict(
        path=accepted,
        num_accepted=longest,
        next_token=keys.sample(RESIDUAL, slot, pick(laws_bmv, slot)),
        overlap=_overlap(draft, laws_bmv, path[:, :-1]),
        fault=find_fault(accepted, scores),
    )


def _overlap(draft: Draft, laws_bmv: jax.Array, path_bd: jax.Array) -> jax.Array:
    """`[B, D]`: sum of min(p, q) at the first child of each node reached (-1 the root, -2 none)."""
    if not draft.num_nodes:
        return jnp.full(path_bd.shape, jnp.nan)
    first_child, _ = pointers(draft)

    def at(node_b: jax.Array) -> jax.Array:
        slot = jnp.maximum(node_b + 1, 0)
        child = pick(first_child, slot)
        q = draft_law(draft, jnp.maximum(child, 0), laws_bmv.shape[-1])
        shared = jnp.minimum(jnp.exp(pick(laws_bmv, slot)), q).sum(-1)
        return jnp.where((node_b >= -1) & (child >= 0), shared, jnp.nan)

    return jax.vmap(at, in_axes=1, out_axes=1)(path_bd)
