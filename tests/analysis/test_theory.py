from fractions import Fraction

import numpy as np
import pytest

from specjax import analysis

# Leviathan et al. 2023, table 4: gamma, alpha, c, the expected improvement as printed, and recomputed.
LEVIATHAN = [
    (7, 0.75, 0.02, 3.2, 3.16),
    (7, 0.80, 0.04, 3.3, 3.25),
    (7, 0.82, 0.11, 2.5, 2.50),
    (7, 0.62, 0.02, 2.3, 2.26),
    (5, 0.68, 0.04, 2.4, 2.35),
    (3, 0.71, 0.11, 2.0, 1.93),
    (5, 0.65, 0.02, 2.4, 2.40),
    (5, 0.73, 0.04, 2.6, 2.62),
    (3, 0.74, 0.11, 2.0, 2.02),
    (5, 0.53, 0.02, 1.9, 1.89),
    (3, 0.55, 0.04, 1.8, 1.80),
    (3, 0.56, 0.11, 1.6, 1.54),
]


@pytest.mark.parametrize(("gamma", "alpha", "c", "printed", "recomputed"), LEVIATHAN)
def test_leviathans_twelve_expected_improvements(gamma, alpha, c, printed, recomputed):
    expected = analysis.walltime_improvement(alpha, gamma, c)
    assert expected == pytest.approx(printed, abs=0.1)
    assert expected == pytest.approx(recomputed, abs=0.005)


