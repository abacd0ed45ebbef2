"""What theory predicts: tokens per pass, wall time, operations, draft length, trees, block verification.

`alpha` is the acceptance rate, `gamma` the draft length, `c` the cost of one draft pass over a one-token
target pass. A vector of conditional acceptance by position
(`metrics.acceptance_by_position(...).conditional`) may stand wherever `alpha` does: measured acceptance is
rarely the same at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

# A constant rate, or the conditional rate at positions 1, 2, ... (at least gamma of them).
Acceptance = float | Sequence[float] | np.ndarray


# --- Chains --------------------------------------------------------------------------------------------


def expected_tokens(acceptance: Acceptance, gamma: int) -> float:
    """Expected tokens a pass, bonus included.

    `(1 - alpha^(gamma+1)) / (1 - alpha)` for a constant rate (Leviathan et al. 2023, equation 1), in general
    `1 + sum_{k<=gamma} prod_{j<=k} alpha_j`.

    Args:
        acceptance: constant rate, or conditional rates of at least gamma positions.
        gamma: drafted tokens, >= 0.

    Raises:
        ValueError: a rate outside [0, 1], fewer rates than gamma, or gamma < 0.
    """
    return float(1.0 + np.cumprod(_rates(acceptance, gamma)).sum())


def rate_for_tokens(tokens: float, gamma: int) -> float:
    """The constant acceptance rate that gives so many tokens a pass: the inverse of `expected_tokens`.

    For published tables that give tokens a pass and no rate.

    Args:
        tokens: a pass, bonus included, in [1, gamma + 1].
        gamma: drafted tokens, at least 1.

    Returns:
        alpha, to 1e-9.

    Raises:
        ValueError: no rate gives so many, or gamma < 1.
    """
    if gamma < 1 or not 1 <= tokens <= gamma + 1:
        raise ValueError(f"tokens {tokens}, gamma {gamma}: expected gamma >= 1 and 1 to gamma + 1 tokens a pass.")
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return high


def walltime_improvement(acceptance: Acceptance, gamma: int, c: float) -> float:
    """Expected wall-time improvement `E / (gamma c + 1)`, a target pass costing the same at any width.

    Leviathan et al. 2023, theorem 3.8. `speedup_predicted` drops that assumption.
    """
    return speedup_predicted(acceptance, gamma, draft_passes=gamma, c=c, t_ratio=1.0)


def operations_factor(acceptance: Acceptance, gamma: int, c_hat: float) -> float:
    """Expected growth of arithmetic operations `(gamma c_hat + gamma + 1) / E`.

    Leviathan et al. 2023, theorem 3.11.

    Args:
        acceptance: constant rate, or conditional rates by position.
        gamma: drafted tokens.
        c_hat: operations a token of the draft over those of the target.
    """
    return (gamma * c_hat + gamma + 1) / expected_tokens(acceptance, gamma)


def improvement_possible(alpha: float, c: float) -> bool:
    """Whether some gamma improves wall time under Leviathan's assumptions: iff alpha > c (corollary 3.9).

    Then gamma = 1 already gives (1 + alpha) / (1 + c); and for alpha <= c every
    E <= 1 + gamma alpha <= 1 + gamma c.
    """
    _rates(alpha, 1)
    return alpha > c


def speedup_predicted(acceptance: Acceptance, gamma: int, *, draft_passes: float, c: float, t_ratio: float) -> float:
    """Predicted speedup from measured acceptance and measured costs: `E / (draft_passes * c + t_ratio)`.

    Args:
        acceptance: constant rate, or conditional rates by position.
        gamma: drafted tokens, which fixes E.
        draft_passes: draft passes in one step: gamma for a drafter that stops after its last token, gamma + 1
            for one that also feeds that token to keep its cache whole, 1 for parallel heads, 0 for lookup.
        c: one draft pass over one one-token target pass.
        t_ratio: t(gamma + 1) / t(1), the verifying target pass over a one-token one.
    """
    if not draft_passes >= 0 or not c >= 0 or not t_ratio > 0:
        raise ValueError(f"draft_passes {draft_passes}, c {c}, t_ratio {t_ratio}: expected >= 0, >= 0 and > 0.")
    return expected_tokens(acceptance, gamma) / (draft_passes * c + t_ratio)


def break_even_draft_cost(
    acceptance: Acceptance, gamma: int, *, draft_passes: float, t_ratio: float, speedup: float = 1.0
) -> float:
    """The draft cost c at which the predicted speedup falls to `speedup`; negative where no cost reaches it.

    With `speedup` = that of one drafter it says what an ensemble of higher acceptance may cost at most.
    """
    if not draft_passes > 0 or not speedup > 0:
        raise ValueError(f"draft_passes {draft_passes}, speedup {speedup}: both must be > 0.")
    return (expected_tokens(acceptance, gamma) / speedup - t_ratio) / draft_passes


def ensemble_break_even(
    members: int,
    c: float,
    t_ratio: float,
    *,
    alpha: float = 0.7,
    gamma: int = 4,
    ensemble_t_ratio: float | None = None,
) -> float:
    """How far above one drafter's an ensemble's acceptance must be to be as fast as that one drafter alone.

    Both draft gamma tokens. An ensemble's draft pass costs `members` times c: its members run one after another, or
    together, and then wait for as many weights. The rise d solves
    `E(alpha + d) / (gamma members c + t') = E(alpha) / (gamma c + t)`.

    Args:
        members: N, at least 1.
        c: one member's draft pass over a one-token target pass.
        t_ratio: t, the verifying pass over a one-token one.
        alpha: acceptance rate of the one drafter, constant over positions.
        gamma: draft length.
        ensemble_t_ratio: t' where the ensemble's draft is wider than a chain (a union has N gamma nodes); else t.

    Returns:
        d, in acceptance (0.05 is five points); infinity where not even an acceptance of 1 repays the members.
    """
    if members < 1:
        raise ValueError(f"members {members}: expected at least 1.")
    wanted = speedup_predicted(alpha, gamma, draft_passes=gamma, c=c, t_ratio=t_ratio)
    wide = t_ratio if ensemble_t_ratio is None else ensemble_t_ratio

    def repays(rate: float) -> bool:
        return speedup_predicted(rate, gamma, draft_passes=gamma * members, c=c, t_ratio=wide) >= wanted

    if repays(alpha):
        return 0.0
    if not repays(1.0):
        return float("inf")
    low, high = alpha, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if repays(middle) else (middle, high)
    return high - alpha


@dataclass(frozen=True)
class GammaChoice:
    """A draft length and its predicted speedup; gamma 0 (speedup 1) is plain decoding."""

    gamma: int
    speedup: float


def optimal_gamma(
    acceptance: Acceptance,
    *,
    c: float,
    t_ratio: Callable[[int], float] = lambda gamma: 1.0,
    draft_passes: Callable[[int], float] = lambda gamma: gamma,
    max_gamma: int = 32,
) -> GammaChoice:
    """The draft length 0..max_gamma of the highest predicted speedup; the shortest among equals.

    The defaults are Leviathan's assumptions (section 3.5). No speculation (gamma 0) wins where nothing pays.

    Args:
        acceptance: constant rate, or conditional rates of at least max_gamma positions.
        c: one draft pass over one one-token target pass.
        t_ratio: gamma to t(gamma + 1) / t(1).
        draft_passes: gamma to draft passes in a step.
        max_gamma: longest draft considered.
    """
    best = GammaChoice(0, 1.0)
    for gamma in range(1, max_gamma + 1):
        speedup = speedup_predicted(acceptance, gamma, draft_passes=draft_passes(gamma), c=c, t_ratio=t_ratio(gamma))
        if speedup > best.speedup:
            best = GammaChoice(gamma, speedup)
    return best


# --- Trees ---------------------------------------------------------------------------------------------


def expected_tree_tokens(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Expected tokens a pass of a static tree, bonus included: `1 + sum over nodes of the product along its
    path`.

    (Sequoia, Chen et al. 2024, section 3.1; Medusa, Cai et al. 2024, section 2.3.3.)

    Args:
        parents: parent of each node, -1 for the root's children; parents come before children.
        acceptance: chance that the node is accepted given that its parent is. Siblings exclude each other, so
            theirs sum to at most 1.

    Raises:
        ValueError: lengths differ, a parent is not before its child, a rate outside [0, 1], or siblings above
        1.
    """
    if len(parents) != len(acceptance):
        raise ValueError(f"{len(parents)} parents and {len(acceptance)} rates: expected one rate a node.")
    reach = np.zeros(len(parents))
    of_parent = np.zeros(len(parents) + 1)  # the last entry is the root's, whose index is -1
    for node, (parent, rate) in enumerate(zip(parents, acceptance, strict=True)):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}: expected -1 or a node before it.")
        if not 0 <= rate <= 1:
            raise ValueError(f"node {node} has acceptance {rate}: expected a rate in [0, 1].")
        of_parent[parent] += rate
        if of_parent[parent] > 1 + 1e-6:
            raise ValueError(
                f"the children of node {parent} have acceptance {of_parent[parent]} > 1 in sum: give "
                "the chance of each child, not the chance given that its earlier siblings failed."
            )
        reach[node] = rate * (1.0 if parent < 0 else reach[parent])
    return float(1.0 + reach.sum())


