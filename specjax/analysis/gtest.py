"""G-tests of sampled counts, each with its power: the chance that it would have caught a deviation of a
stated size.

The size is total variation distance. A test that passes says only as much as its power. Exact laws on small
tables, without sampling, are in `enumeration`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from scipy.special import xlogy

Array = np.ndarray

FALSE_ALARM = 1e-6
MIN_POWER = 0.99
TOTAL_VARIATION = 0.01
# Below about this many expected draws the chi-square tail at 1e-6 is not to be trusted for a cell of its own.
MIN_EXPECTED = 10.0


@dataclass(frozen=True)
class GTest:
    """A likelihood-ratio test of counts.

    Attributes:
        statistic: G; infinite where an outcome of probability zero was drawn.
        dof: degrees of freedom, cells - 1.
        p_value: chance of a statistic this large if the laws are equal.
        power: chance that a law at total variation `tv` would have been rejected at `false_alarm`; a lower
            bound over all such laws.
        draws: number of draws (of the smaller sample, where there are two).
        cells: cells left after pooling.
        pooled_mass: probability of the cell into which rare outcomes were pooled (0 where none was);
            deviations inside it are invisible, and `power` allows for that.
        tv: the deviation that `power` speaks of.
        false_alarm: the level at which `power` is stated.
        merged: probability of outcomes that the caller told apart by nothing, which `power` allows for too.
    """

    statistic: float
    dof: int
    p_value: float
    power: float
    draws: int
    cells: int
    pooled_mass: float
    tv: float
    false_alarm: float
    merged: float = 0.0

    @property
    def rejected(self) -> bool:
        """Whether the laws differ, at the stated false alarm."""
        return self.p_value < self.false_alarm


def g_test(
    counts: ArrayLike,
    law: ArrayLike,
    *,
    tv: float = TOTAL_VARIATION,
    false_alarm: float = FALSE_ALARM,
    min_expected: float = MIN_EXPECTED,
    merged: float = 0.0,
) -> GTest:
    """Tests counts of independent draws against a known law: `G = 2 sum O log(O / E)`, chi-square with cells
    - 1.

    Args:
        counts: draws of each outcome, int `[K]` (sequences: `sequence_counts`).
        law: their probabilities, float `[K]`, summing to 1.
        tv: deviation for which the power is stated.
        false_alarm: level of the test.
        min_expected: cells expecting fewer draws are pooled into one.
        merged: probability of outcomes that the caller merged into others.

    Raises:
        ValueError: shapes differ, counts are negative or all zero, the law is no law, or pooling leaves one
        cell.
    """
    counts_k, law_k = _counts("counts", counts), np.asarray(law, np.float64)
    if law_k.shape != counts_k.shape:
        raise ValueError(f"law has shape {law_k.shape} and counts {counts_k.shape}: expected the same outcomes.")
    if not (law_k >= 0).all() or abs(law_k.sum() - 1) > 1e-6:
        raise ValueError(f"law sums to {law_k.sum()}: expected probabilities >= 0 that sum to 1 within 1e-6.")
    draws = int(counts_k.sum())
    groups, pooled_mass = _pool(law_k * draws, min_expected)
    observed, expected = _grouped(counts_k, groups), _grouped(law_k * draws, groups)
    if counts_k[law_k == 0].any():
        statistic = math.inf
    else:
        statistic = float(2 * (xlogy(observed, observed) - xlogy(observed, expected)).sum())
    dof = int(groups.max())
    power = g_test_power(draws, dof + 1, tv=max(tv - pooled_mass - merged, 0.0), false_alarm=false_alarm)
    p_value = float(stats.chi2.sf(statistic, dof))
    return GTest(statistic, dof, p_value, power, draws, dof + 1, pooled_mass, tv, false_alarm, merged)


def g_test_two_sample(
    counts_a: ArrayLike,
    counts_b: ArrayLike,
    *,
    tv: float = TOTAL_VARIATION,
    false_alarm: float = FALSE_ALARM,
    min_expected: float = MIN_EXPECTED,
) -> GTest:
    """Tests two independent samples for one law, where it is not known: the G-test of a 2 x K table.

    Args:
        counts_a: draws of each outcome in one sample, int `[K]`.
        counts_b: draws of each outcome in the other, int `[K]`.
        tv: deviation for which the power is stated.
        false_alarm: level of the test.
        min_expected: cells expecting fewer draws in the smaller sample are pooled into one.
    """
    a_k, b_k = _counts("counts_a", counts_a), _counts("counts_b", counts_b)
    if a_k.shape != b_k.shape:
        raise ValueError(f"samples have shapes {a_k.shape} and {b_k.shape}: expected the same outcomes.")
    size_a, size_b = int(a_k.sum()), int(b_k.sum())
    law_k = (a_k + b_k) / (size_a + size_b)
    groups, pooled_mass = _pool(law_k * min(size_a, size_b), min_expected)
    table = np.stack([_grouped(a_k, groups), _grouped(b_k, groups)])
    expected = table.sum(axis=0) * np.array([[size_a], [size_b]]) / (size_a + size_b)
    statistic = float(2 * (xlogy(table, table) - xlogy(table, expected)).sum())
    dof = int(groups.max())
    # Pinsker for each sample against their mixture, 2 sum n KL >= 4 tv^2 n_a n_b / (n_a + n_b).
    effective = size_a * size_b / (size_a + size_b)
    power = g_test_power(effective, dof + 1, tv=max(tv - pooled_mass, 0.0), false_alarm=false_alarm)
    p_value = float(stats.chi2.sf(statistic, dof))
    return GTest(statistic, dof, p_value, power, min(size_a, size_b), dof + 1, pooled_mass, tv, false_alarm)


def g_test_power(draws: float, cells: int, *, tv: float = TOTAL_VARIATION, false_alarm: float = FALSE_ALARM) -> float:
    """Chance that the G-test rejects a law at total variation `tv`, whichever it is.

    Under such a law the statistic is noncentral chi-square with noncentrality 2 n KL >= 4 n tv^2 (Pinsker's
    inequality; Cauchy-Schwarz gives the same for Pearson's statistic), and the power grows with it: the bound
    is that of the hardest alternative.

    Args:
        draws: independent draws; for two samples n_a n_b / (n_a + n_b).
        cells: outcomes after pooling, at least 2.
        tv: total variation distance in [0, 1].
        false_alarm: level of the test.
    """
    if cells < 2 or draws <= 0 or not 0 <= tv <= 1 or not 0 < false_alarm < 1:
        raise ValueError(
            f"draws {draws}, cells {cells}, tv {tv}, false_alarm {false_alarm}: expected draws > 0, "
            "cells >= 2, tv in [0, 1], false_alarm inside (0, 1)."
        )
    critical = stats.chi2.isf(false_alarm, cells - 1)
    noncentrality = 4 * draws * tv**2
    if not noncentrality:
        return false_alarm
    return float(stats.ncx2.sf(critical, cells - 1, noncentrality))


def required_draws(
    cells: int,
    *,
    tv: float = TOTAL_VARIATION,
    power: float = MIN_POWER,
    false_alarm: float = FALSE_ALARM,
) -> int:
    """The fewest draws with which a one-sample G-test over `cells` outcomes has the power; two samples need
    twice.

    Each of two equal samples of twice this size has the same power, by the harmonic mean in `g_test_power`.
    """
    if not false_alarm < power < 1 or not 0 < tv <= 1:
        raise ValueError(f"power {power}, tv {tv}: expected false_alarm < power < 1 and 0 < tv <= 1.")
    low, high = 1, 2
    while g_test_power(high, cells, tv=tv, false_alarm=false_alarm) < power:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        enough = g_test_power(middle, cells, tv=tv, false_alarm=false_alarm) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def sequence_counts(tokens_nt: ArrayLike, vocab_size: int) -> Array:
    """Counts of each sequence of t tokens, int `[vocab_size ** t]`, the first token most significant.

    Args:
        tokens_nt: sampled sequences, int `[n, t]`, ids in [0, vocab_size).
        vocab_size: of the tiny model; keep `vocab_size ** t` small, a cell needs draws.
    """
    tokens_nt = np.asarray(tokens_nt)
    if tokens_nt.ndim != 2 or not tokens_nt.size:
        raise ValueError(f"tokens have shape {tokens_nt.shape}: expected [draws, length], both at least 1.")
    if tokens_nt.min() < 0 or tokens_nt.max() >= vocab_size:
        raise ValueError(
            f"ids lie in [{tokens_nt.min()}, {tokens_nt.max()}]: expected [0, {vocab_size}); give unemitted "
            "positions an id of their own."
        )
    length = tokens_nt.shape[1]
    cells = np.ravel_multi_index(tuple(tokens_nt.T), (vocab_size,) * length)
    return np.bincount(cells, minlength=vocab_size**length)


def top_with_rest(values_v: ArrayLike, ids_k: ArrayLike) -> Array:
    """A law or counts over the vocabulary as `[k + 1]`: the entries of `ids_k`, then the sum of all others.

    For next-token laws of real models, with the ids of the k most likely tokens under the target.
    """
    values_v, ids_k = np.asarray(values_v), np.asarray(ids_k)
    top_k = values_v[ids_k]
    return np.append(top_k, np.delete(values_v, ids_k).sum())


# --- Pieces --------------------------------------------------------------------------------------------


def _counts(name: str, counts: ArrayLike) -> Array:
    counts_k = np.asarray(counts)
    if counts_k.ndim != 1 or not np.issubdtype(counts_k.dtype, np.integer) or (counts_k < 0).any():
        raise ValueError(f"{name} has shape {counts_k.shape}, dtype {counts_k.dtype}: expected ints >= 0, [K].")
    if not counts_k.sum():
        raise ValueError(f"{name} has no draws: at least one is needed.")
    return counts_k.astype(np.int64)


def _pool(expected_k: Array, min_expected: float) -> tuple[Array, float]:
    """Group of each cell: large cells their own, small ones together, with the smallest large one if still
    small.

    Returns the group index `[K]` and the probability of the pooled group (0 where one cell at most went in).
    """
    small = expected_k < min_expected
    groups = np.empty(expected_k.size, np.int64)
    groups[~small] = np.arange((~small).sum())
    possible = small & (expected_k > 0)
    # Impossible cells hold no expected mass; they join the pool without making one.
    if not possible.any():
        groups[small] = 0
        pooled_mass = 0.0
    else:
        if expected_k[small].sum() < min_expected and (~small).any():
            partner = int(np.argmin(np.where(small, np.inf, expected_k)))
            groups[small] = groups[partner]
            members = small | (np.arange(expected_k.size) == partner)
        else:
            groups[small] = (~small).sum()
            members = small
        alone = (members & (expected_k > 0)).sum() == 1
        pooled_mass = 0.0 if alone else float(expected_k[members].sum() / expected_k.sum())
    if groups.max() < 1:
        raise ValueError(
            f"{expected_k.size} outcomes leave one cell of at least {min_expected} expected draws: draw more, or "
            "test a law that is less certain of one outcome."
        )
    return groups, pooled_mass


def _grouped(values_k: Array, groups: Array) -> Array:
    return np.bincount(groups, weights=values_k)
