"""Traversal verification: a tree from its leaves to the root, every node by what its whole path is worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import RESIDUAL, Keys, Sampling, log_law
from specjax.decoding.tree import pointers
from specjax.verification.faults import find_fault
from specjax.verification.laws import accept_uniforms, clipped_ratio, draft_law, left_behind, pick
from specjax.verification.paths import Paths, find_paths

# node [B] -> the target's law there [B, V]
LawAt = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Keeps the first node, children before parents and in sibling order, that passes (Weng et al. 2025, Algorithm 2).

    A node x under Y has the chance a(x) = min(1, a(Y) p(x) / q(x)), a(root) = 1, that it or a descendant is kept.
    When a child drawn from q fails, with everything under it, what is left of Y has the law of the normalised
    max(a p - q, 0) and the chance S / (S + 1 - a), S the sum of that maximum; the next child meets these, and after
    the last one Y itself passes where u < a. On a chain this is block verification; a single level is recursive
    rejection. Each node's own conditional law makes it exact for every kind of draft.

    Chances do not depend on uniforms, so they are computed in one pass over the nodes, parent by parent, that carries
    one law a row; the law of the node that is kept is then made again from its children.

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"fixed", "iid", "without_replacement", "mixed"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        nodes = draft.num_nodes

        def law_at(node_b: jax.Array) -> jax.Array:
            return jnp.exp(log_law(pick(scores.logits, node_b + 1), sampling))

        paths = find_paths(draft, draft.valid)
        tour = _tour(draft, paths)
        chances = _chances(draft, tour, law_at, scores.logits.shape[-1])
        u = jnp.pad(accept_uniforms(keys, nodes), ((0, 0), (1, 0)), constant_values=-1.0)  # the root passes always
        passed = paths.alive & (u < chances.kept)
        kept = jnp.argmin(jnp.where(passed, tour.rank, nodes + 1), axis=-1)  # in 0..N, 0 the root
        law = _law_left(draft, chances.entry, kept - 1, law_at)
        path = paths.down_to(kept, self.depth)
        accepted = jnp.maximum(path[:, 1:], -1)
        shared = jnp.take_along_axis(chances.shared, jnp.maximum(path[:, :-1] + 1, 0), axis=1)
        return Verdict(
            path=accepted,
            num_accepted=pick(paths.depths, kept),
            next_token=keys.sample(RESIDUAL, kept, jnp.log(law)),
            overlap=jnp.where(path[:, :-1] >= -1, shared, jnp.nan),
            fault=find_fault(accepted, scores),
        )


@flax.struct.dataclass
class _Tour:
    """The order in which a tree is gone through. Index 0 of M = N + 1 is the root."""

    rank: jax.Array  # [B, M] place in post-order: children before their parent, siblings in index order
    count: jax.Array  # [B] nodes that are alive, the root not counted
    by_parent: jax.Array  # [B, N] these nodes, grouped by parent, parents and siblings ascending; then the others
    first: jax.Array  # [B, N] the node has no earlier sibling


def _tour(draft: Draft, paths: Paths) -> _Tour:
    batch, nodes = draft.tokens.shape
    size = (paths.mask & paths.alive[..., None]).sum(1).astype(jnp.int32)  # of each subtree, its top included
    index = jnp.arange(nodes)
    earlier = (draft.parents[:, None, :] == draft.parents[:, :, None]) & (index[None, :] < index[:, None])
    earlier &= paths.alive[:, None, 1:]
    before = jnp.where(earlier, size[:, None, 1:], 0).sum(-1)  # nodes under earlier siblings
    step = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), before + 1], axis=1)
    preorder = jnp.where(paths.mask, step[:, None, :], 0).sum(-1)
    return _Tour(
        rank=preorder + size - 1 - paths.depths,
        count=size[:, 0] - 1,
        by_parent=jnp.argsort(jnp.where(paths.alive[:, 1:], draft.parents, nodes), axis=-1, stable=True),
        first=~earlier.any(-1),
    )


@flax.struct.dataclass
class _Chances:
    """`[B, M]` float32 each, the root first."""

    entry: jax.Array  # a(x) before any child was tried
    kept: jax.Array  # after all children failed: the chance that the node itself is kept
    shared: jax.Array  # sum of min(p, q) at the first child; NaN where there is none


def _chances(draft: Draft, tour: _Tour, law_at: LawAt, vocab: int) -> _Chances:
    batch, nodes = draft.tokens.shape
    slots = jnp.arange(nodes + 1)

    def body(i: jax.Array, carry: tuple[jax.Array, _Chances]) -> tuple[jax.Array, _Chances]:
        p, chances = carry
        child, active = tour.by_parent[:, i], i < tour.count
        parent, token = pick(draft.parents, child), pick(draft.tokens, child)
        fresh = active & pick(tour.first, child)
        p = jax.lax.cond(jnp.any(fresh), lambda: jnp.where(fresh[:, None], law_at(parent), p), lambda: p)
        q = draft_law(draft, child, vocab)
        chance = pick(chances.kept, parent + 1)
        below = clipped_ratio(chance * pick(p, token), pick(q, token))
        left, p_left = left_behind(chance, p, q)
        at_child = active[:, None] & (slots == child[:, None] + 1)
        at_parent = active[:, None] & (slots == parent[:, None] + 1)
        shared = jnp.minimum(p, q).sum(-1)
        return p_left, _Chances(
            entry=jnp.where(at_child, below[:, None], chances.entry),
            kept=jnp.where(at_child, below[:, None], jnp.where(at_parent, left[:, None], chances.kept)),
            shared=jnp.where(at_parent & fresh[:, None], shared[:, None], chances.shared),
        )

    ones = jnp.ones((batch, nodes + 1), jnp.float32)
    start = (jnp.ones((batch, vocab), jnp.float32), _Chances(ones, ones, jnp.full_like(ones, jnp.nan)))
    return jax.lax.fori_loop(0, jnp.max(tour.count), body, start)[1] if nodes else start[1]


def _law_left(draft: Draft, entry_bm: jax.Array, node_b: jax.Array, law_at: LawAt) -> jax.Array:
    """`[B, V]`: the law behind a node whose children all failed."""
    first_child, next_sibling = pointers(draft)

    def body(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        child, chance, p = carry
        active, at = child >= 0, jnp.maximum(child, 0)
        left, p_left = left_behind(chance, p, draft_law(draft, at, p.shape[-1]))
        p = jnp.where(active[:, None], p_left, p)
        return jnp.where(active, pick(next_sibling, at), -1), jnp.where(active, left, chance), p

    start = (pick(first_child, node_b + 1), pick(entry_bm, node_b + 1), law_at(node_b))
    if not draft.num_nodes:
        return start[2]
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] >= 0), body, start)[2]
