"""Block verification of a chain: tokens are accepted jointly, by what the whole prefix is worth."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import RESIDUAL, Keys, Sampling, log_law
from specjax.verification.faults import find_fault
from specjax.verification.laws import accept_uniforms, clipped_ratio, draft_law, left_behind, pick


@dataclasses.dataclass(frozen=True)
class Block:
    """Keeps the longest prefix that passes; never accepts less than token by token (Sun et al. 2024, Algorithm 2).

    `pbar_i = min(1, pbar_{i-1} p(x_i) / q(x_i))`. Position i < gamma passes where `u_i < S_i / (S_i + 1 - pbar_i)`,
    `S_i = sum_v max(pbar_i p_{i+1}(v) - q_{i+1}(v), 0)`, and gamma where `u_gamma < pbar_gamma`. The largest i that
    passes is kept, whatever came before; the next token comes from the normalised `max(pbar_i p_{i+1} - q_{i+1}, 0)`,
    behind gamma from p. Chains only; `Traversal` is the same on trees.

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"fixed", "iid", "without_replacement", "mixed"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`. All positions at once, whichever are kept.

        Raises:
            ValueError: the draft is not a chain.
        """
        if not draft.is_chain and draft.num_nodes:
            raise ValueError(f"rule 'block' verifies chains, not a tree of {draft.num_nodes} nodes; use 'traversal'")
        batch, gamma = draft.tokens.shape
        p_bmv = jnp.exp(log_law(scores.logits, sampling))
        if not gamma:
            empty, path = jnp.zeros((batch, 0)), jnp.zeros((batch, 0), jnp.int32)
            next_token = keys.sample(RESIDUAL, 0, jnp.log(p_bmv[:, 0]))
            length = jnp.zeros((batch,), jnp.int32)
            return Verdict(path, length, next_token, empty, find_fault(path, scores))
        q_bnv = _draft_laws(draft, p_bmv.shape[-1])
        p_bar = _prefix_worth(draft, p_bmv[:, :-1], q_bnv)
        drafted = jnp.cumprod(draft.valid, axis=1).sum(-1)  # rows may end their chain early
        index = jnp.arange(gamma + 1)
        kept, _ = left_behind(p_bar[:, :-1], p_bmv[:, :-1], q_bnv)
        passes = jnp.where(index < drafted[:, None], jnp.pad(kept, ((0, 0), (0, 1))), p_bar)
        # The root passes always, and nothing does behind the end of the chain.
        u = jnp.pad(accept_uniforms(keys, gamma), ((0, 0), (1, 0)), constant_values=-1.0)
        passed = (u < passes) & (index <= drafted[:, None])
        length = jnp.max(jnp.where(passed, index, 0), axis=-1).astype(jnp.int32)

        p, at = pick(p_bmv, length), jnp.minimum(length, gamma - 1)
        _, left = left_behind(pick(p_bar, length), p, pick(q_bnv, at))
        law = jnp.where((length < drafted)[:, None], left, p)
        next_token = keys.sample(RESIDUAL, length, jnp.log(law))
        path = jnp.where(index[:-1] < length[:, None], index[:-1], -1).astype(jnp.int32)
        reached = (index[:-1] <= length[:, None]) & (index[:-1] < drafted[:, None])
        overlap = jnp.where(reached, jnp.minimum(p_bmv[:, :-1], q_bnv).sum(-1), jnp.nan)
        return Verdict(path, length, next_token, overlap, find_fault(path, scores))


def _draft_laws(draft: Draft, vocab: int) -> jax.Array:
    """`[B, N, V]`: the law of every node."""
    batch, nodes = draft.tokens.shape

    def law(node: jax.Array) -> jax.Array:
        return draft_law(draft, jnp.full((batch,), node), vocab)

    return jax.vmap(law, out_axes=1)(jnp.arange(nodes))


def _prefix_worth(draft: Draft, p_bnv: jax.Array, q_bnv: jax.Array) -> jax.Array:
    """pbar `[B, N + 1]`, the root's 1 first."""
    tokens = draft.tokens[..., None]
    p_x = jnp.take_along_axis(p_bnv, tokens, axis=-1)[..., 0]
    q_x = jnp.take_along_axis(q_bnv, tokens, axis=-1)[..., 0]

    def step(worth: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        worth = clipped_ratio(worth * at[0], at[1])
        return worth, worth

    root = jnp.ones(p_x.shape[:1], p_x.dtype)
    _, below = jax.lax.scan(step, root, (p_x.T, q_x.T))
    return jnp.concatenate([root[:, None], below.T], axis=1)
