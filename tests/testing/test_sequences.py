"""The exact law that sequences are held against, and that a loop without a fault keeps it."""

import dataclasses

import numpy as np
import pytest

from specjax.decoding import Loop, Request, Weights
from specjax.drafting import Autoregressive, PromptLookup
from specjax.evaluation.certify import Claim, continuations
from specjax.evaluation.next_law import next_law
from specjax.evaluation.teacher import Teacher
from specjax.testing import markov, sequences
from specjax.verification import OneHot, Recursive

LAW = markov.random_law(4, 0)


@pytest.fixture(scope="module")
def target():
    return sequences.four_token_target(layers=1)


def markov_teacher():
    return Teacher(markov.markov_graph(4), markov.markov_params(LAW), precision="float32")


def test_the_law_of_sequences_is_the_tables():
    request = Request((2, 1), 4, temperature=1.0)
    found = sequences.sequence_law(markov_teacher(), request, (2, 1))
    np.testing.assert_allclose(found, markov.sequence_law(LAW, 1, 3), rtol=1e-5)


def test_the_law_is_penalised_by_definition_and_warped():
    request = Request((2, 1), 4, temperature=0.5, frequency_penalty=0.7, presence_penalty=0.3, suppress_tokens=(3,))
    weight = LAW[0].copy()
    weight[0] *= np.exp(-2 * 0.7 - 0.3)  # emitted twice; the prompt does not count
    weight[3] = 0
    np.testing.assert_allclose(
        next_law(markov_teacher(), request, (2, 1, 0, 0)), weight**2 / (weight**2).sum(), rtol=1e-5
    )


def test_continuations_share_their_context_and_nothing_else(target):
    loop = Loop(target.graph, PromptLookup(3), OneHot(3), (), chunk=32)
    request = Request(sequences.PROMPT, 1, temperature=1.0)
    found = continuations(target, loop, Weights(target.params, {}, {}), request, tokens=3, draws=40, rows=32, buffer=32)
    assert found.context[:-1] == sequences.PROMPT and found.tokens.shape == (64, 3)
    assert found.accepted > 0
    assert len(np.unique(found.tokens, axis=0)) > 5
    # Row i is request i under the seed, whatever runs beside it: by the one-hot rule it equals plain decoding.
    plain = Loop(target.graph, Autoregressive(), OneHot(0), (), chunk=32)
    again = continuations(
        target, plain, Weights(target.params, {}, {}), request, tokens=3, draws=16, rows=16, buffer=32
    )
    np.testing.assert_array_equal(found.tokens[:16], again.tokens)


def test_bad_sizes_are_refused(target):
    loop = Loop(target.graph, Autoregressive(), OneHot(0), ())
    with pytest.raises(ValueError, match="draws=0 and rows=4; expected both at least 1"):
        continuations(target, loop, Weights(target.params, {}, {}), Request((1,), 1), tokens=1, draws=0, rows=4)


def test_too_few_draws_prove_nothing(target):
    loop = Loop(target.graph, PromptLookup(3), Recursive(3), ())
    weights = Weights(target.params, {}, {})
    with pytest.raises(ValueError, match=r"prompt_lookup with recursive: 8192 draws .* draw \d+ or more"):
        sequences.certify_sequences(
            Claim("prompt_lookup", "recursive"),
            target,
            loop,
            weights,
            sampling={"temperature": 1.0},
            draws=1 << 13,
            tv=0.01,
        )


def test_a_drafter_without_a_fault_passes(target):
    loop = Loop(target.graph, PromptLookup(3), Recursive(3), ())
    weights = Weights(target.params, {}, {})
    claim = Claim("prompt_lookup", "recursive")
    row = sequences.certify_sequences(
        claim, target, loop, weights, sampling={"temperature": 1.0}, draws=1 << 14, tv=0.06, rows=1 << 13
    )
    assert (row.verdict, row.check, row.draws, row.tv) == ("pass", "sequences", 1 << 14, 0.06)
    assert row.accepted > 0.1 and row.power > 0.99 and row.cells <= 64
    assert row.sampling == {"temperature": 1.0}
    lossy = dataclasses.replace(claim, lossless=False)
    again = sequences.certify_sequences(
        lossy, target, loop, weights, sampling={"temperature": 1.0}, draws=1 << 14, tv=0.06, rows=1 << 13
    )
    assert (again.verdict, again.p_value) == ("lossy", row.p_value)
