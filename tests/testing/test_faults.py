"""Every planted fault is caught, and the same drafter and rule without it pass."""

import pytest

from specjax.decoding import Loop, Weights
from specjax.evaluation.certify import Claim
from specjax.testing.faults import planted
from specjax.testing.sequences import certify_sequences, markov_target

DRAWS, TV = 1 << 16, 0.025
FAULTS = planted()
# One of the draft, one of the rule, one across steps, one of the processors; all of them in the slow tests.
QUICK = (
    "raw q for a warped draw",
    "residual from raw p",
    "keys reused between steps under block verification",
    "penalties that ignore drafted ancestors",
)
SLOWLY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]


@pytest.fixture(scope="module")
def target():
    return markov_target()


def certificate(target, drafter, rule, fault, name=None):
    loop, weights = Loop(target.graph, drafter, rule, ()), Weights(target.params, fault.params, fault.tables)
    claim = Claim("table_tree", fault.rule_name, planted=name)
    return certify_sequences(claim, target, loop, weights, sampling=fault.sampling, draws=DRAWS, tv=TV)


@pytest.mark.pitfall("transformers#47932", "jaymody/speculative-sampling#3", "rtp-llm#1311", "EAGLE#329")
@pytest.mark.parametrize("name", SLOWLY)
def test_a_planted_fault_is_caught(target, name):
    fault = FAULTS[name]
    row = certificate(target, fault.drafter, fault.rule, fault, name)
    assert row.verdict == "caught" and row.power > 0.99 and row.cells <= 64


@pytest.mark.slow
@pytest.mark.pitfall("rtp-llm#1311")
@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_the_law_is_kept(target, name):
    fault = FAULTS[name]
    row = certificate(target, fault.sound_drafter, fault.sound_rule, fault)
    assert row.verdict == "pass" and row.accepted > 0.1


def test_all_that_are_known_are_planted():
    assert len(FAULTS) == 14
    for fault in FAULTS.values():
        assert fault.drafter != fault.sound_drafter or fault.rule != fault.sound_rule
