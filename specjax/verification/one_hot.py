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
            laws = log_law(scores.logits, sampling)
            choice = self._draw(draft, laws, scores, keys)
            p_bn = jnp.exp(
                jax.vmap(lambda law, parent, token: law[parent + 1, token])(laws, draft.parents, draft.tokens)
            )
        return longest_match(draft, scores, choice, p_bn, self.depth)

    def _draw(self, draft: Draft, laws_bmv: jax.Array, scores: Scores, keys: Keys) -> jax.Array:
        """The target's draws `[B, N + 1]` at the root and at the nodes that they lead to, -1 at all others.

        A draw over a vocabulary is the dear part: one after the other, so that nodes nobody gets to cost none.
        """
        nodes = jnp.arange(laws_bmv.shape[1])

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            choice, waiting = carry
            here = jnp.argmax(waiting, axis=-1)  # The first; root and nodes by their place in `scores`.
            depth = pick(scores.depths, here)
            token = draw(keys.at(SAMPLE, keys.length + depth, 0), pick(laws_bmv, here))
            drawn = waiting & (nodes == here[:, None])
            led_to = draft.valid & (draft.parents + 1 == here[:, None]) & (draft.tokens == token[:, None])
            led_to &= drawn.any(-1, keepdims=True)
            waiting = (waiting & ~drawn) | jnp.pad(led_to, ((0, 0), (1, 0)))
            return jnp.where(drawn, token[:, None], choice), waiting

        shape = laws_bmv.shape[:2]
        start = jnp.full(shape, -1, jnp.int32), jnp.broadcast_to(nodes == 0, shape)
        return jax.lax.while_loop(lambda carry: carry[1].any(), body, start)[0]
