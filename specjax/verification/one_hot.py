"""One-hot verification: the target samples at every node, and the path that it would have taken is accepted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import SAMPLE, Keys, Sampling, draw, log_law
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
            choice = self._draw_all(laws, scores, keys)
            at_parent = jnp.take_along_axis(laws, (draft.parents + 1)[..., None], axis=1)
            p_bn = jnp.exp(jnp.take_along_axis(at_parent, draft.tokens[..., None], axis=2)[..., 0])
        return longest_match(draft, scores, choice, p_bn, self.depth)

    def _draw_all(self, laws_bmv: jax.Array, scores: Scores, keys: Keys) -> jax.Array:
        """One draw at root and nodes `[B, N + 1]`; nodes at one position share its key."""

        def at_node(law_bv: jax.Array, depth_b: jax.Array) -> jax.Array:
            return draw(keys.at(SAMPLE, keys.length + depth_b, 0), law_bv)

        return jax.vmap(at_node, in_axes=1, out_axes=1)(laws_bmv, scores.depths)
