"""Acceptance by depth and by child rank, as the planner takes it: from a run's counts or from teacher-forced laws.

Shapes: `d` depth, `r` rank among siblings, `n` positions, `v` vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specjax.analysis.metrics import law_overlap

Array = np.ndarray


def chain_acceptance(accepted: ArrayLike, overlap: ArrayLike) -> Array:
    """Acceptance `[D, 1]` of a chain from a run's counts; depths that no pass came near are left off.

    A pass that had no draft token at a depth (a lookup that found nothing) accepts none there.

    Args:
        accepted: `[D + 1]` passes by accepted draft tokens.
        overlap: `[D]` sum over passes of sum min(p, q) at each depth that was verified.

    Raises:
        ValueError: shapes do not fit, or no pass was counted.
    """
    counts, overlap_d = np.asarray(accepted, np.float64), np.asarray(overlap, np.float64)
    if counts.ndim != 1 or counts.shape != (overlap_d.size + 1,) or not counts.sum():
        raise ValueError(f"{counts.size} counts for {overlap_d.size} depths; expected one more, and at least one pass")
    alive = counts[::-1].cumsum()[::-1][:-1]
    reached = int(np.argmin(alive > 0)) if not (alive > 0).all() else alive.size
    return np.clip(overlap_d[:reached] / alive[:reached], 0.0, 1.0)[:, None]


def rank_acceptance_chosen(p_nv: ArrayLike, tokens_nr: ArrayLike) -> Array:
    """Acceptance `[R]` by rank of candidates that were chosen, not drawn: the mean of p at each.

    What the one-hot rule gives distinct candidates such as a head's R likeliest tokens; with one-hot p, greedy accuracy
    by rank (Medusa, Cai et al. 2024, section 2.3.3).

    Args:
        p_nv: target laws `[n, V]`.
        tokens_nr: int candidates `[n, R]`, by rank, distinct in a row.

    Raises:
        ValueError: a candidate is outside the vocabulary or twice in a row.
    """
    laws, tokens = np.asarray(p_nv, np.float64), np.asarray(tokens_nr)
    if laws.ndim != 2 or tokens.ndim != 2 or len(laws) != len(tokens) or not len(laws):
        raise ValueError(f"laws {laws.shape} and candidates {tokens.shape}; expected [n, V] and [n, R], n at least 1")
    if tokens.min() < 0 or tokens.max() >= laws.shape[1]:
        raise ValueError(f"candidates lie in {tokens.min()}..{tokens.max()}; expected 0..{laws.shape[1] - 1}")
    if (np.diff(np.sort(tokens, axis=1), axis=1) == 0).any():
        raise ValueError("a row has a candidate twice; expected distinct ones")
    return np.take_along_axis(laws, tokens, axis=1).mean(axis=0)


def rank_acceptance_drawn(p_nv: ArrayLike, q_nv: ArrayLike, ranks: int, *, seed: int) -> Array:
    """Acceptance `[R]` by rank of children drawn from q without replacement and verified recursively.

    Sequoia's acceptance vector (Chen et al. 2024, section 3.1) from teacher-forced laws: children are drawn once a
    position, and the chance of each to be the accepted one is computed, not drawn.

    Args:
        p_nv: target laws `[n, V]`.
        q_nv: draft laws `[n, V]`.
        ranks: R; a position whose q has no token left accepts nothing there.
        seed: of the draws.
    """
    law_overlap(p_nv, q_nv)  # checks both
    rng = np.random.default_rng(seed)
    total = np.zeros(ranks)
    for p, q in zip(np.array(p_nv, np.float64), np.array(q_nv, np.float64), strict=True):
        left = 1.0  # chance that every earlier child failed
        for rank in range(ranks):
            if not q.sum() > 0:
                break
            q = q / q.sum()
            child = int(rng.choice(q.size, p=q))
            accept = min(1.0, p[child] / q[child])
            total[rank] += left * accept
            left *= 1.0 - accept
            residual = np.maximum(p - q, 0.0)
            if not left > 0 or not residual.sum() > 0:
                break
            p = residual / residual.sum()
            q = np.where(np.arange(q.size) == child, 0.0, q)
    return total / len(np.asarray(p_nv))