def node_acceptance_by_rank(parents: Sequence[int], rank_acceptance: Sequence[float]) -> list[float]:
    """Acceptance of each node of a tree from a vector by child rank (Sequoia's acceptance vector).

    Args:
        parents: as in `expected_tree_tokens`; a node's rank is its place among its siblings.
        rank_acceptance: chance that the r-th child is the accepted one, r from 0.
    """
    seen: dict[int, int] = {}
    rates = []
    for node, parent in enumerate(parents):
        rank = seen.get(parent, 0)
        if rank >= len(rank_acceptance):
            raise ValueError(f"node {node} is child {rank} of {parent}: the vector has {len(rank_acceptance)} ranks.")
        rates.append(float(rank_acceptance[rank]))
        seen[parent] = rank + 1
    return rates


# --- Token, block and ideal verification of iid tokens, in exact fractions --------------------------------


def token_expected_accepted(p: Sequence[Any], q: Sequence[Any], gamma: int) -> Fraction:
    """Expected accepted tokens of token-by-token verification, iid p and q: `sum_{i<=gamma} alpha^i`."""
    p, q = _fractions("p", p), _fractions("q", q)
    rate = sum(map(min, p, q), Fraction())
    return sum((rate**i for i in range(1, gamma + 1)), Fraction())


