"""Typical acceptance, a lossy rule: tokens that are likely enough for how uncertain the target is."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling, log_law
from specjax.verification.longest_path import log_at_nodes, longest_path


@dataclasses.dataclass(frozen=True)
class Typical:
    """Accepts x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of the target's law.

    Of all accepted paths the longest is taken, then the likeliest; the next token is drawn from p (Cai et al. 2024,
    Medusa, section 2.3.1). Lossy: the draft steers the text.

    Attributes:
        depth: D of the drafter.
        epsilon: hard threshold.
        delta: of the threshold that entropy lowers; the paper takes sqrt(epsilon).
        exact_for: nothing.
    """

    depth: int
    epsilon: float = 0.09
    delta: float = 0.3
    exact_for: frozenset[Kind] = frozenset()

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} of rule 'typical'; expected a number in (0, 1]")

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        laws = log_law(scores.logits, sampling)
        p = jnp.exp(laws)
        entropy = -jnp.where(p > 0, p * laws, 0.0).sum(-1)
        bar = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        at_parent = jnp.take_along_axis(bar, draft.parents + 1, axis=1)
        accepted = jnp.exp(log_at_nodes(draft, laws)) > at_parent
        return longest_path(draft, scores, laws, accepted, keys, self.depth)
