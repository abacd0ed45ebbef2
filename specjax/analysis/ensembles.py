"""Ensembles of drafters against their members: what they gain in acceptance, and what they must gain to pay.

Counts are `[p, D + 1]`: one row a prompt, passes by how many draft tokens they accepted, as a run records them. They
are counted, not taken from the overlap of laws: of siblings a run records the first one's overlap alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from specjax.analysis.metrics import Interval, bootstrap_interval
from specjax.analysis.theory import Chip, PassCost, ensemble_break_even, roofline_seconds

Array = np.ndarray
CLAIM = (0.05, 0.15)  # what ensembles are said to gain on code and maths


def _survivors(accepted_pd: ArrayLike) -> Array:
    """Passes `[D + 1]` of all prompts that accepted at least so many tokens."""
    counts_pd = np.asarray(accepted_pd, np.float64)
    if counts_pd.ndim != 2 or counts_pd.shape[1] < 2 or not counts_pd.size:
        raise ValueError(f"counts have shape {counts_pd.shape}; expected [prompts, depth + 1], both at least 1")
    return counts_pd.sum(axis=0)[::-1].cumsum()[::-1]


def counted_acceptance(accepted_pd: ArrayLike) -> Array:
    """Acceptance `[D]` at each draft position, given that all before it were accepted; all prompts pooled.

    A pass that had no draft there accepts none. NaN at positions that no pass came to.

    Raises:
        ValueError: counts of another shape, or none.
    """
    alive = _survivors(accepted_pd)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(alive[:-1] > 0, alive[1:] / alive[:-1], np.nan)


def first_acceptance(accepted_pd: ArrayLike) -> float:
    """Acceptance of a draft's first token."""
    return float(counted_acceptance(accepted_pd)[0])


def mean_acceptance(accepted_pd: ArrayLike) -> float:
    """Acceptance over all positions that passes came to: accepted tokens over tried ones.

    Positions thus count by how often they were tried. An unweighted mean over them would rest on the last, where few
    passes come, and could fall for a drafter that is better at every one of the passes.
    """
    alive = _survivors(accepted_pd)
    return float(alive[1:].sum() / alive[:-1].sum()) if alive[0] else float("nan")


def accepted_length(accepted_pd: ArrayLike) -> float:
    """Mean accepted tokens of a pass: tau without the bonus."""
    alive = _survivors(accepted_pd)
    return float(alive[1:].sum() / alive[0]) if alive[0] else float("nan")


STATISTICS: dict[str, Callable[[ArrayLike], float]] = {"first": first_acceptance, "mean": mean_acceptance}


def ensemble_gain(
    ensemble_pd: ArrayLike,
    members_jpd: ArrayLike,
    *,
    against: Literal["best", "mean"],
    statistic: Literal["first", "mean"],
    seed: int = 0,
    resamples: int = 2000,
) -> Interval:
    """How far an ensemble's acceptance lies above its best member's, or above the members' mean.

    The best member is the one of the greatest accepted length, whatever the statistic. Prompts are resampled with all
    their drafters together, and it is chosen anew in every sample: a member that is best by luck does not count against
    the ensemble for certain.

    Args:
        ensemble_pd: its counts.
        members_jpd: those of every member alone, on the same prompts, with as many draft tokens.
        against: `best` or `mean`.
        statistic: of `STATISTICS`.
        seed: of the resampling.
        resamples: how many.

    Returns:
        The difference with its 95 % interval, in acceptance: 0.05 is five points.

    Raises:
        ValueError: counts that do not belong together.
    """
    ensemble, members = np.asarray(ensemble_pd, np.float64), np.asarray(members_jpd, np.float64)
    if members.ndim != 3 or len(members) < 1 or ensemble.shape != members.shape[1:]:
        raise ValueError(
            f"counts of the ensemble have shape {ensemble.shape}, those of its members {members.shape}; expected "
            "[prompts, depth + 1] and [members, prompts, depth + 1]: the same prompts, and one draft length"
        )
    if against not in ("best", "mean") or statistic not in STATISTICS:
        raise ValueError(
            f"against={against!r}, statistic={statistic!r}; expected best or mean, and {' or '.join(STATISTICS)}"
        )
    of = STATISTICS[statistic]

    def difference(rows_pjd: Array) -> float:
        own, *alone = rows_pjd.swapaxes(0, 1)
        other = of(max(alone, key=accepted_length)) if against == "best" else float(np.mean([of(a) for a in alone]))
        return of(own) - other

    rows = np.concatenate([ensemble[:, None], members.swapaxes(0, 1)], axis=1)
    return bootstrap_interval(rows, difference, seed=seed, resamples=resamples)


def claim_verdict(gain: Interval, claim: tuple[float, float] = CLAIM) -> str:
    """What a gain says about a claim of a gain between two numbers.

    Returns:
        `refuted` where the whole interval lies below, `exceeded` where it lies above, `reproduced` where it does not
        reach below and the estimate is within; else `undecided`, a single prompt without an interval included.
    """
    low, high = claim
    if not (gain.low <= gain.high):
        return "undecided"
    if gain.high < low:
        return "refuted"
    if gain.low > high:
        return "exceeded"
    return "reproduced" if gain.low >= low and gain.estimate <= high else "undecided"


def roofline_break_even(
    members: int, *, target: PassCost, draft: PassCost, chip: Chip, alpha: float, gamma: int, tree: bool
) -> float:
    """`ensemble_break_even` with the costs of a roofline, at batch 1.

    Args:
        members: N.
        target: its pass.
        draft: a member's.
        chip: that both run on; several of them alike change no ratio.
        alpha: acceptance rate of the one drafter.
        gamma: draft length.
        tree: the target verifies every member's tokens (a union: N gamma of them) and not one chain.
    """
    one = roofline_seconds(target, chip, batch=1)
    t_ratio, wide = (
        roofline_seconds(target, chip, batch=1, tokens=tokens + 1) / one
        for tokens in (gamma, gamma * (members if tree else 1))
    )
    c = roofline_seconds(draft, chip, batch=1) / one
    return ensemble_break_even(members, c, t_ratio, alpha=alpha, gamma=gamma, ensemble_t_ratio=wide)
