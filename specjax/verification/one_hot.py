"""One-hot verification: the target samples at every node, and the path that it would have taken is accepted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import SAMPLE, Keys, Sampling, draw, log_law
from specjax.verification.laws import pick
from specjax.verification.longest_match import longest_match


@dataclasses.dataclass(frozen=True)
class OneHot:
    """Exact for every draft, however it was made: acceptance is sum p(x) q(x) on sampled drafts.

    The token at an absolute position is drawn with that position's key, as autoregressive decoding draws it. Hence
    the output equals autoregressive sampling token for token under the same seed.

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"fixed", "iid", "without_replacement", "mixed"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        if sampling.greedy:
            choice = scores.argmax[:, : draft.num_nodes + 1]
            at_parent = jnp.take_along_axis(choice, draft.parents + 1, axis=1)
            p_bn = (draft.tokens == at_parent).astype(jnp.float32)
        else:
            choice, p_bn = _sample(draft, scores, sampling, keys)
        return longest_match(draft, scores, choice, p_bn, self.depth)


def _sample(draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """The target's draws `[B, N + 1]` at the root and at the nodes that they lead to, -1 at all others.

    To warp logits over a vocabulary and to draw from them is the dear part: one node after the other, so that nodes
    nobody gets to cost nothing.

    Returns:
        The draws, and p(x) `[B, N]` of the nodes below them, 0 elsewhere.
    """
    nodes = jnp.arange(draft.num_nodes + 1)

    def body(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        choice, p_bn, waiting = carry
        here = jnp.argmax(waiting, axis=-1)  # The first; root and nodes by their place in `scores`.
        law = log_law(pick(scores.logits, here), sampling)
        token = draw(keys.at(SAMPLE, keys.length + pick(scores.depths, here), 0), law)
        drawn = waiting & (nodes == here[:, None])
        below = draft.parents + 1 == here[:, None]
        below &= drawn.any(-1, keepdims=True)
        led_to = draft.valid & below & (draft.tokens == token[:, None])
        waiting = (waiting & ~drawn) | jnp.pad(led_to, ((0, 0), (1, 0)))
        p_bn = jnp.where(below, jnp.exp(pick(law, draft.tokens)), p_bn)
        return jnp.where(drawn, token[:, None], choice), p_bn, waiting

    shape = (draft.tokens.shape[0], draft.num_nodes + 1)
    start = (
        jnp.full(shape, -1, jnp.int32),
        jnp.zeros(draft.tokens.shape, jnp.float32),
        jnp.broadcast_to(nodes == 0, shape),
    )
    choice, p_bn, _ = jax.lax.while_loop(lambda carry: carry[2].any(), body, start)
    return choice, p_bn
