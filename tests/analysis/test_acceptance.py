from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from specjax import analysis
from specjax.analysis import acceptance


def test_acceptance_of_a_chain_from_counts() -> None:
    # Four passes keep 0, 2, 3 and 0 tokens; the last had no draft.
    rates = acceptance.chain_acceptance([2, 0, 1, 1], [2.0, 2.0, 1.0])
    np.testing.assert_allclose(rates[:, 0], [2 / 4, 1.0, 1 / 2])
    assert analysis.expected_tokens(rates[:, 0], 3) == pytest.approx(1 + (0 + 2 + 3 + 0) / 4)
    assert acceptance.chain_acceptance([3, 1, 0, 0], [1.0, 0.0, 0.0]).shape == (2, 1), "nothing came to the third"
    with pytest.raises(ValueError, match="3 counts for 3 depths"):
        acceptance.chain_acceptance([1, 1, 1], [1, 1, 1])


def test_acceptance_by_rank_of_chosen_candidates() -> None:
    p = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    np.testing.assert_allclose(acceptance.rank_acceptance_chosen(p, [[0, 1], [3, 0]]), [0.45, 0.2])
    with pytest.raises(ValueError, match="a candidate twice"):
        acceptance.rank_acceptance_chosen(p, [[0, 0], [3, 0]])
    with pytest.raises(ValueError, match=r"0\.\.4; expected 0\.\.3"):
        acceptance.rank_acceptance_chosen(p, [[0, 4], [3, 0]])


def test_acceptance_by_rank_of_drawn_children_is_what_enumeration_finds() -> None:
    p, q = (Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)), (Fraction(1, 6), Fraction(1, 2), Fraction(1, 3))
    draws = analysis.sampled_draws(lambda context: q, analysis.branching_parents((2,)), "without_replacement")
    both = analysis.enumerate_step(analysis.REFERENCE_RULES["recursive"], lambda context: p, draws)
    laws = [np.tile(np.array(law, np.float64), (20_000, 1)) for law in (p, q)]
    rates = acceptance.rank_acceptance_drawn(*laws, 3, seed=0)
    assert rates[0] == pytest.approx(float(sum(map(min, p, q))), abs=0.01)
    assert rates[:2].sum() == pytest.approx(float(both.expected_accepted), abs=0.01)
    assert rates.sum() == pytest.approx(1.0), "three children cover the vocabulary"
