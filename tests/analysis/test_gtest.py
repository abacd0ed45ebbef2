import numpy as np
import pytest
from scipy import stats

from specjax import analysis
from tests.analysis.tables import random_table, top_k


def dirichlet(cells, seed, concentration=5.0):
    return np.random.default_rng(seed).dirichlet([concentration] * cells)


def test_statistic_by_hand():
    counts, law = np.array([60, 30, 10]), np.array([0.5, 0.3, 0.2])
    test = analysis.g_test(counts, law, min_expected=5)
    by_hand = 2 * (60 * np.log(60 / 50) + 30 * np.log(30 / 30) + 10 * np.log(10 / 20))
    assert test.statistic == pytest.approx(by_hand)
    assert (test.dof, test.draws, test.cells, test.pooled_mass) == (2, 100, 3, 0.0)
    assert test.p_value == pytest.approx(np.exp(-by_hand / 2))  # chi-square with two degrees of freedom
    reference = stats.power_divergence(counts, law * 100, lambda_="log-likelihood")
    assert (test.statistic, test.p_value) == pytest.approx(tuple(reference))


def test_two_sample_statistic_is_scipys():
    a, b = np.array([50, 30, 20]), np.array([70, 90, 40])
    test = analysis.g_test_two_sample(a, b)
    reference = stats.chi2_contingency(np.stack([a, b]), lambda_="log-likelihood", correction=False)
    assert (test.statistic, test.p_value, test.dof) == pytest.approx(tuple(reference)[:3])


def test_p_values_are_uniform_under_the_law():
    law, rng = dirichlet(64, seed=0), np.random.default_rng(1)
    samples = rng.multinomial(20_000, law, size=2000)
    p_values = [analysis.g_test(counts, law).p_value for counts in samples]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    halves = zip(samples[::2], samples[1::2], strict=True)
    p_values = [analysis.g_test_two_sample(a, b).p_value for a, b in halves]
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def test_small_cells_do_not_raise_false_alarms():
    """Pooled, a law with many rare outcomes is rejected at 1e-3 about as often as that says."""
    law = np.append(np.full(200, 1e-4), dirichlet(20, seed=2) * 0.98)
    samples = np.random.default_rng(3).multinomial(20_000, law, size=5_000)
    alarms = sum(analysis.g_test(counts, law, false_alarm=1e-3).rejected for counts in samples)
    assert alarms <= 17  # 5 expected; beyond 17 has a chance of about 1e-5


def worst_case(law, tv):
    """A law at total variation tv, hard to tell: the mass moved lies between two halves of about 1/2 each."""
    half = np.cumsum(law) <= 0.5
    return np.where(half, law * (1 + tv / law[half].sum()), law * (1 - tv / law[~half].sum()))


def test_stated_power_is_reached_by_the_hardest_alternative():
    law, tv, repeats = dirichlet(16, seed=4), 0.05, 800
    other = worst_case(law, tv)
    assert np.abs(other - law).sum() / 2 == pytest.approx(tv)
    for draws in (3000, 6000, 12000):
        tests = [
            analysis.g_test(counts, law, tv=tv)
            for counts in np.random.default_rng(draws).multinomial(draws, other, size=repeats)
        ]
        caught = np.mean([t.rejected for t in tests])
        assert tests[0].power == pytest.approx(caught, abs=0.05)


def test_power_is_a_lower_bound_over_alternatives():
    law, rng = dirichlet(16, seed=5), np.random.default_rng(6)
    for _ in range(5):
        move = rng.normal(size=16)
        move -= move.mean()
        other = law + move * 0.05 / np.abs(move).sum() * 2
        if (other < 0).any():
            continue
        caught = np.mean([analysis.g_test(c, law, tv=0.05).rejected for c in rng.multinomial(8000, other, size=500)])
        assert caught >= analysis.g_test_power(8000, 16, tv=0.05) - 0.05


def test_required_draws():
    for cells in (2, 16, 64):
        draws = analysis.required_draws(cells)
        assert analysis.g_test_power(draws, cells) >= 0.99 > analysis.g_test_power(draws - 1, cells)
    # What the project promises: a million draws over at most 64 cells is enough.
    assert analysis.required_draws(64) < 1_000_000
    assert analysis.g_test_power(1_000_000, 64) > 0.9999
    assert analysis.required_draws(64, tv=0.005) > 1_000_000


