"""One glossary of what is counted in speculative decoding: acceptance, length, speed.

The field's numbers are disputed because papers and servers use one word for several things. Here every
quantity is one function whose docstring gives the formula and the source. Conventions throughout:

* A *pass* is one target pass that verifies a draft; `accepted` is how many drafted tokens it kept, 0..gamma.
* *tau* counts the token that the target itself adds (the bonus or the replacement), so plain decoding is 1.
* Nothing after an end-of-sequence token is drafted, accepted or emitted: callers pass counts after the cut.
* The token that prefill emits is part of no pass and is not counted.

Shapes: `n` positions or passes, `p` prompts, `v` vocabulary, `g` draft positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Array = np.ndarray


# --- Overlap of laws -----------------------------------------------------------------------------------


def law_overlap(p_nv: ArrayLike, q_nv: ArrayLike) -> Array:
    """Overlap of target and draft laws: `beta = sum_x min(p(x), q(x)) = 1 - TV(p, q)`.

    The chance that one token drawn from q is accepted by the exact rule (Leviathan et al. 2023,
    definition 3.1 and theorem 3.5).

    Args:
        p_nv: target laws, float `[..., V]`, each row summing to 1.
        q_nv: draft laws actually drawn from, float `[..., V]`, in target token ids.

    Returns:
        float64 `[...]`.

    Raises:
        ValueError: shapes differ, or a row is not a law.
    """
    p_nv, q_nv = _laws("p", p_nv), _laws("q", q_nv)
    if p_nv.shape != q_nv.shape:
        raise ValueError(f"p has shape {p_nv.shape} and q {q_nv.shape}: give both over the same positions and ids.")
    return np.minimum(p_nv, q_nv).sum(axis=-1)


def alpha(overlaps: ArrayLike) -> float:
    """Acceptance rate `alpha = E[beta]`, the mean overlap over positions (Leviathan et al. 2023).

    Args:
        overlaps: `law_overlap` at the positions that verification reached (each accepted token's position
            and the first rejected one), any shape. Positions never reached are left out by the caller.

    Raises:
        ValueError: no positions, or a value outside [0, 1].
    """
    values = np.asarray(overlaps, np.float64).ravel()
    if not values.size:
        raise ValueError("alpha of no positions: at least one verified position is needed.")
    # One ulp-sized excess is rounding of a float32 sum over the vocabulary, not an error.
    if not ((values >= 0) & (values <= 1 + 1e-4)).all():
        raise ValueError(f"overlaps lie in [{values.min()}, {values.max()}]; sum of min(p, q) lies in [0, 1].")
    return float(np.minimum(values, 1.0).mean())


def tau_probabilistic(overlaps_ng: ArrayLike) -> float:
    """Tau expected from overlaps: `1 + E[sum_k prod_{j<=k} beta_j]` (DeepSpec, `tau_probabilistic`).

    With overlaps along a reference text (teacher-forced) this is the training-time estimate; it equals the
    served tau only as far as reference prefixes resemble drafted ones.

    Args:
        overlaps_ng: float `[n, gamma]`; 0 where a draft is shorter.
    """
    overlaps_ng = np.asarray(overlaps_ng, np.float64)
    if overlaps_ng.ndim != 2 or not overlaps_ng.size:
        raise ValueError(f"overlaps have shape {overlaps_ng.shape}: expected [passes, gamma], both at least 1.")
    return float(1.0 + np.cumprod(overlaps_ng, axis=1).sum(axis=1).mean())


# --- Counts per pass -----------------------------------------------------------------------------------


def acceptance_rate(accepted_n: ArrayLike, gamma: ArrayLike) -> float:
    """Accepted over drafted tokens: `sum(accepted) / sum(gamma)`.

    vLLM's `draft_acceptance_rate`. It falls with gamma even where alpha is constant, because tokens after the
    first rejection count as drafted: not comparable with `alpha`.

    Args:
        accepted_n: accepted tokens of each pass, int `[n]`.
        gamma: drafted tokens of each pass, int or int `[n]`.
    """
    accepted_n, drafted_n = _passes(accepted_n, gamma)
    if not drafted_n.sum():
        raise ValueError("acceptance rate of passes that drafted nothing: it is undefined; leave such passes out.")
    return float(accepted_n.sum() / drafted_n.sum())


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance at draft positions 1..gamma (index 0 is position 1).

    Attributes:
        conditional: accepted / reached; NaN where no pass reached the position. float `[gamma]`.
        unconditional: accepted / all passes. float `[gamma]`.
        accepted: passes that accepted this position. int `[gamma]`.
        reached: passes that drafted this position and accepted all before it. int `[gamma]`.
        offered: passes that drafted this position. int `[gamma]`.
        passes: number of passes.
    """

    conditional: Array
    unconditional: Array
    accepted: Array
    reached: Array
    offered: Array
    passes: int


