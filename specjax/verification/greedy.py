"""Greedy verification: accept a draft token when it is the target's argmax."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling
from specjax.verification.longest_match import longest_match


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Longest match with the argmax; exact for any draft at temperature 0, and only there.

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"fixed", "iid", "without_replacement", "mixed"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        del keys
        if not sampling.greedy:
            raise ValueError("rule 'greedy' needs temperature 0 in every row; use 'one_hot' or 'recursive'")
        choice = scores.argmax[:, : draft.num_nodes + 1]
        at_parent = jnp.take_along_axis(choice, draft.parents + 1, axis=1)
        return longest_match(draft, scores, choice, (draft.tokens == at_parent).astype(jnp.float32), self.depth)
