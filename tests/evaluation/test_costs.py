from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Request
from specjax.decoding.tree import chain
from specjax.evaluation.compilations import compilations
from specjax.evaluation.contenders import LoopContender
from specjax.evaluation.costs import CostMeter, Costs, drafts, target_passes

REQUEST = Request((5, 9, 5, 9, 7), 20)
BUFFER = 128


@pytest.fixture
def prepared(trio: list[LoopContender]) -> list[LoopContender]:
    for contender in trio:
        contender.prepare(REQUEST, BUFFER)
    return trio


def test_costs_of_every_part(prepared: list[LoopContender]) -> None:
    meter = CostMeter(prepared, REQUEST, repeat=2)
    with pytest.raises(ValueError, match="no round has timed 'plain'"):
        meter.costs(prepared[0])
    with compilations() as seen:
        meter.round()
    # Draft model and lookup draft three tokens each: one program serves both, and one plain decoding.
    assert seen.count("target_passes") <= 2 and seen.count("drafts") <= 2
    with compilations() as seen:
        meter.round()
    assert not {"target_passes", "drafts"} & set(seen.names)
    plain, draft, lookup = (meter.costs(c) for c in prepared)
    assert plain.t_ratio == 1.0 and plain.draft_cost == 0.0 and plain.drafting == 0.0
    assert draft.scoring == lookup.scoring and draft.one_token == plain.one_token
    assert draft.drafting > 0 and draft.draft_passes == 3 and lookup.draft_passes == 1


def test_one_token_is_a_step_of_plain_decoding(prepared: list[LoopContender], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted over the steps that were made, from the beginning again where the answer ends."""
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))  # a second from each reading to the next
    meter = CostMeter(prepared[:1], REQUEST, repeat=4)
    for _ in range(12):
        meter.round()
    assert meter.costs(prepared[0]).one_token == 1 / 4
    short = CostMeter(prepared[:1], dataclasses.replace(REQUEST, max_new_tokens=3), repeat=4)
    short.round()
    assert short.costs(prepared[0]).one_token == 1 / 2, "the first of three tokens is the prefill's"
    nothing = CostMeter(prepared[:1], dataclasses.replace(REQUEST, max_new_tokens=1), repeat=4)
    nothing.round()
    assert math.isnan(nothing.costs(prepared[0]).one_token)


def test_a_draft_that_may_stop_early_is_timed_whole(prepared: list[LoopContender]) -> None:
    """Its c is that of the draft without a stop; what a step takes depends on where it stopped, and is not told."""
    stopping = dataclasses.replace(prepared[1].loop.drafter, min_confidence=0.999)
    info = dataclasses.replace(prepared[1].info, label="stopping")
    loop = dataclasses.replace(prepared[1].loop, drafter=stopping)
    sure = LoopContender(info, loop, prepared[1].weights, context=128, vocab=256, seed=0)
    sure.prepare(REQUEST, BUFFER)
    CostMeter(prepared[:2], REQUEST, repeat=2).round()
    meter = CostMeter([prepared[0], sure], REQUEST, repeat=2)
    with compilations() as seen:
        meter.round()
    assert seen.count("drafts") == 0, "the program is that of the draft without a stop"
    costs = meter.costs(sure)
    assert costs.draft_cost > 0 and math.isnan(costs.scoring) and math.isnan(costs.t_ratio)


def test_what_the_terms_are() -> None:
    costs = Costs(one_token=2.0, scoring=3.0, drafting=1.2, draft_passes=3)
    assert costs.t_ratio == pytest.approx(1.5)
    assert costs.draft_cost == pytest.approx(0.2)


def test_repeated_passes_feed_on_one_another(prepared: list[LoopContender]) -> None:
    """Three passes in one call are three calls of one pass: none is left out, none is fed stale tokens."""
    plain = prepared[0]

    def setting() -> tuple:
        state = plain.prefill(REQUEST)
        return state.cache, state.context

    def passes(cache, context, tokens, repeat):
        draft = chain(tokens[:, 1:], laws=None)
        rows = jnp.arange(1)
        context = context.replace(tokens=context.tokens.at[rows, context.length - 1].set(tokens[:, 0]))
        arguments = (plain.weights.target, cache, context, draft, jnp.int32(repeat))
        return target_passes(plain.loop.graph, (), "float32", *arguments)

    first = jnp.asarray([[7, 3, 4]], jnp.int32)
    cache, context = setting()
    _, at_once = passes(cache, context, first, 3)
    cache, context = setting()
    tokens = first
    seen = [np.array(first)]
    for _ in range(3):
        cache, tokens = passes(cache, context, tokens, 1)
        seen.append(np.array(tokens))
    assert np.array_equal(at_once, tokens)
    assert not np.array_equal(seen[0], seen[1])


def test_repeated_drafts_feed_on_one_another(prepared: list[LoopContender]) -> None:
    contender = prepared[1]

    def run(repeat: int, root: jax.Array | None, carried: tuple | None) -> tuple:
        state = contender.prefill(REQUEST)
        cache, own = (state.cache, state.drafter) if carried is None else carried
        context = state.context
        if root is not None:
            context = context.replace(tokens=context.tokens.at[jnp.arange(1), context.length - 1].set(root))
        arguments = (cache, own, context, state.request, jnp.int32(repeat))
        return drafts(contender.loop, contender.weights, *arguments)

    cache, own, one = run(1, None, None)
    _, _, two = run(1, one.tokens[:, -1], (cache, own))
    _, _, both = run(2, None, None)
    assert np.array_equal(both.tokens, two.tokens)
    assert not np.array_equal(one.tokens, two.tokens)
