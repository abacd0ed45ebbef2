"""Jacobi decoding: the contract, and its trajectory on a target whose next token is a table's."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.decoding import Request, prefill
from specjax.drafting.jacobi import Jacobi
from specjax.testing import contract
from specjax.testing.markov import markov_graph, markov_params
from specjax.verification import Greedy, Recursive
from tests.drafting import common

NEXT = [1, 2, 2, 0]  # 0 1 2 2 2 ...


def test_trajectory_by_hand():
    law = np.full((4, 4), 1e-4)
    law[np.arange(4), NEXT] = 1.0
    sub = contract.Subject(markov_graph(4), markov_params(law / law.sum(1, keepdims=True)), Jacobi(3), {}, {})
    loop, weights = sub.loop(Greedy)
    state = prefill(loop, weights, [Request((1, 3), 9)], context=64, seed=0)
    assert int(state.tokens[0, 2]) == 0
    # The block repeats the root: 0 0 0 is refused, and the target says 1 behind each of root and block.
    state = loop.step(weights, state)
    assert int(state.length[0]) == 4 and np.asarray(state.drafter.block[0]).tolist() == [1, 1, 1]
    # Behind the root 1 the block 1 1 1 is refused; the target says 2 everywhere.
    state = loop.step(weights, state)
    assert int(state.length[0]) == 5 and np.asarray(state.drafter.block[0]).tolist() == [2, 2, 2]
    # 2 2 2 is the fixed point: the whole block and one more token.
    state = loop.step(weights, state)
    assert int(state.length[0]) == 9 and np.asarray(state.drafter.block[0]).tolist() == [2, 2, 2]
    assert np.asarray(state.tokens[0, :9]).tolist() == [1, 3, 0, 1, 2, 2, 2, 2, 2]


def test_contract():
    contract.check_drafter(common.subject(Jacobi(4), layers=1), Recursive)


@pytest.mark.slow
def test_law():
    sub = common.subject(Jacobi(2), layers=1, vocab=4)
    assert common.law_p_value(sub, Recursive, prompt=(0, 1, 3)) > common.FALSE_ALARM


def test_a_block_without_tokens():
    with pytest.raises(ValueError, match="num_nodes=0; a Jacobi block holds at least 1 token"):
        Jacobi(0)
