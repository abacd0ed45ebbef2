"""Laws at a node as rules need them: the law it was drawn from, in target ids, and what a rejection leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft
from specjax.decoding.sampling import ACCEPT, Keys


def pick(x: jax.Array, index_b: jax.Array) -> jax.Array:
    """`x[b, index[b]]` for every row. By vmap: rows spread over devices then each look up their own."""
    return jax.vmap(lambda row, i: row[i])(x, index_b)


def residual(p_bv: jax.Array, q_bv: jax.Array) -> jax.Array:
    """The normalised positive part of p - q; p itself where nothing is left (p = q up to rounding)."""
    return normalised(jnp.maximum(p_bv - q_bv, 0.0), p_bv)


def normalised(weight: jax.Array, fallback: jax.Array) -> jax.Array:
    """Weights `[..., V]` over their sum, and `fallback` where that is zero."""
    mass = weight.sum(-1, keepdims=True)
    return jnp.where(mass > 0, weight / jnp.where(mass > 0, mass, 1.0), fallback)


def clipped_ratio(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p / q) elementwise; 1 where only q is zero, 0 where both are."""
    return jnp.where(q > p, p / jnp.where(q > 0, q, 1.0), p > 0)


def left_behind(chance: jax.Array, p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a failed draw from q leaves of the share `chance` of p: the chance that the parent is kept, and its law.

    With S = sum max(chance p - q, 0) the draw took min(chance p, q) of that share, and it failed in 1 - chance + S
    of all cases: S / (S + 1 - chance) of them go to the parent, with the law max(chance p - q, 0) / S.

    Args:
        chance: `[...]` float32.
        p: `[..., V]`.
        q: `[..., V]`.
    """
    left = jnp.maximum(chance[..., None] * p - q, 0.0)
    mass = left.sum(-1)
    whole = mass + (1 - chance)
    return jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1.0), 1.0), normalised(left, p)


def accept_uniforms(keys: Keys, nodes: int) -> jax.Array:
    """`[B, N]`: the uniform that each node is accepted with."""
    return jax.vmap(lambda node: keys.uniform(ACCEPT, node), out_axes=1)(jnp.arange(nodes))


def draft_law(draft: Draft, node_b: jax.Array, vocab: int) -> jax.Array:
    """`[B, V]` in target ids: the law that a node was drawn from, given its earlier siblings; one-hot if chosen."""
    batch = draft.tokens.shape[0]
    one_hot = jax.nn.one_hot(pick(draft.tokens, node_b), vocab, dtype=jnp.float32)
    if not draft.laws.shape[1]:
        return one_hot
    law_b = pick(draft.law, node_b)
    q = jnp.exp(pick(draft.laws, jnp.maximum(law_b, 0)))
    if draft.vocab is not None:
        q = jnp.zeros((batch, vocab), jnp.float32).at[:, draft.vocab].set(q)
    if draft.siblings == "without_replacement" and not draft.is_chain:
        q = _without_drawn(draft, q, one_hot, node_b, law_b)
    return jnp.where((law_b >= 0)[:, None], q, one_hot)


def _without_drawn(
    draft: Draft, q_bv: jax.Array, one_hot_bv: jax.Array, node_b: jax.Array, law_b: jax.Array
) -> jax.Array:
    """q conditioned on not being one of the earlier siblings drawn from the same law, valid or not.

    Where these are all that the law (warped to few tokens) had to give, nothing was drawn: the token is a choice.
    """
    earlier = jnp.arange(draft.num_nodes)[None] < node_b[:, None]
    sibling = draft.parents == pick(draft.parents, node_b)[:, None]
    drawn = earlier & sibling & (draft.law == law_b[:, None])
    outside = q_bv.shape[-1]  # an index that scatter drops
    tokens = jnp.where(drawn, draft.tokens, outside)
    q = jax.vmap(lambda row, ids: row.at[ids].set(0.0, mode="drop"))(q_bv, tokens)
    mass = q.sum(-1, keepdims=True)
    return jnp.where(mass > 0, q / jnp.where(mass > 0, mass, 1.0), one_hot_bv)
