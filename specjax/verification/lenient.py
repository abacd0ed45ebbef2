"""Speculative sampling with leniency, a lossy rule."""

from __future__ import annotations

import dataclasses

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling
from specjax.verification.recursive import Rejections
from specjax.verification.walk import walk_down


@dataclasses.dataclass(frozen=True)
class Lenient:
    """Accepts with probability min(1, p / (l q)) instead of min(1, p / q) (Leviathan et al. 2023, Appendix A.5).

    Residuals are those of the exact rule. On a chain no token gets more than 1 / l of its probability under the target;
    how much less it may get is not bounded. Lossy.

    Attributes:
        depth: D of the drafter.
        leniency: l in (0, 1).
        exact_for: nothing.
    """

    depth: int
    leniency: float = 0.5
    exact_for: frozenset[Kind] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.leniency < 1:
            raise ValueError(
                f"leniency={self.leniency} of rule 'lenient'; expected a number in (0, 1), or rule 'speculative'"
            )

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        return walk_down(draft, scores, sampling, keys, self.depth, Rejections(self.leniency))
