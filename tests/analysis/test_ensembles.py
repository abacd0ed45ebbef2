"""What ensembles gain over their members, from counts; and what they must gain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specjax.analysis import Chip, Interval, PassCost, ensemble_break_even
from specjax.analysis.ensembles import (
    accepted_length,
    claim_verdict,
    counted_acceptance,
    ensemble_gain,
    mean_acceptance,
    roofline_break_even,
)


def counts(rates: tuple[float, ...], prompts: int, passes: int, seed: int) -> np.ndarray:
    """Passes by accepted tokens, drawn with an acceptance rate a prompt of its own."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((prompts, len(rates) + 1), int)
    for row, own in zip(rows, rng.normal(0, 0.05, prompts), strict=True):
        for _ in range(passes):
            hits = rng.random(len(rates)) < np.asarray(rates) + own
            row[int(np.cumprod(hits).sum())] += 1
    return rows


def test_acceptance_is_counted_among_the_passes_that_came_there() -> None:
    # 10 passes: 4 accepted none, 3 one token, 3 two; nobody came to the last position of the second table.
    assert counted_acceptance([[4, 3, 3]]).tolist() == [0.6, 0.5]
    assert np.isnan(counted_acceptance([[5, 0, 0], [5, 0, 0]])[1])
    with pytest.raises(ValueError, match="expected .prompts, depth . 1., both at least 1"):
        counted_acceptance([1, 2])


def test_gains_are_those_that_were_drawn() -> None:
    best, other = counts((0.6, 0.6), 60, 200, 1), counts((0.4, 0.4), 60, 200, 2)
    ensemble = counts((0.7, 0.6), 60, 200, 3)
    over: dict[Any, Interval] = {
        (against, statistic): ensemble_gain(
            ensemble, [other, best], against=against, statistic=statistic, resamples=300
        )
        for against in ("best", "mean")
        for statistic in ("first", "mean")
    }
    # Of the ensemble 1.12 tokens are accepted for 1.7 that are tried.
    expected = {("best", "first"): 0.1, ("best", "mean"): 0.059, ("mean", "first"): 0.2, ("mean", "mean"): 0.159}
    for key, gain in over.items():
        assert gain.low < expected[key] < gain.high and gain.high - gain.low < 0.08, key
    assert claim_verdict(over["best", "first"]) == "reproduced"


def test_positions_count_by_how_often_they_were_tried() -> None:
    """Few passes come to the last position: what they do there must not turn the verdict."""
    member, ensemble = np.array([[60, 36, 4]]), np.array([[40, 56, 4]])
    assert counted_acceptance(member).tolist() == [0.4, 0.1]
    assert mean_acceptance(member) == 44 / 140 and accepted_length(member) == 0.44
    gain = ensemble_gain(ensemble, [member], against="best", statistic="mean")
    assert gain.estimate == pytest.approx(64 / 160 - 44 / 140) and gain.estimate > 0
    assert np.isnan(mean_acceptance([[0, 0, 0]])) and np.isnan(accepted_length([[0, 0, 0]]))


def test_the_best_member_is_the_one_that_is_accepted_longest() -> None:
    long, short = np.array([[50, 10, 40]]), np.array([[45, 54, 1]])
    gain = ensemble_gain(long, [long, short], against="best", statistic="first")
    assert gain.estimate == 0 and accepted_length(long) > accepted_length(short)


def test_prompts_are_resampled_with_all_their_drafters() -> None:
    """Hard and easy prompts move ensemble and member alike: the difference has no spread where each prompt has it."""
    easy, hard = [10, 90], [90, 10]
    member = np.array([easy, hard] * 20)
    gain = ensemble_gain(member + [-5, 5], [member], against="best", statistic="first", resamples=200)
    assert gain.low == pytest.approx(0.05) == gain.high


def test_counts_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="the same prompts, and one draft length"):
        ensemble_gain(np.ones((3, 4)), np.ones((2, 3, 3)), against="best", statistic="first")
    with pytest.raises(ValueError, match="against='worst'"):
        ensemble_gain(np.ones((3, 4)), np.ones((2, 3, 4)), against="worst", statistic="first")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.10, 0.06, 0.14), "reproduced"),
        ((0.02, -0.01, 0.04), "refuted"),
        ((0.25, 0.2, 0.3), "exceeded"),
        ((0.07, 0.03, 0.11), "undecided"),
        ((0.1, float("nan"), float("nan")), "undecided"),
    ],
)
def test_what_a_gain_says_of_the_claim(interval: tuple[float, float, float], verdict: str) -> None:
    assert claim_verdict(Interval(*interval)) == verdict


def test_break_even_on_a_roofline() -> None:
    """Waiting for weights: 1 B beside 70 B costs a seventieth a pass, and a few more tokens cost the target nothing."""
    chip, target, draft = Chip(4.8e12, 989e12), PassCost(140e9, 140e9), PassCost(2e9, 2e9)
    costs: dict[str, Any] = {"target": target, "draft": draft, "alpha": 0.7, "gamma": 4}
    for n in (1, 2, 8):
        own = roofline_break_even(n, chip=chip, tree=False, **costs)
        assert own == pytest.approx(ensemble_break_even(n, 1 / 70, 1.0, alpha=0.7, gamma=4))
        assert roofline_break_even(n, chip=chip, tree=True, **costs) == pytest.approx(own)
    # Where arithmetic is dear the union's wider pass is paid for.
    slow = Chip(4.8e12, 10e12)
    assert roofline_break_even(8, chip=slow, tree=True, **costs) > roofline_break_even(
        8, chip=slow, tree=False, **costs
    )
