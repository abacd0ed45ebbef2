from __future__ import annotations

import jax
import numpy as np
import pytest

from specjax import build, decoding
from specjax.decoding import Request, draft_passes
from specjax.evaluation.contenders import Info, LoopContender
from specjax.models import Target
from specjax.testing import tiny_target

REQUEST = Request((5, 9, 5, 9, 7), 20)
BUFFER = 128


def test_a_completion_is_that_of_generate(trio: list[LoopContender], target: Target) -> None:
    for contender in trio:
        preparation = contender.prepare(REQUEST, BUFFER)
        timed = contender.complete(REQUEST)
        (expected,) = decoding.generate(
            contender.loop, contender.weights, [REQUEST], context=target.context, vocab=target.config.vocab_size
        )
        assert timed.completion.tokens == expected.tokens
        assert timed.completion.steps == expected.steps
        assert timed.prefill_seconds is not None and timed.prefill_seconds > 0 and timed.decode_seconds > 0
        assert preparation.kv_bytes_target >= 2 * BUFFER * 8 * 4  # keys and values, one head of 8 floats


def test_the_targets_own_layers_are_no_second_model() -> None:
    """Neither parameters nor a cache."""
    target = tiny_target(layers=3, width=16)
    shown = {}
    for name, options in {"early_exit": {"exit_layer": 1}, "layer_skip": {"skip": (1,)}}.items():
        made = build.make_drafter(name, target, **options)
        loop, weights = build.make_loop(target, made, decoding.make_sampling([0.0]))
        vocab = target.config.vocab_size
        contender = LoopContender(
            Info(name, name, "greedy", num_nodes=4), loop, weights, context=target.context, vocab=vocab, seed=0
        )
        contender.buffer = BUFFER
        shown[name] = made.param_bytes, *contender.kv_bytes(REQUEST)
    for parameters, cache, drafter in shown.values():
        assert parameters == drafter == 0 < cache


def test_two_programs_each(target: Target, noisy: dict) -> None:
    from specjax.drafting import DraftModel
    from tests.evaluation.conftest import contender

    # A width that no other test uses, so that nothing was compiled before.
    fresh = contender(target, DraftModel(target.config, 2), noisy, "fresh")
    names = [name.strip("_") for name in fresh.prepare(REQUEST, 256).programs]
    assert names.count("prefill") == 1 and names.count("run") == 1
    again = fresh.prepare(REQUEST, 256).programs
    assert not {"prefill", "_prefill", "run"} & set(again)


def test_a_transfer_into_the_loop_is_an_error(trio: list[LoopContender]) -> None:
    plain = trio[0]
    plain.prepare(REQUEST, BUFFER)
    state = plain.prefill(REQUEST)
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Dd]isallowed host-to-device transfer"):
        plain.run(state, np.int32(3))  # type: ignore[arg-type]


def test_a_trace_has_the_same_tokens_and_as_many_drafted_as_were_accepted(trio: list[LoopContender]) -> None:
    for contender in trio:
        contender.prepare(REQUEST, BUFFER)
        completion = contender.complete(REQUEST).completion
        trace = contender.trace(REQUEST)
        assert tuple(token for token, _ in trace) == completion.tokens
        drafted = sum(accepted for _, accepted in trace)
        if contender.info.label == "plain":
            assert drafted == 0
        # A pass adds one token of the target's own, unless the budget cut it off.
        assert completion.emitted - completion.steps <= drafted <= completion.emitted - completion.steps + 1
    assert any(accepted for _, accepted in trio[1].trace(REQUEST))


def test_topology_and_passes(trio: list[LoopContender]) -> None:
    for contender in trio:
        contender.prepare(REQUEST, BUFFER)
    assert [c.info.topology for c in trio] == ["chain"] * 3
    assert [draft_passes(c.loop.drafter) for c in trio] == [0, 3, 1]


def test_batches_give_the_same_tokens(trio: list[LoopContender]) -> None:
    requests = [Request((5, 9, 5, 9, 7), 20, id=0), Request((40, 41), 8, id=1), Request((8,) * 9, 14, id=2)]
    alone = [trio[1].complete_all([r], 1)[0][0].tokens for r in requests]
    together, took = trio[1].complete_all(requests, 2)
    assert [c.tokens for c in together] == alone
    assert took.seconds > took.decode_seconds > 0 and took.prefill_seconds > 0
    assert took.new_tokens == sum(map(len, alone)) and took.emitted == took.new_tokens - 3
    # Rows at work, summed over the passes, are the rows' own passes.
    assert sum(s.live * s.passes for s in took.segments) == sum(c.steps for c in together)
    assert 1 <= took.live_rows <= 2 and took.segments[0].live == 2
    full = [s for s in took.segments if s.live == 2]
    assert took.decode_rate == pytest.approx(sum(s.emitted for s in full) / sum(s.seconds for s in full))
