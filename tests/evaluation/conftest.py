"""One tiny target and its contenders for all tests of this directory."""

from __future__ import annotations

import pytest

from specjax.decoding import Loop, Weights, draft_passes
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.evaluation.contenders import Info, LoopContender
from specjax.models import Target
from specjax.testing import noisy_draft, tiny_target
from specjax.verification import Greedy


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target(layers=1, width=16)


@pytest.fixture(scope="session")
def noisy(target: Target) -> dict:
    return noisy_draft(target, 0.1)


def contender(target: Target, drafter, params, label: str) -> LoopContender:
    names = {Autoregressive: "autoregressive", DraftModel: "draft_model", PromptLookup: "prompt_lookup"}
    loop = Loop(target.graph, drafter, Greedy(drafter.depth), target.eos_ids)
    info = Info(
        label,
        names[type(drafter)],
        "greedy",
        num_nodes=drafter.num_nodes,
        draft_passes=draft_passes(drafter),
        draft_param_bytes=100,
    )
    weights = Weights(target.params, params, {})
    return LoopContender(info, loop, weights, context=target.context, vocab=target.config.vocab_size, seed=0)


@pytest.fixture
def trio(target: Target, noisy: dict) -> list[LoopContender]:
    """Plain decoding, a draft model and prompt lookup. Their programs are compiled once for all tests."""
    return [
        contender(target, Autoregressive(), {}, "plain"),
        contender(target, DraftModel(target.config, 3), noisy, "draft"),
        contender(target, PromptLookup(3, min_ngram=1), {}, "lookup"),
    ]
