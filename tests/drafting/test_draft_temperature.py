"""A draft at a temperature of its own: acceptance is that of the tempered law, and the output law stays."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.decoding import Request
from specjax.drafting import DraftModel
from specjax.testing import Subject, contract
from specjax.testing.markov import markov_config, markov_graph, markov_params, random_law
from specjax.verification import Recursive

FACTOR = 2.0


def test_the_tempered_law_is_drawn_from_recorded_and_corrected() -> None:
    law = random_law(4, 0)
    params = markov_params(law)
    drafter = DraftModel(markov_config(4), num_nodes=2, temperature=FACTOR)
    loop, weights = Subject(markov_graph(4), params, drafter, params, {}).loop(Recursive)
    done = contract.complete(loop, weights, [Request((0, 1), 2, temperature=1.0, id=i) for i in range(8)])
    tempered = law ** (1 / FACTOR) / (law ** (1 / FACTOR)).sum(-1, keepdims=True)
    overlap = np.minimum(law, tempered).sum(-1)
    assert overlap.max() < 0.999, "at factor 1 the draft is the target, and every overlap is 1"
    for completion in done:
        np.testing.assert_allclose(completion.overlap[0], overlap[completion.tokens[0]], rtol=1e-4)
    assert contract.law_p_value(drafter, params, {}, Recursive, draws=1 << 14) > 1e-6


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_no_temperature(factor: float) -> None:
    with pytest.raises(ValueError, match="of a draft model; expected a factor above 0"):
        DraftModel(markov_config(4), temperature=factor)
