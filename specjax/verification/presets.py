"""The recursive rule under the names of its papers, each for the drafts that its paper is about."""

from __future__ import annotations

import dataclasses

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling
from specjax.verification.recursive import Recursive


@dataclasses.dataclass(frozen=True)
class Speculative(Recursive):
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023): chains only."""

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`.

        Raises:
            ValueError: the draft is not a chain.
        """
        if not draft.is_chain and draft.num_nodes:
            raise ValueError(
                f"rule 'speculative' verifies chains, not a tree of {draft.num_nodes} nodes; use 'recursive'"
            )
        return super().verify(draft, scores, sampling, keys)


@dataclasses.dataclass(frozen=True)
class SpecInfer(Recursive):
    """Independent siblings, and no others: multi-step speculative sampling (Miao et al. 2024, Algorithm 2)."""

    exact_for: frozenset[Kind] = frozenset({"iid"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`.

        Raises:
            ValueError: siblings were drawn without replacement.
        """
        if draft.siblings != "iid":
            raise ValueError(f"rule 'specinfer' verifies independent siblings, not {draft.siblings!r}; use 'sequoia'")
        return super().verify(draft, scores, sampling, keys)


@dataclasses.dataclass(frozen=True)
class Sequoia(Recursive):
    """Siblings that were drawn without replacement, and no others (Chen et al. 2024, Sequoia)."""

    exact_for: frozenset[Kind] = frozenset({"without_replacement"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`.

        Raises:
            ValueError: siblings were drawn independently.
        """
        if draft.siblings != "without_replacement" and not draft.is_chain:
            raise ValueError(
                f"rule 'sequoia' verifies siblings drawn without replacement, not {draft.siblings!r}; use 'specinfer'"
            )
        return super().verify(draft, scores, sampling, keys)
