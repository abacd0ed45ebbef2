"""Token trees: depths, ancestor masks, pointers for the walk. Node i's index in a pass is i + 1; the root's is 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft
from specjax.models import View, causal_view


def ancestors(parents_bm: jax.Array) -> jax.Array:
    """`[B, M + 1, M + 1]` bool: row i sees column j when j is i, or an ancestor of i; index 0 is the root.

    Args:
        parents_bm: -1 for the root, else an earlier node (a parent comes before its children).
    """
    batch, nodes = parents_bm.shape
    slots = parents_bm + 1
    mask = jnp.broadcast_to(jnp.eye(nodes + 1, dtype=bool), (batch, nodes + 1, nodes + 1))

    def body(i: jax.Array, mask: jax.Array) -> jax.Array:
        parent_row = jnp.take_along_axis(mask, slots[:, i][:, None, None], axis=1)[:, 0]
        return mask.at[:, i + 1].set(mask[:, i + 1] | parent_row)

    return jax.lax.fori_loop(0, nodes, body, mask)


def depths(parents_bm: jax.Array) -> jax.Array:
    """`[B, M + 1]` int32: distance from the root of the root and each node."""
    return ancestors(parents_bm).sum(-1).astype(jnp.int32) - 1


def draft_view(draft: Draft, prefix_b: jax.Array) -> View:
    """What root, nodes and probes see in the scoring pass, with the root at slot `prefix`."""
    if draft.is_chain and draft.probes is None:
        return causal_view(prefix_b, draft.num_nodes + 1)
    parents = draft.parents
    if draft.probes is not None:
        parents = jnp.concatenate([parents, draft.probes.parents], axis=1)
    mask = ancestors(parents)
    return View(prefix=prefix_b, mask=mask, depths=mask.sum(-1).astype(jnp.int32) - 1)


def pointers(draft: Draft) -> tuple[jax.Array, jax.Array]:
    """`first_child` `[B, N + 1]` (index 0: the root's) and `next_sibling` `[B, N]`; -1 for none.

    Invalid nodes are left out; siblings keep their order.
    """
    parents = jnp.where(draft.valid, draft.parents, -2)
    index = jnp.arange(draft.num_nodes)
    owner = jnp.arange(-1, draft.num_nodes)
    mine = parents[:, None, :] == owner[None, :, None]  # [B, N + 1, N]
    first = jnp.where(mine.any(-1), jnp.argmax(mine, -1), -1)
    later = (parents[:, :, None] == parents[:, None, :]) & (index[None, :] > index[:, None])[None]
    following = jnp.where(later.any(-1), jnp.argmax(later, -1), -1)
    return first.astype(jnp.int32), jnp.where(draft.valid, following, -1).astype(jnp.int32)


def chain(tokens_bn: jax.Array, *, laws: jax.Array | None, vocab: jax.Array | None = None) -> Draft:
    """A chain draft; node i was drawn from `laws[:, i]`, or chosen when `laws` is None."""
    batch, nodes = tokens_bn.shape
    index = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes))
    return Draft(
        tokens=tokens_bn.astype(jnp.int32),
        parents=index - 1,
        valid=jnp.ones((batch, nodes), bool),
        law=jnp.full_like(index, -1) if laws is None else index,
        laws=jnp.zeros((batch, 0, 1), jnp.float32) if laws is None else laws,
        vocab=vocab,
        is_chain=True,
    )