def acceptance_by_position(accepted_n: ArrayLike, gamma: ArrayLike) -> PositionAcceptance:
    """Acceptance at each draft position, conditional and unconditional.

    `conditional[k] = #(accepted >= k) / #(accepted >= k-1 and gamma >= k)`: EAGLE's (k-1)-alpha.
    `unconditional[k] = #(accepted >= k) / #passes`: vLLM's per-position rate; its sum is tau - 1.

    Args:
        accepted_n: accepted tokens of each pass, int `[n]`.
        gamma: drafted tokens of each pass, int or int `[n]`.
    """
    accepted_n, drafted_n = _passes(accepted_n, gamma)
    positions_g = np.arange(1, int(drafted_n.max()) + 1)
    offered = (drafted_n[:, None] >= positions_g).sum(axis=0)
    accepted = (accepted_n[:, None] >= positions_g).sum(axis=0)
    reached = ((accepted_n[:, None] >= positions_g - 1) & (drafted_n[:, None] >= positions_g)).sum(axis=0)
    return _position_acceptance(accepted, reached, offered, accepted_n.size)


def acceptance_by_position_from_histogram(histogram: ArrayLike) -> PositionAcceptance:
    """`acceptance_by_position` from `histogram[a]` = passes with exactly a accepted; gamma = len - 1."""
    counts = np.asarray(histogram)
    if counts.ndim != 1 or counts.size < 2 or (counts < 0).any() or not counts.sum():
        raise ValueError(f"histogram {counts.tolist()}: expected gamma + 1 >= 2 counts >= 0, not all zero.")
    at_least = counts[::-1].cumsum()[::-1]
    passes = int(at_least[0])
    return _position_acceptance(at_least[1:], at_least[:-1], np.full(counts.size - 1, passes), passes)


def _position_acceptance(accepted: Array, reached: Array, offered: Array, passes: int) -> PositionAcceptance:
    conditional = np.where(reached > 0, accepted / np.maximum(reached, 1), np.nan)
    return PositionAcceptance(conditional, accepted / passes, accepted, reached, offered, passes)


def mean_acceptance_length(accepted_n: ArrayLike) -> float:
    """Mean acceptance length, bonus included: `1 + mean(accepted)`.

    vLLM's `mean_acceptance_length`, Spec-Bench's `#Mean Accepted Tokens`, the papers' tau. It equals `tau`
    when no pass was cut by an end of sequence or a budget.
    """
    accepted_n, _ = _passes(accepted_n, np.iinfo(np.int64).max)
    return float(1.0 + accepted_n.mean())


def tau(new_tokens: ArrayLike, passes: ArrayLike) -> float:
    """Tokens per target pass, bonus included: `sum(new_tokens) / sum(passes)`; plain decoding gives 1.

    Args:
        new_tokens: tokens emitted by passes and kept, int or int `[p]`; prefill's token is not among them.
        passes: target passes that emitted them, int or int `[p]`.
    """
    emitted, count = np.asarray(new_tokens, np.float64), np.asarray(passes, np.float64)
    if emitted.shape != count.shape or (emitted < 0).any() or (count < 0).any() or not count.sum():
        raise ValueError(f"tau of {emitted} tokens in {count} passes: expected equal shapes and at least one pass.")
    return float(emitted.sum() / count.sum())


def block_efficiency(new_tokens: ArrayLike, passes: ArrayLike) -> float:
    """Block efficiency (SpecTr, Sun et al. 2023): decoded tokens per target call; `tau` by another name."""
    return tau(new_tokens, passes)


