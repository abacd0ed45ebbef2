from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Request
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import Target, merge

PROMPT = (5, 9, 5, 9, 7)


@pytest.fixture(scope="module")
def teacher(target: Target) -> Teacher:
    return Teacher(target.graph, target.params, precision="float32", chunk=64)


def laws(target: Target, text: list[int]) -> np.ndarray:
    """Logits of every position, from the network that has no cache."""
    tokens = jnp.asarray([text])
    out = merge(target.graph, target.params).full(
        tokens, jnp.arange(len(text))[None], jnp.zeros_like(tokens), taps=("normed",)
    )
    return np.asarray(merge(target.graph, target.params).logits(out.taps["normed"])[0])


@pytest.mark.parametrize("emitted", [3, 90])
def test_logits_and_entropy_are_those_of_the_network(teacher: Teacher, target: Target, emitted: int) -> None:
    tokens = tuple(int(t) for t in np.random.default_rng(0).integers(3, 250, emitted))
    expected = laws(target, [*PROMPT, *tokens])
    for position in (0, emitted - 1):
        found = teacher.logits(PROMPT, tokens, position)
        np.testing.assert_allclose(found, expected[len(PROMPT) - 1 + position], atol=2e-4, rtol=1e-4)
    law = np.asarray(jax.nn.log_softmax(expected[len(PROMPT) - 1 : -1]))
    assert teacher.entropy(PROMPT, tokens) == pytest.approx(-(np.exp(law) * law).sum(-1).mean(), rel=1e-4)
    assert teacher.top1(PROMPT, tokens) == pytest.approx(np.exp(law).max(-1).mean(), rel=1e-4)


def test_greedy_tokens_are_the_best(teacher: Teacher, trio: list[LoopContender]) -> None:
    trio[0].prepare(Request(PROMPT, 12), 128)
    tokens = trio[0].complete(Request(PROMPT, 12)).completion.tokens
    assert [int(np.argmax(teacher.logits(PROMPT, tokens, i))) for i in range(12)] == list(tokens)


def test_a_divergence_is_a_near_tie_only_within_the_bound(teacher: Teacher, trio: list[LoopContender]) -> None:
    trio[0].prepare(Request(PROMPT, 6), 128)
    tokens = list(trio[0].complete(Request(PROMPT, 6)).completion.tokens)
    logits = np.sort(teacher.logits(PROMPT, tokens, 2))
    gap = float(logits[-1] - logits[-2])
    second = int(np.argsort(teacher.logits(PROMPT, tokens, 2))[-2])
    other = [*tokens[:2], second, 8, 8, 8]
    same = teacher.compare([PROMPT], [tokens], [tokens], 0.0)
    assert same.equal == 1 and same.matches
    strict = teacher.compare([PROMPT], [tokens], [other], gap / 2)
    assert not strict.matches and strict.different[0].position == 2
    assert strict.different[0].gap == pytest.approx(gap, rel=1e-3)
    loose = teacher.compare([PROMPT], [tokens], [other], gap * 2)
    assert loose.matches and len(loose.near_ties) == 1


def test_bounds_by_precision() -> None:
    assert rounding_bound("float32", "float32") == 1e-3
    assert rounding_bound("bfloat16", "float32") > rounding_bound("float32", "float32")
    assert rounding_bound("float32", "float32", 0.25) == 0.25
    with pytest.raises(ValueError, match="near_tie_bound=-1; expected a gap of two logits"):
        rounding_bound("float32", "float32", -1)
