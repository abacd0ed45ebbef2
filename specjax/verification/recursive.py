"""Recursive rejection sampling over a token tree: one rule that holds the exact rules of the field as cases.

With one child a node it is speculative sampling (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023). With
independent siblings it is SpecInfer's multi-step verification (Miao et al. 2024), with siblings drawn without
replacement Sequoia's (Chen et al. 2024), with fixed choices the tree verification of EAGLE and Medusa. The first three
have names of their own in `specjax.verification.presets`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Kind, Scores, Verdict
from specjax.decoding.sampling import Keys, Sampling
from specjax.verification.laws import residual
from specjax.verification.walk import walk_down


@dataclasses.dataclass(frozen=True)
class Recursive:
    """Try the children of a node in order: accept child x with probability min(1, p(x) / q(x)), strictly u < p / q;
    after a rejection p becomes the normalised positive part of p - q. When no child is left, draw from p.

    Attributes:
        depth: D of the drafter.
    """

    depth: int
    exact_for: frozenset[Kind] = frozenset({"fixed", "iid", "without_replacement", "mixed"})

    def verify(self, draft: Draft, scores: Scores, sampling: Sampling, keys: Keys) -> Verdict:
        """See `Rule.verify`."""
        return walk_down(draft, scores, sampling, keys, self.depth, Rejections())


@dataclasses.dataclass(frozen=True)
class Rejections:
    """A `Trial` by rejection sampling.

    Attributes:
        leniency: l: children are accepted with min(1, p / (l q)); 1 is exact, less is lossy.
    """

    leniency: float = 1.0

    def scale(
        self, draft: Draft, node_b: jax.Array, needed_b: jax.Array, p_bv: jax.Array, q_bv: jax.Array
    ) -> jax.Array:
        """The leniency, in every row."""
        del draft, needed_b, p_bv, q_bv
        return jnp.full(node_b.shape, self.leniency, jnp.float32)

    def left(
        self,
        draft: Draft,
        node_b: jax.Array,
        last_b: jax.Array,
        scale_b: jax.Array,
        p_bv: jax.Array,
        q_bv: jax.Array,
    ) -> jax.Array:
        """The normalised positive part of p - q."""
        del draft, node_b, last_b, scale_b
        return residual(p_bv, q_bv)
