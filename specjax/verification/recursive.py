"""Recursive rejection sampling over a token tree: one rule that holds the exact rules of the field as cases.

With one child a node it is speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023). With
independent siblings it is SpecInfer's multi-step verification (Miao et al. 2024), with siblings drawn without
replacement Sequoia's (Chen et al. 2024), with fixed choices the tree verification of EAGLE and Medusa.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import ACCEPT, RESIDUAL, Keys, Sampling, log_law
from specjax.decoding.tree import pointers
from specjax.verification.faults import find_fault


@flax.struct.dataclass
class _Walk:
    """Where each row's walk stands. `p` is what is left of the target's law at `node` after its rejected children."""

    node: jax.Array  # [B] last accepted node, -1 the root
    child: jax.Array  # [B] the candidate to try next, -1 when none is left
    fresh: jax.Array  # [B] no child of `node` was tried yet
    p: jax.Array  # [B, V]
    path: jax.Array  # [B, D]
    num_accepted: jax.Array  # [B]
    overlap: jax.Array  # [B, D]


@dataclasses.dataclass(frozen=True)
class Recursive:
    """Try the children of a node in order: accept child x with probability min(1, p(x) / q(x)), strictly u < p / q;
    after a rejection p becomes the normalised positive part of p - q. When no child is left, draw from p.

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"fixed", "iid", "without_replacement", "mixed"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        batch = draft.tokens.shape[0]
        rows = jnp.arange(batch)
        first_child, next_sibling = pointers(draft)

        def law_at(node_b: jax.Array) -> jax.Array:
            return jnp.exp(log_law(scores.logits[rows, node_b + 1], sampling))

        def body(walk: _Walk) -> _Walk:
            active = walk.child >= 0
            child = jnp.maximum(walk.child, 0)
            token = draft.tokens[rows, child]
            q = _draft_law(draft, child, walk.p.shape[-1])
            p_x, q_x = walk.p[rows, token], q[rows, token]
            u = keys.uniform(ACCEPT, child)
            accepted = active & (u * q_x < p_x)  # u < p / q without dividing by zero; false whenever p = 0
            rejected = active & ~accepted
            at = jnp.where(active, walk.num_accepted, self.depth)
            shared = jnp.minimum(walk.p, q).sum(-1)
            overlap = walk.overlap.at[rows, at].set(jnp.where(walk.fresh, shared, walk.overlap[rows, at]), mode="drop")
            at = jnp.where(accepted, walk.num_accepted, self.depth)
            path = walk.path.at[rows, at].set(child, mode="drop")
            node = jnp.where(accepted, child, walk.node)
            p = jnp.where(rejected[:, None], residual(walk.p, q), walk.p)
            p = jnp.where(accepted[:, None], law_at(node), p)
            following = jnp.where(accepted, first_child[rows, node + 1], next_sibling[rows, child])
            return _Walk(
                node=node,
                child=jnp.where(active, following, -1),
                fresh=accepted,
                p=p,
                path=path,
                num_accepted=walk.num_accepted + accepted,
                overlap=overlap,
            )

        root = jnp.full((batch,), -1, jnp.int32)
        init = _Walk(
            node=root,
            child=first_child[:, 0],
            fresh=jnp.ones((batch,), bool),
            p=law_at(root),
            path=jnp.full((batch, self.depth), -1, jnp.int32),
            num_accepted=jnp.zeros((batch,), jnp.int32),
            overlap=jnp.full((batch, self.depth), jnp.nan),
        )
        walk = jax.lax.while_loop(lambda w: jnp.any(w.child >= 0), body, init) if draft.num_nodes else init
        next_token = keys.sample(RESIDUAL, walk.node + 1, jnp.log(walk.p))
        return Verdict(walk.path, walk.num_accepted, next_token, walk.overlap, find_fault(scores.logits))


def residual(p_bv: jax.Array, q_bv: jax.Array) -> jax.Array:
    """The normalised positive part of p - q; p itself where nothing is left (p = q up to rounding)."""
    left = jnp.maximum(p_bv - q_bv, 0.0)
    mass = left.sum(-1, keepdims=True)
    return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p_bv)


def _draft_law(draft: Draft, node_b: jax.Array, vocab: int) -> jax.Array:
    """`[B, V]` in target ids: the law that a node was drawn from, given its earlier siblings; one-hot if chosen."""
    batch = draft.tokens.shape[0]
    rows = jnp.arange(batch)
    one_hot = jax.nn.one_hot(draft.tokens[rows, node_b], vocab, dtype=jnp.float32)
    if not draft.laws.shape[1]:
        return one_hot
    law_b = draft.law[rows, node_b]
    q = jnp.exp(draft.laws[rows, jnp.maximum(law_b, 0)])
    if draft.vocab is not None:
        q = jnp.zeros((batch, vocab), jnp.float32).at[:, draft.vocab].set(q)
    if draft.siblings == "without_replacement":
        q = _without_drawn(draft, q, node_b, law_b)
    return jnp.where((law_b >= 0)[:, None], q, one_hot)


def _without_drawn(draft: Draft, q_bv: jax.Array, node_b: jax.Array, law_b: jax.Array) -> jax.Array:
    """q conditioned on not being one of the earlier siblings drawn from the same law."""
    rows = jnp.arange(q_bv.shape[0])
    earlier = jnp.arange(draft.num_nodes)[None] < node_b[:, None]
    sibling = draft.valid & (draft.parents == draft.parents[rows, node_b][:, None])
    drawn = earlier & sibling & (draft.law == law_b[:, None])
    outside = q_bv.shape[-1]  # an index that scatter drops
    q = q_bv.at[rows[:, None], jnp.where(drawn, draft.tokens, outside)].set(0.0, mode="drop")
    mass = q.sum(-1, keepdims=True)
    return q / jnp.where(mass > 0, mass, 1.0)
