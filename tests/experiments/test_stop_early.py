"""Where a draft had better stop: the choice by hand, and the program on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import stop_early
from specjax import build
from specjax.decoding import Keys, Request, make_sampling, prefill
from specjax.evaluation.contenders import Info, LoopContender
from specjax.evaluation.costs import Costs
from specjax.models import merge
from specjax.testing import tiny_target


def test_the_confidence_that_tells_good_drafts_from_bad_is_chosen() -> None:
    """Sure drafts are always right, unsure ones never: the unsure are worth neither a pass nor a place."""
    confidence = np.array([[0.9, 0.9], [0.9, 0.2], [0.2, 0.1]] * 4)
    accepted = np.array([2, 1, 0] * 4)
    costs = Costs(one_token=1.0, scoring=1.4, drafting=0.4, draft_passes=2)
    best = stop_early.choose(confidence, accepted, costs)
    assert best.threshold == 0.9 and best.mean_length == 1.0 and best.expected_tokens == 2.0
    # Passes of 2, 2 and 1, and target passes over 3, 2 and 1 tokens.
    assert best.speedup == pytest.approx(2.0 / np.mean([0.4 + 1.4, 0.4 + 1.2, 0.2 + 1.0]))


def test_a_drafter_that_cannot_stop_or_does() -> None:
    target = tiny_target(layers=2, width=16)
    for options, message in (
        ({"name": "prompt_lookup"}, "prompt_lookup has no min_confidence to choose"),
        (
            {"name": "early_exit", "exit_layer": 1, "min_confidence": 0.5},
            "stops early, min_confidence=0.5: set it to 0",
        ),
    ):
        made = build.make_drafter(options.pop("name"), target, **options)
        loop, weights = build.make_loop(target, made, make_sampling([1.0]))
        info = Info("draft", made.name, "recursive")
        with pytest.raises(ValueError, match=message):
            stop_early.check_stops(LoopContender(info, loop, weights, context=64, vocab=64, seed=0))


def test_the_confidence_is_the_one_that_drafts_stop_by() -> None:
    """At temperature 1, whatever the request's is."""
    target = tiny_target(layers=2, width=16)
    made = build.make_drafter("early_exit", target, exit_layer=1, num_nodes=2)
    found = []
    for temperature in (1.0, 0.4):
        loop, weights = build.make_loop(target, made, make_sampling([temperature]))
        state = prefill(loop, weights, [Request((1, 3, 4, 1), 8, temperature=temperature)], context=64, seed=0)
        found.append(stop_early.confidences(loop, weights, state)[0, 0])
        drafts, decoder = [], merge(loop.graph, weights.target)
        for bound in (found[-1] - 1e-4, found[-1] + 1e-4):
            stopping = dataclasses.replace(loop.drafter, min_confidence=float(bound))
            keys = Keys(state.request, state.length)
            own = (weights.drafter, weights.tables, decoder, state.cache, state.drafter, state.context, keys)
            drafts.append(bool(stopping.propose(*own)[0].valid[0, 0]))
        assert drafts == [True, False]
    assert float(found[0]) == pytest.approx(float(found[1]), abs=1e-6)
    with pytest.raises(ValueError, match=r"top_p=0.9.*which a truncated one does not tell"):
        stop_early.check_sampling(build.load_config("configs/stop_early.py", "quick", {"top_p": 0.9}))


@pytest.mark.slow
def test_it_records_and_chooses(tiny: Path, in_workdir: Path) -> None:
    options = {
        "target.source": f"{tiny}/target", "rows.draft.source": f"{tiny}/draft", "rows.draft.num_nodes": 3,
        "max_new_tokens": 12, "layout": "plain", "rounds": 1,
    }  # fmt: skip
    stop_early.main(build.load_config("configs/stop_early.py", "quick", options))
    found = json.loads((in_workdir / "stop.json").read_text())
    assert found["steps"] > 0 and 0 <= found["best"]["threshold"] <= 1 <= found["best"]["expected_tokens"]
    assert found["best"]["mean_length"] <= 3 and found["best"]["speedup"] > 0