def test_two_samples_need_twice_the_draws():
    law, draws = dirichlet(16, seed=7), analysis.required_draws(16)
    rng = np.random.default_rng(8)
    a, b = rng.multinomial(2 * draws, law), rng.multinomial(2 * draws, law)
    assert analysis.g_test_two_sample(a, b).power == pytest.approx(0.99, abs=1e-3)
    assert analysis.g_test_two_sample(a, b).power < analysis.g_test(a, law).power


def test_an_impossible_outcome_is_rejected_outright():
    test = analysis.g_test([500, 499, 1], [0.5, 0.5, 0.0])
    assert test.statistic == np.inf and test.p_value == 0 and test.rejected
    assert not analysis.g_test([500, 500, 0], [0.5, 0.5, 0.0]).rejected


def test_pooling_costs_the_power_that_it_hides():
    law = np.append(np.full(100, 2e-4), [0.49, 0.49])
    counts = np.random.default_rng(9).multinomial(20_000, law)
    test = analysis.g_test(counts, law)
    assert test.cells == 3 and test.pooled_mass == pytest.approx(0.02)
    assert test.power < 2e-6  # a deviation of 0.01 could hide inside the pool
    deeper = analysis.g_test(np.random.default_rng(9).multinomial(2_000_000, law), law)
    assert deeper.cells == 102 and deeper.power > 0.99


def test_a_tiny_pool_joins_the_smallest_large_cell():
    law = np.array([1e-7, 2e-7, 0.3, 0.6999997])
    test = analysis.g_test([0, 1, 3000, 6999], law)
    assert test.cells == 2 and test.pooled_mass == pytest.approx(0.3, abs=1e-4)


def simulate_chain(target, scored, drawn, draws, rng):
    """A million vectorised draws of two tokens by token-by-token verification with gamma 1."""
    p, q, draw_q = (np.array([float(x) for x in law]) for law in (target(()), scored(()), drawn(())))
    vocab = p.size
    rows = np.array([[float(x) for x in target((t,))] for t in range(vocab)])
    token = rng.choice(vocab, size=draws, p=draw_q)
    with np.errstate(divide="ignore", invalid="ignore"):
        accept = rng.random(draws) < p[token] / q[token]
    residual = np.maximum(p - q, 0)
    replaced = rng.choice(vocab, size=draws, p=residual / residual.sum())
    first = np.where(accept, token, replaced)
    # The bonus after an accepted token, and the target's own next token after a replaced one: the same law.
    second = (rng.random(draws)[:, None] > rows.cumsum(1)[first]).sum(1)
    return np.stack([first, second], axis=1)


@pytest.mark.parametrize("planted", [False, True])
def test_a_million_draws_pass_where_lossless_and_catch_a_wrong_q(planted):
    target = random_table("target0", 3, positive=True, sharpness=2)
    draft = random_table("draft0", 3, positive=True, sharpness=2)
    warped = lambda context: top_k(draft(context), 2)  # noqa: E731
    scored = draft if planted else warped
    samples = simulate_chain(target, scored, warped, 1_000_000, np.random.default_rng(10))
    law = analysis.law_vector(analysis.target_law(target, 2), 3, 2)
    test = analysis.g_test(analysis.sequence_counts(samples, 3), law)
    assert test.rejected == planted
    assert test.power > 0.99


def test_top_with_rest():
    np.testing.assert_allclose(analysis.top_with_rest([0.1, 0.5, 0.2, 0.2], [1, 3]), [0.5, 0.2, 0.3])
    assert analysis.top_with_rest(np.array([1, 5, 2, 2]), [1, 3]).tolist() == [5, 2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: analysis.g_test([1, 2], [0.5, 0.6]), r"law sums to 1\.1"),
        (lambda: analysis.g_test([1, 2], [1.0]), "the same outcomes"),
        (lambda: analysis.g_test([1, -2], [0.5, 0.5]), "ints >= 0"),
        (lambda: analysis.g_test([1.0, 2.0], [0.5, 0.5]), "float64"),
        (lambda: analysis.g_test([0, 0], [0.5, 0.5]), "no draws"),
        (lambda: analysis.g_test([3, 2], [0.5, 0.5]), "leave one cell"),
        (lambda: analysis.g_test([300, 0], [1.0, 0.0]), "leave one cell"),
        (lambda: analysis.g_test_two_sample([3, 2], [3, 2, 1]), "the same outcomes"),
        (lambda: analysis.g_test_power(100, 1), "cells 1"),
        (lambda: analysis.required_draws(10, power=1.0), r"power 1\.0"),
        (lambda: analysis.sequence_counts([[0, 3]], 3), r"\[0, 3\]"),
        (lambda: analysis.sequence_counts([0, 1], 3), r"\(2,\)"),
    ],
)
def test_bad_input_gets_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