def block_expected_accepted(p: Sequence[Any], q: Sequence[Any], gamma: int) -> Fraction:
    """Expected accepted tokens of block verification (Sun et al. 2024), iid p and q.

    `sum_{i<=gamma} E_q[pbar_i]` with `pbar_0 = 1, pbar_i = min(pbar_{i-1} p(x_i) / q(x_i), 1)`: given a
    drafted prefix x_1..x_i, the rule keeps at least i tokens with chance pbar_i.

    Args:
        p: target law, Fractions (or ints, or strings such as "1/3") that sum to exactly 1.
        q: draft law, likewise.
        gamma: drafted tokens.
    """
    return _expected_clipped(p, q, gamma, clip=lambda ratio: min(ratio, Fraction(1)))


def ideal_expected_accepted(p: Sequence[Any], q: Sequence[Any], gamma: int) -> Fraction:
    """Upper bound on expected accepted tokens: `sum_{i<=gamma} sum_x min(p^i(x), q^i(x))`, x of i tokens.

    What a verifier with the whole joint laws could accept at each length (Sun et al. 2024, section 2).
    """
    return _expected_clipped(p, q, gamma, clip=lambda ratio: ratio)


def block_gain(p: Sequence[Any], q: Sequence[Any], gamma: int) -> Fraction:
    """Tokens a pass of block over token-by-token verification, bonus included, iid p and q."""
    return (1 + block_expected_accepted(p, q, gamma)) / (1 + token_expected_accepted(p, q, gamma))


def _expected_clipped(p: Sequence[Any], q: Sequence[Any], gamma: int, clip: Callable[[Fraction], Fraction]) -> Fraction:
    """`sum_i E_q[min(r_i, 1)]` with `r_i = clip(r_{i-1} p/q)`, merging prefixes of equal r."""
    p, q = _fractions("p", p), _fractions("q", q)
    if len(p) != len(q):
        raise ValueError(f"p has {len(p)} tokens and q {len(q)}: expected the same vocabulary.")
    mass, total = {Fraction(1): Fraction(1)}, Fraction()
    for _ in range(gamma):
        grown: dict[Fraction, Fraction] = {}
        for ratio, weight in mass.items():
            for p_x, q_x in zip(p, q, strict=True):
                if q_x:
                    r = clip(ratio * p_x / q_x)
                    grown[r] = grown.get(r, Fraction()) + weight * q_x
        mass = grown
        total += sum((weight * min(ratio, Fraction(1)) for ratio, weight in mass.items()), Fraction())
    return total