# --- Cost and speed ------------------------------------------------------------------------------------


def draft_cost(draft_pass_seconds: float, target_pass_seconds: float) -> float:
    """Draft cost `c`: a draft pass over a one-token target pass (Leviathan et al. 2023, definition 3.7)."""
    if not draft_pass_seconds >= 0 or not target_pass_seconds > 0:
        raise ValueError(
            f"draft pass {draft_pass_seconds} s, target pass {target_pass_seconds} s: expected >= 0 and > 0."
        )
    return draft_pass_seconds / target_pass_seconds


def mbsu(tau: float, size_ratio: float, draft_passes: float) -> float:
    """Memory-bound speed-up: `MBSU = tau / (draft_passes * size_ratio + 1)`.

    The speedup if a pass cost exactly the bytes it reads (Goel et al. 2024, direct alignment of draft models;
    with their ratio target over draft r = 1/size_ratio this is `r tau / (draft_passes + r)`).

    Args:
        tau: block efficiency, bonus included.
        size_ratio: bytes (or parameters) of the draft over those of the target.
        draft_passes: draft passes a target pass.
    """
    if not tau >= 0 or not size_ratio >= 0 or not draft_passes >= 0:
        raise ValueError(f"tau {tau}, size ratio {size_ratio}, draft passes {draft_passes}: all must be >= 0.")
    return tau / (draft_passes * size_ratio + 1)


def speedup_mean_of_ratios(method_tps_p: ArrayLike, baseline_tps_p: ArrayLike) -> float:
    """Mean over prompts of tokens/s over the same prompt's baseline tokens/s: each prompt weighs the same.

    The arithmetic mean of normalised rates. It depends on which side is the baseline (Fleming and Wallace 1986, "How
    not to lie with statistics"): its inverse is not the baseline's speedup over the method, `speedup_geometric`'s is.
    """
    method_p, baseline_p = _rates(method_tps_p, baseline_tps_p)
    return float((method_p / baseline_p).mean())


def speedup_spec_bench(method_tps_p: ArrayLike, baseline_tps_p: ArrayLike) -> float:
    """Mean tokens/s over mean baseline tokens/s (Spec-Bench, `evaluation/speed.py`)."""
    method_p, baseline_p = _rates(method_tps_p, baseline_tps_p)
    return float(method_p.mean() / baseline_p.mean())


def speedup_geometric(method_tps_p: ArrayLike, baseline_tps_p: ArrayLike) -> float:
    """Geometric mean over prompts of the tokens/s ratio: swapping method and baseline gives the inverse.

    The mean of normalised numbers that does not depend on the baseline (Fleming and Wallace 1986).
    """
    method_p, baseline_p = _rates(method_tps_p, baseline_tps_p)
    return float(np.exp(np.log(method_p / baseline_p).mean()))


def speedup_pooled(
    method_tokens_p: ArrayLike,
    method_seconds_p: ArrayLike,
    baseline_tokens_p: ArrayLike,
    baseline_seconds_p: ArrayLike,
) -> float:
    """All tokens over all seconds, method over baseline: long prompts weigh more.

    The ratio of throughputs as serving benchmarks give them (vLLM's `benchmarks/throughput`: tokens over elapsed time).
    """
    tokens, seconds = _rates(method_tokens_p, method_seconds_p)
    base_tokens, base_seconds = _rates(baseline_tokens_p, baseline_seconds_p)
    return float((tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum()))


# --- Text and uncertainty ------------------------------------------------------------------------------


def distinct_bigram_ratio(tokens: ArrayLike) -> float:
    """Distinct over all adjacent token pairs (distinct-2, Li et al. 2016).

    A low value means that the text loops, which flatters tau. Fewer than two tokens repeat nothing: 1.0.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"tokens have shape {ids.shape}: expected one sequence [n] of ids.")
    if ids.size < 2:
        return 1.0
    return len(set(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True))) / (ids.size - 1)


def entropy(p_nv: ArrayLike) -> Array:
    """Shannon entropy in nats of each law, `-sum p log p`, with 0 log 0 = 0. float `[..., V]` to `[...]`."""
    p_nv = _laws("p", p_nv)
    return -(p_nv * np.log(np.where(p_nv > 0, p_nv, 1.0))).sum(axis=-1)


def mean_target_entropy(p_nv: ArrayLike) -> float:
    """Mean entropy in nats of the target's laws at the emitted positions (Shannon 1948, section 6)."""
    values = entropy(p_nv)
    if not values.size:
        raise ValueError("mean entropy of no positions: at least one target law is needed.")
    return float(values.mean())


