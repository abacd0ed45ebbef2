import numpy as np
import pytest

from specjax import analysis


def test_overlap_is_one_minus_total_variation():
    p = np.array([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    q = np.array([[0.2, 0.3, 0.5], [0.0, 0.5, 0.5]])
    np.testing.assert_allclose(analysis.law_overlap(p, q), [0.7, 0.0])
    np.testing.assert_allclose(analysis.law_overlap(p, q), 1 - np.abs(p - q).sum(-1) / 2)


def test_alpha_is_the_mean_overlap():
    assert analysis.alpha([[0.7, 0.5], [0.3, 0.9]]) == pytest.approx(0.6)


def test_overlap_refuses_logits_and_mismatched_vocabularies():
    law = np.array([0.5, 0.5])
    with pytest.raises(ValueError, match="p has a row that is no law"):
        analysis.law_overlap([1.5, -0.5], law)
    with pytest.raises(ValueError, match=r"q has a row.*softmax"):
        analysis.law_overlap(law, [0.5, 0.6])
    with pytest.raises(ValueError, match=r"\(3,\)"):
        analysis.law_overlap(law, [0.2, 0.3, 0.5])
    with pytest.raises(ValueError, match="p has a row that is no law"):
        analysis.law_overlap([np.nan, 1.0], law)
    with pytest.raises(ValueError, match=r"1\.5"):
        analysis.alpha([0.5, 1.5])
    with pytest.raises(ValueError, match="no positions"):
        analysis.alpha([])


@pytest.mark.pitfall("vllm#16035")
def test_the_hand_made_histogram():
    accepted, gamma = [0, 2, 3], 3
    positions = analysis.acceptance_by_position(accepted, gamma)
    assert analysis.mean_acceptance_length(accepted) == pytest.approx(8 / 3)
    assert analysis.acceptance_rate(accepted, gamma) == pytest.approx(5 / 9)
    np.testing.assert_allclose(positions.conditional, [2 / 3, 1, 1 / 2])
    np.testing.assert_allclose(positions.unconditional, [2 / 3, 2 / 3, 1 / 3])
    from_histogram = analysis.acceptance_by_position_from_histogram([1, 0, 1, 1])
    for name in ("conditional", "unconditional", "accepted", "reached", "offered", "passes"):
        np.testing.assert_array_equal(getattr(from_histogram, name), getattr(positions, name))


def test_positions_of_drafts_of_unequal_length():
    positions = analysis.acceptance_by_position([1, 2, 0], gamma=[1, 3, 2])
    assert positions.offered.tolist() == [3, 2, 1]
    assert positions.reached.tolist() == [3, 1, 1]
    np.testing.assert_allclose(positions.conditional, [2 / 3, 1, 0])
    np.testing.assert_allclose(positions.unconditional, [2 / 3, 1 / 3, 0])
    assert positions.unconditional.sum() + 1 == pytest.approx(analysis.mean_acceptance_length([1, 2, 0]))


def test_a_position_that_no_pass_reached_is_nan_and_no_rate():
    positions = analysis.acceptance_by_position([0, 0], 2)
    assert positions.conditional[0] == 0 and np.isnan(positions.conditional[1])
    with pytest.raises(ValueError, match="position 2 is nan"):
        analysis.expected_tokens(positions.conditional, 2)


def test_counts_that_cannot_be():
    with pytest.raises(ValueError, match="pass 1 accepted 4 of 3"):
        analysis.acceptance_rate([1, 4], 3)
    with pytest.raises(ValueError, match="drafted nothing"):
        analysis.acceptance_rate([0, 0], 0)
    with pytest.raises(ValueError, match="at least one pass"):
        analysis.mean_acceptance_length([])
    with pytest.raises(ValueError, match="gamma has shape"):
        analysis.acceptance_by_position([1, 2], [3, 3, 3])
    with pytest.raises(ValueError, match="histogram"):
        analysis.acceptance_by_position_from_histogram([0, 0])


def test_tau_counts_the_bonus_and_nothing_after_the_end():
    # Three passes of gamma 3 keep 0, 2 and 3 drafted tokens; the last one's third is the end of the sequence,
    # so its bonus is never emitted.
    assert analysis.tau(new_tokens=1 + 3 + 3, passes=3) == pytest.approx(7 / 3)
    assert analysis.tau([4, 3], [2, 1]) == pytest.approx(7 / 3)
    assert analysis.block_efficiency([4, 3], [2, 1]) == pytest.approx(7 / 3)
    assert analysis.tau(new_tokens=5, passes=5) == 1  # plain decoding
    with pytest.raises(ValueError, match="at least one pass"):
        analysis.tau(0, 0)


def test_tau_probabilistic_multiplies_overlaps_along_the_draft():
    # 1 + .5 + .5*.5 and 1 + 1 + 0
    assert analysis.tau_probabilistic([[0.5, 0.5], [1.0, 0.0]]) == pytest.approx((1.75 + 2.0) / 2)


def test_costs_and_memory_bound_speedup():
    assert analysis.draft_cost(0.002, 0.010) == pytest.approx(0.2)
    assert analysis.mbsu(tau=2.3, size_ratio=0.0164, draft_passes=3) == pytest.approx(2.3 / 1.0492)
    with pytest.raises(ValueError, match="target pass 0"):
        analysis.draft_cost(0.002, 0)
    with pytest.raises(ValueError, match="size ratio -1"):
        analysis.mbsu(2.0, -1, 3)


def test_the_four_speedups_differ_as_their_definitions_do():
    method, baseline = [10.0, 40.0], [10.0, 10.0]
    assert analysis.speedup_mean_of_ratios(method, baseline) == pytest.approx(2.5)
    assert analysis.speedup_spec_bench(method, baseline) == pytest.approx(2.5)
    assert analysis.speedup_geometric(method, baseline) == pytest.approx(2.0)
    assert analysis.speedup_mean_of_ratios([20.0, 20.0], [10.0, 40.0]) == pytest.approx(1.25)
    assert analysis.speedup_spec_bench([20.0, 20.0], [10.0, 40.0]) == pytest.approx(0.8)
    # 100 tokens in 5 + 5 s against 100 tokens in 10 + 20 s.
    assert analysis.speedup_pooled([50, 50], [5, 5], [50, 50], [10, 20]) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="the same prompts"):
        analysis.speedup_spec_bench([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="<= 0"):
        analysis.speedup_geometric([0.0], [1.0])


def test_distinct_bigrams_see_a_loop():
    assert analysis.distinct_bigram_ratio([1, 2, 1, 2, 1]) == pytest.approx(2 / 4)
    assert analysis.distinct_bigram_ratio([1, 2, 3, 4]) == 1.0
    assert analysis.distinct_bigram_ratio([7] * 101) == pytest.approx(1 / 100)
    assert analysis.distinct_bigram_ratio([7]) == 1.0
    with pytest.raises(ValueError, match="one sequence"):
        analysis.distinct_bigram_ratio([[1, 2]])


def test_entropy_in_nats():
    np.testing.assert_allclose(analysis.entropy([[0.5, 0.5], [1.0, 0.0]]), [np.log(2), 0.0])
    assert analysis.mean_target_entropy([[0.25] * 4, [1.0, 0, 0, 0]]) == pytest.approx(np.log(4) / 2)


def test_bootstrap_is_seeded_and_covers():
    rng = np.random.default_rng(0)
    intervals = [analysis.bootstrap_interval(rng.normal(3, 1, 40), seed=s, resamples=300) for s in range(200)]
    covered = np.mean([i.low <= 3 <= i.high for i in intervals])
    assert 0.88 <= covered <= 0.98  # nominal 0.95; 200 repetitions have a standard error of 0.015
    rows = rng.normal(size=30)
    same = [analysis.bootstrap_interval(rows, seed=5, resamples=100) for _ in range(2)]
    assert same[0] == same[1] != analysis.bootstrap_interval(rows, seed=6, resamples=100)
    assert same[0].estimate == pytest.approx(rows.mean())


def test_bootstrap_of_a_ratio_keeps_columns_together():
    tokens_passes = np.array([[10, 5], [20, 10], [40, 20]])
    interval = analysis.bootstrap_interval(
        tokens_passes, lambda rows: analysis.tau(rows[:, 0], rows[:, 1]), seed=0, resamples=50
    )
    assert (interval.estimate, interval.low, interval.high) == (2.0, 2.0, 2.0)


def test_bootstrap_of_one_prompt_has_no_interval():
    interval = analysis.bootstrap_interval([2.5], seed=0)
    assert interval.estimate == 2.5 and np.isnan(interval.low) and np.isnan(interval.high)
    with pytest.raises(ValueError, match="no prompts"):
        analysis.bootstrap_interval([], seed=0)
    with pytest.raises(ValueError, match=r"confidence 1\.5"):
        analysis.bootstrap_interval([1.0, 2.0], seed=0, confidence=1.5)
