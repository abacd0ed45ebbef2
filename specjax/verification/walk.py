"""The walk from the root that several rules share.

The children of a node are tried in order; the walk goes down to the first that is accepted and ends where none is.
"""

from __future__ import annotations

from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Scores, Verdict
from specjax.decoding.sampling import ACCEPT, RESIDUAL, Keys, Sampling, log_law
from specjax.decoding.tree import pointers
from specjax.verification.faults import find_fault
from specjax.verification.laws import draft_law, pick


class Trial(Protocol):
    """How the children of one node are tried: child x is accepted where u < p(x) / (scale q(x))."""

    def scale(
        self, draft: Draft, node_b: jax.Array, needed_b: jax.Array, p_bv: jax.Array, q_bv: jax.Array
    ) -> jax.Array:
        """`[B]`, on coming to a node, for all its children; q is the first child's law. Asked only where `needed`."""
        ...

    def left(
        self,
        draft: Draft,
        node_b: jax.Array,
        last_b: jax.Array,
        scale_b: jax.Array,
        p_bv: jax.Array,
        q_bv: jax.Array,
    ) -> jax.Array:
        """`[B, V]`, what a rejected child, perhaps the node's last, leaves of p."""
        ...


@flax.struct.dataclass
class _Walk:
    """Where each row's walk stands. `p` is what is left of the target's law at `node` after its rejected children."""

    node: jax.Array  # [B] last accepted node, -1 the root
    child: jax.Array  # [B] the candidate to try next, -1 when none is left
    fresh: jax.Array  # [B] no child of `node` was tried yet
    scale: jax.Array  # [B] the trial's, at `node`
    p: jax.Array  # [B, V]
    path: jax.Array  # [B, D]
    num_accepted: jax.Array  # [B]
    overlap: jax.Array  # [B, D]


def walk_down(draft: Draft, scores: Scores, sampling: Sampling, keys: Keys, depth: int, trial: Trial) -> Verdict:
    """Follows accepted children from the root; the next token comes from what is left of p where the walk ends."""
    batch = draft.tokens.shape[0]
    first_child, next_sibling = pointers(draft)

    def law_at(node_b: jax.Array) -> jax.Array:
        return jnp.exp(log_law(pick(scores.logits, node_b + 1), sampling))

    def body(walk: _Walk) -> _Walk:
        active = walk.child >= 0
        child = jnp.maximum(walk.child, 0)
        token = pick(draft.tokens, child)
        q = draft_law(draft, child, walk.p.shape[-1])
        fresh = active & walk.fresh
        scale = jnp.where(fresh, trial.scale(draft, walk.node, fresh, walk.p, q), walk.scale)
        p_x, q_x = pick(walk.p, token), pick(q, token)
        u = keys.uniform(ACCEPT, child)
        accepted = active & (u * scale * q_x < p_x)  # not p / q: no division by zero, and false whenever p = 0
        rejected = active & ~accepted
        following = pick(next_sibling, child)
        here = jnp.arange(depth) == jnp.where(active, walk.num_accepted, depth)[:, None]
        shared = jnp.minimum(walk.p, q).sum(-1)
        left = trial.left(draft, walk.node, following < 0, scale, walk.p, q)
        node = jnp.where(accepted, child, walk.node)
        p = jnp.where(rejected[:, None], left, walk.p)
        p = jax.lax.cond(jnp.any(accepted), lambda: jnp.where(accepted[:, None], law_at(node), p), lambda: p)
        following = jnp.where(accepted, pick(first_child, node + 1), following)
        return _Walk(
            node=node,
            child=jnp.where(active, following, -1),
            fresh=accepted,
            scale=scale,
            p=p,
            path=jnp.where(here & accepted[:, None], child[:, None], walk.path),
            num_accepted=walk.num_accepted + accepted,
            overlap=jnp.where(here & fresh[:, None], shared[:, None], walk.overlap),
        )

    root = jnp.full((batch,), -1, jnp.int32)
    walk = _Walk(
        node=root,
        child=first_child[:, 0],
        fresh=jnp.ones((batch,), bool),
        scale=jnp.ones((batch,), jnp.float32),
        p=law_at(root),
        path=jnp.full((batch, depth), -1, jnp.int32),
        num_accepted=jnp.zeros((batch,), jnp.int32),
        overlap=jnp.full((batch, depth), jnp.nan),
    )
    if draft.num_nodes:
        walk = jax.lax.while_loop(lambda w: jnp.any(w.child >= 0), body, walk)
    next_token = keys.sample(RESIDUAL, walk.node + 1, jnp.log(walk.p))
    return Verdict(walk.path, walk.num_accepted, next_token, walk.overlap, find_fault(walk.path, scores))