def test_expected_tokens():
    assert analysis.expected_tokens(0.8, 5) == pytest.approx(3.68928)
    assert analysis.expected_tokens(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert analysis.expected_tokens(1.0, 5) == 6
    assert analysis.expected_tokens(0.0, 5) == 1
    assert analysis.expected_tokens(0.7, 0) == 1


def test_the_rate_behind_published_tokens():
    for alpha, gamma in ((0.8, 5), (0.3, 1), (0.95, 8)):
        assert analysis.rate_for_tokens(analysis.expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-8)
    # Gloeckle et al. 2024, table S2, code, two heads: a pass verifies one drafted token.
    assert analysis.rate_for_tokens(1.94, 1) == pytest.approx(0.94, abs=1e-8)
    assert analysis.rate_for_tokens(1, 4) == pytest.approx(0, abs=1e-8)
    assert analysis.rate_for_tokens(5, 4) == pytest.approx(1, abs=1e-8)
    for tokens, gamma in ((5.1, 4), (0.9, 4), (1.0, 0), (float("nan"), 4)):
        with pytest.raises(ValueError, match=f"tokens {tokens}, gamma {gamma}: expected gamma >= 1 and 1 to gamma"):
            analysis.rate_for_tokens(tokens, gamma)


def test_expected_tokens_from_measured_positions_is_the_measured_tau():
    accepted = np.random.default_rng(0).integers(0, 5, 200)
    conditional = analysis.acceptance_by_position(accepted, 4).conditional
    assert analysis.expected_tokens(conditional, 4) == pytest.approx(analysis.mean_acceptance_length(accepted))


def test_operations():
    alpha, gamma, c_hat = 0.8, 5, 0.05
    closed = (1 - alpha) * (gamma * c_hat + gamma + 1) / (1 - alpha ** (gamma + 1))
    assert analysis.operations_factor(alpha, gamma, c_hat) == pytest.approx(closed)


def test_improvement_is_possible_exactly_where_alpha_exceeds_c():
    for alpha in np.linspace(0, 0.95, 20):
        for c in np.linspace(0, 0.95, 20):
            best = max(analysis.walltime_improvement(alpha, gamma, c) for gamma in range(1, 30))
            assert analysis.improvement_possible(alpha, c) == (best > 1 + 1e-12)
            if alpha > c:
                assert best >= (1 + alpha) / (1 + c) - 1e-12


def test_predicted_speedup_charges_the_passes_it_is_told():
    expected = analysis.expected_tokens(0.8, 4)
    plain = analysis.speedup_predicted(0.8, 4, draft_passes=4, c=0.1, t_ratio=1.25)
    extra = analysis.speedup_predicted(0.8, 4, draft_passes=5, c=0.1, t_ratio=1.25)
    assert plain == pytest.approx(expected / (4 * 0.1 + 1.25))
    assert extra == pytest.approx(expected / (5 * 0.1 + 1.25))
    assert analysis.speedup_predicted(0.8, 4, draft_passes=0, c=0.1, t_ratio=1.25) == pytest.approx(expected / 1.25)


def test_break_even_cost_gives_the_speedup_it_was_asked_for():
    single = analysis.speedup_predicted(0.6, 4, draft_passes=4, c=0.05, t_ratio=1.2)
    c = analysis.break_even_draft_cost(0.75, 4, draft_passes=4, t_ratio=1.2, speedup=single)
    assert c > 0.05
    assert analysis.speedup_predicted(0.75, 4, draft_passes=4, c=c, t_ratio=1.2) == pytest.approx(single)
    assert analysis.break_even_draft_cost(0.1, 4, draft_passes=4, t_ratio=3.0) < 0


def test_optimal_gamma():
    best = analysis.optimal_gamma(0.8, c=0.05, max_gamma=20)
    sweep = [analysis.walltime_improvement(0.8, gamma, 0.05) for gamma in range(21)]
    assert best.gamma == int(np.argmax(sweep)) == 8
    assert best.speedup == pytest.approx(max(sweep))
    assert analysis.optimal_gamma(0.3, c=0.5) == analysis.GammaChoice(0, 1.0)
    # A target pass that grows with its width shortens the draft.
    wide = analysis.optimal_gamma(0.8, c=0.05, t_ratio=lambda gamma: 1 + 0.1 * gamma, max_gamma=20)
    assert 0 < wide.gamma < best.gamma
    # Free drafts that are never accepted gain nothing: among equals the shortest.
    assert analysis.optimal_gamma(0.0, c=0.0).gamma == 0
    # Free drafts that are always accepted: as long as allowed.
    assert analysis.optimal_gamma(1.0, c=0.0, max_gamma=7).gamma == 7


def test_tree_length():
    # Two children of the root (0.6, 0.2); two below the first (0.5, 0.3); one below the second (0.4).
    assert analysis.expected_tree_tokens([-1, -1, 0, 0, 1], [0.6, 0.2, 0.5, 0.3, 0.4]) == pytest.approx(
        1 + 0.6 + 0.2 + 0.3 + 0.18 + 0.08
    )
    chain = analysis.chain_parents(5)
    assert analysis.expected_tree_tokens(chain, [0.8] * 5) == pytest.approx(analysis.expected_tokens(0.8, 5))
    assert analysis.node_acceptance_by_rank([-1, -1, 0, 0, 1], [0.6, 0.2]) == [0.6, 0.2, 0.6, 0.2, 0.6]


def test_tree_length_is_what_enumeration_finds():
    """iid children of a constant target: acceptance by rank is the same at every node."""
    p, q = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)), (Fraction(1, 6), Fraction(1, 2), Fraction(1, 3))
    first = sum(map(min, p, q))
    second = (1 - first) * sum(map(min, analysis.residual(p, q), q))
    parents = analysis.branching_parents((2, 2))
    draws = analysis.sampled_draws(lambda context: q, parents)
    step = analysis.enumerate_step(analysis.REFERENCE_RULES["recursive"], lambda context: p, draws)
    rates = analysis.node_acceptance_by_rank(parents, [float(first), float(second)])
    assert analysis.expected_tree_tokens(parents, rates) == pytest.approx(1 + float(step.expected_accepted))


P, Q = ("1/3", "2/3"), ("2/3", "1/3")


@pytest.mark.parametrize(
    ("gamma", "token", "block", "ideal"),
    [
        (1, "2/3", "2/3", "2/3"),
        (2, "10/9", "11/9", "12/9"),
        (3, "38/27", "5/3", "50/27"),
        (4, "130/81", "166/81", "64/27"),
    ],
)
def test_block_verification_toy(gamma, token, block, ideal):
    assert analysis.token_expected_accepted(P, Q, gamma) == Fraction(token)
    assert analysis.block_expected_accepted(P, Q, gamma) == Fraction(block)
    assert analysis.ideal_expected_accepted(P, Q, gamma) == Fraction(ideal)
    assert analysis.block_gain(P, Q, gamma) == (1 + Fraction(block)) / (1 + Fraction(token))


def test_block_lies_between_token_and_ideal():
    rng = np.random.default_rng(0)
    strict = 0
    for _ in range(30):
        p, q = ([Fraction(int(w), int(ws.sum())) for w in ws] for ws in rng.integers(1, 9, (2, 3)))
        token, block, ideal = (
            f(p, q, 3)
            for f in (
                analysis.token_expected_accepted,
                analysis.block_expected_accepted,
                analysis.ideal_expected_accepted,
            )
        )
        assert token <= block <= ideal
        strict += token < block < ideal
    assert strict > 10


