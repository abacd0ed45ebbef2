"""Every registered drafter with every rule: the law of short sequences, greedy texts, or a refusal that helps.

A square of programs, each compiled for itself: all of it is slow. `pytest -m slow --shard=0/8` takes an eighth.
"""

from __future__ import annotations

import functools

import pytest

from specjax import build
from specjax.decoding import make_sampling
from specjax.drafting.registry import DRAFTERS, Drafting
from specjax.evaluation.certify import Claim
from specjax.models import Target
from specjax.testing import contract
from specjax.testing.carried import carried
from specjax.testing.sequences import certify_sequences, four_token_target
from specjax.verification.registry import RULES, is_lossy

pytestmark = pytest.mark.slow

SAMPLING = {"temperature": 1.2, "top_k": 3, "top_p": 0.98}
PRESETS = {"sequoia", "specinfer", "speculative"}  # Programs of the recursive rule, where they fit.
LOSSLESS = sorted(name for name in RULES if name not in PRESETS and not is_lossy(RULES[name](1)))


@functools.cache
def made() -> tuple[Target, dict[str, Drafting]]:
    target = four_token_target()
    drafters, left_out = carried(target)
    assert not left_out
    return target, drafters


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_law_or_refusal(drafter, rule):
    target, drafters = made()
    statics = make_sampling([SAMPLING["temperature"]], [SAMPLING["top_k"]], [SAMPLING["top_p"]])
    try:
        loop, weights = build.make_loop(target, drafters[drafter], statics, rule=rule)
        # That a draft of no more nodes than levels is a tree shows only when it is made; the rule then refuses it.
        found = certify_sequences(
            Claim(drafter, rule), target, loop, weights, sampling=SAMPLING, draws=1 << 16, tv=0.025
        )
    except ValueError as error:
        fitting = build.default_rule(drafters[drafter].drafter, statics)
        assert rule != fitting
        assert f"use '{fitting}'" in str(error) or (rule == "block" and "use 'traversal'" in str(error))
        return
    assert found.verdict == "pass"
    assert found.accepted > 0 or drafter == "autoregressive"


@pytest.mark.parametrize("rule", ["greedy", "one_hot", "recursive"])
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_greedy_texts(drafter, rule):
    target, drafters = made()
    drafting = drafters[drafter]
    subject = contract.Subject(target.graph, target.params, drafting.drafter, drafting.params, drafting.tables)
    contract.check_equals_autoregressive(subject, RULES[rule], contract.random_requests(subject.vocab, 6))