# --- Batch size ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """An accelerator as a roofline: `bandwidth` in bytes/s, `flops` in operations/s, both as reached in
    practice.
    """

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class PassCost:
    """What a model's pass reads and computes.

    Attributes:
        weight_bytes: read once a pass, whatever the batch.
        flops_per_token: about twice the parameter count.
        kv_bytes_per_row: the cache of one row at the context length in question, read once a pass.
    """

    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_row: float = 0.0


def roofline_seconds(model: PassCost, chip: Chip, *, batch: int, tokens: int = 1) -> float:
    """Seconds of one pass over `batch` rows of `tokens`: the larger of bytes / bandwidth and operations /
    flops.

    (Williams et al. 2009.) An optimistic bound: no overlap lost, no launch time.
    """
    if batch < 1 or tokens < 1:
        raise ValueError(f"batch {batch}, tokens {tokens}: both must be at least 1.")
    read = model.weight_bytes + batch * model.kv_bytes_per_row
    return max(read / chip.bandwidth, batch * tokens * model.flops_per_token / chip.flops)


def batch_speedup(
    acceptance: Acceptance,
    gamma: int,
    *,
    draft_passes: int,
    target: PassCost,
    draft: PassCost,
    chip: Chip,
    batch: int,
) -> float:
    """Predicted speedup at a batch size, c and t(gamma + 1) / t(1) taken from the roofline."""
    one = roofline_seconds(target, chip, batch=batch)
    c = roofline_seconds(draft, chip, batch=batch) / one
    t_ratio = roofline_seconds(target, chip, batch=batch, tokens=gamma + 1) / one
    return speedup_predicted(acceptance, gamma, draft_passes=draft_passes, c=c, t_ratio=t_ratio)


def batch_break_even(
    acceptance: Acceptance,
    gamma: int,
    *,
    draft_passes: int,
    target: PassCost,
    draft: PassCost,
    chip: Chip,
    max_batch: int = 4096,
) -> int:
    """The largest batch up to which speculation pays at every size: 0 if not even at 1, `max_batch` if
    throughout.

    Decoding a small batch waits for weights, so checking gamma + 1 tokens is nearly free; a large batch is
    bound by arithmetic, and then rejected tokens cost what accepted ones do.
    """
    for batch in range(1, max_batch + 1):
        speedup = batch_speedup(
            acceptance, gamma, draft_passes=draft_passes, target=target, draft=draft, chip=chip, batch=batch
        )
        if speedup <= 1.0:
            return batch - 1
    return max_batch


# --- Checks --------------------------------------------------------------------------------------------


def _rates(acceptance: Acceptance, gamma: int) -> np.ndarray:
    if gamma < 0 or gamma != int(gamma):
        raise ValueError(f"gamma is {gamma}: expected an integer >= 0.")
    rates = np.asarray(acceptance, np.float64)
    if rates.ndim == 0:
        rates = np.full(int(gamma), float(rates))
    elif rates.ndim != 1 or rates.size < gamma:
        raise ValueError(f"acceptance has shape {rates.shape}: expected a rate, or one for each of {gamma} positions.")
    rates = rates[: int(gamma)]
    wrong = np.flatnonzero(~((rates >= 0) & (rates <= 1)))
    if wrong.size:
        k = int(wrong[0])
        raise ValueError(
            f"acceptance at position {k + 1} is {rates[k]}: expected a rate in [0, 1] (NaN marks a "
            "position that no pass reached; use a shorter gamma)."
        )
    return rates


def _fractions(name: str, law: Sequence[Any]) -> tuple[Fraction, ...]:
    values = tuple(Fraction(x) for x in law)
    if any(x < 0 for x in values) or sum(values) != 1:
        raise ValueError(f"{name} sums to {sum(values)}: expected fractions >= 0 that sum to exactly 1.")
    return values