@dataclass(frozen=True)
class Interval:
    """A statistic with its bootstrap interval; `low` and `high` are NaN where one prompt gives no spread."""

    estimate: float
    low: float
    high: float


def bootstrap_interval(
    rows_p: ArrayLike,
    statistic: Callable[[Array], float] = lambda rows: float(rows.mean()),
    *,
    seed: int,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap over prompts (Efron 1979): resample prompts with replacement, take quantiles.

    Prompts, not tokens or passes, are resampled: passes of one prompt are far from independent.

    Args:
        rows_p: one row a prompt, `[p, ...]`; columns (tokens, passes, ...) stay together.
        statistic: maps resampled rows `[p, ...]` to a number, for instance a ratio of column sums.
        seed: of the resampling; the same seed gives the same interval.
        resamples: number of bootstrap samples.
        confidence: mass between low and high.
    """
    rows_p = np.asarray(rows_p)
    if rows_p.ndim == 0 or not len(rows_p):
        raise ValueError("bootstrap over no prompts: at least one row is needed.")
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"confidence {confidence}, resamples {resamples}: expected inside (0, 1) and at least 1.")
    estimate = float(statistic(rows_p))
    if len(rows_p) == 1:
        return Interval(estimate, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    draws = [statistic(rows_p[rng.integers(len(rows_p), size=len(rows_p))]) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high))


# --- Checks --------------------------------------------------------------------------------------------


def _laws(name: str, laws_nv: ArrayLike) -> Array:
    laws_nv = np.asarray(laws_nv, np.float64)
    if laws_nv.ndim < 1:
        raise ValueError(f"{name} is a scalar: expected laws [..., V].")
    # 1e-3 admits laws kept in bfloat16-rounded float32, not logits or unnormalised weights.
    if not (laws_nv >= 0).all() or not np.allclose(laws_nv.sum(axis=-1), 1.0, atol=1e-3):
        raise ValueError(f"{name} has a row that is no law: every row must be >= 0 and sum to 1 (softmax the logits).")
    return laws_nv


def _passes(accepted_n: ArrayLike, gamma: ArrayLike) -> tuple[Array, Array]:
    accepted_n, drafted = np.asarray(accepted_n), np.asarray(gamma)
    if accepted_n.ndim != 1 or not accepted_n.size:
        raise ValueError(f"accepted lengths have shape {accepted_n.shape}: expected [passes], at least one pass.")
    if drafted.ndim and drafted.shape != accepted_n.shape:
        raise ValueError(f"gamma has shape {drafted.shape}: expected an int or one a pass, {accepted_n.shape}.")
    drafted_n = np.broadcast_to(drafted, accepted_n.shape)
    wrong = np.flatnonzero((accepted_n < 0) | (accepted_n > drafted_n))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"pass {i} accepted {accepted_n[i]} of {drafted_n[i]} drafted tokens: expected 0..{drafted_n[i]}"
            " (the bonus token is not an accepted token)."
        )
    return accepted_n, drafted_n


def _rates(method_p: ArrayLike, baseline_p: ArrayLike) -> tuple[Array, Array]:
    method_p, baseline_p = np.asarray(method_p, np.float64), np.asarray(baseline_p, np.float64)
    if method_p.shape != baseline_p.shape or method_p.ndim != 1 or not method_p.size:
        raise ValueError(
            f"shapes {method_p.shape} and {baseline_p.shape}: expected one value a prompt, the same prompts."
        )
    if not ((method_p > 0).all() and (baseline_p > 0).all()):
        raise ValueError("a prompt has a value <= 0: leave prompts without tokens or time out of both sides.")
    return method_p, baseline_p