def test_roofline_has_two_regimes():
    chip = analysis.Chip(bandwidth=1e12, flops=1e14)
    model = analysis.PassCost(weight_bytes=2e9, flops_per_token=2e9, kv_bytes_per_row=1e6)
    assert analysis.roofline_seconds(model, chip, batch=1) == pytest.approx((2e9 + 1e6) / 1e12)
    assert analysis.roofline_seconds(model, chip, batch=1000) == pytest.approx(1000 * 2e9 / 1e14)
    assert analysis.roofline_seconds(model, chip, batch=10, tokens=100) == pytest.approx(1000 * 2e9 / 1e14)


def test_ensemble_break_even():
    one = analysis.speedup_predicted(0.7, 4, draft_passes=4, c=0.05, t_ratio=1.1)
    for members in range(1, 5):
        rise = analysis.ensemble_break_even(members, 0.05, 1.1, alpha=0.7, gamma=4)
        again = analysis.speedup_predicted(0.7 + rise, 4, draft_passes=4 * members, c=0.05, t_ratio=1.1)
        assert abs(again - one) < 1e-6 and (rise > 0) == (members > 1)
    # By hand at gamma = 1: (1 + a + d) / (2 c + t) = (1 + a) / (c + t).
    assert abs(analysis.ensemble_break_even(2, 0.1, 1.0, alpha=0.5, gamma=1) - (1.5 * 1.2 / 1.1 - 1.5)) < 1e-6
    assert analysis.ensemble_break_even(8, 0.2, 1.0, alpha=0.9, gamma=4) == float("inf")
    # A union of two chains is also wider to verify.
    wider = analysis.ensemble_break_even(2, 0.05, 1.1, alpha=0.7, gamma=4, ensemble_t_ratio=1.3)
    assert wider > analysis.ensemble_break_even(2, 0.05, 1.1, alpha=0.7, gamma=4)
    with pytest.raises(ValueError, match="members 0"):
        analysis.ensemble_break_even(0, 0.1, 1.0, alpha=0.5, gamma=1)


def test_batch_break_even():
    chip = analysis.Chip(bandwidth=1e12, flops=1e14)
    target = analysis.PassCost(weight_bytes=14e9, flops_per_token=14e9)
    draft = analysis.PassCost(weight_bytes=0.5e9, flops_per_token=0.5e9)
    kw = dict(draft_passes=4, target=target, draft=draft, chip=chip)
    at_one = analysis.batch_speedup(0.8, 4, batch=1, **kw)
    assert at_one == pytest.approx(analysis.walltime_improvement(0.8, 4, 0.5 / 14))
    limit = analysis.batch_break_even(0.8, 4, **kw)
    # Weights stop being the bottleneck of the five-token pass at batch 20, of the one-token pass at 100.
    assert 20 < limit < 100
    assert (
        analysis.batch_speedup(0.8, 4, batch=limit, **kw) > 1 >= analysis.batch_speedup(0.8, 4, batch=limit + 1, **kw)
    )
    assert analysis.batch_break_even(0.0, 4, **kw) == 0
    assert analysis.batch_break_even(0.8, 4, max_batch=8, **kw) == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: analysis.expected_tokens(1.2, 3), r"position 1 is 1\.2"),
        (lambda: analysis.expected_tokens(0.5, -1), "gamma is -1"),
        (lambda: analysis.expected_tokens([0.5, 0.5], 3), "each of 3 positions"),
        (lambda: analysis.speedup_predicted(0.5, 3, draft_passes=3, c=0.1, t_ratio=0), "t_ratio 0"),
        (lambda: analysis.expected_tree_tokens([-1, 2, 0], [0.1] * 3), "node 1 has parent 2"),
        (lambda: analysis.expected_tree_tokens([-1, -1], [0.6, 0.6]), "children of node -1"),
        (lambda: analysis.expected_tree_tokens([-1], [0.6, 0.6]), "1 parents and 2 rates"),
        (lambda: analysis.node_acceptance_by_rank([-1, -1], [0.6]), "1 ranks"),
        (lambda: analysis.block_expected_accepted([0.3, 0.6], Q, 2), "sum to exactly 1"),
        (lambda: analysis.block_expected_accepted(("1/2", "1/4", "1/4"), Q, 2), "3 tokens and q 2"),
    ],
)
def test_bad_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
