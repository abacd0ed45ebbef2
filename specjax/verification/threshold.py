"""Acceptance above a fixed probability, a lossy rule."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling, log_law
from specjax.verification.longest_path import log_at_nodes, longest_path


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Accepts x where p(x) > bar. Of all accepted paths the longest is taken, then the likeliest. Lossy.

    Attributes:
        depth: D of the drafter.
        bar: the probability to exceed.
        exact_for: nothing.
    """

    depth: int
    bar: float = 0.3
    exact_for: frozenset[Kind] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.bar < 1:
            raise ValueError(f"bar={self.bar} of rule 'threshold'; expected a number in [0, 1)")

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        laws = log_law(scores.logits, sampling)
        accepted = jnp.exp(log_at_nodes(draft, laws)) > self.bar
        return longest_path(draft, scores, laws, accepted, keys, self.depth)
