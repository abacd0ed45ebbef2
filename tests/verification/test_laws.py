"""Every rule against the exact law, on many draws (a million in the slow tests); faults that a G-test must catch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Keys, request_keys
from specjax.decoding.sampling import ACCEPT, DRAFT
from specjax.testing import laws
from specjax.testing.laws import DRAFTED, ROOT, TARGET, draw_sequences, p_value, plain, step_keys, tree_draft, warped
from specjax.verification import OneHot, Recursive

QUICK = 1 << 16
RULES = {"recursive": Recursive, "one_hot": OneHot}


@pytest.mark.pitfall("EAGLE#329", "jaymody/speculative-sampling#3", "mlx-swift-lm#459", "LookaheadDecoding#6")
@pytest.mark.parametrize("kind", ["iid", "without_replacement", "fixed", "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_output_law_is_the_targets(rule, kind):
    tokens, accepted = draw_sequences(RULES[rule](2), tree_draft(kind), warped, draws=QUICK)
    assert accepted > 0.1
    assert p_value(tokens, warped) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_output_law_on_a_million_draws(rule):
    cases = laws.check_rule(RULES[rule])
    assert len(cases) == 8


def raw_q(keys, sampling):
    """Drawn from the warped law, reported raw."""
    draft = tree_draft("iid")(keys, sampling)
    return draft.replace(laws=tree_draft("iid")(keys, plain(keys.length.shape[0])).laws)


def argmax_with_soft_q(keys, sampling):
    draft = tree_draft("iid")(keys, sampling)
    return draft.replace(tokens=draft.tokens.at[:, 0].set(int(np.argmax(DRAFTED[ROOT]))))


def sorted_by_q(keys, sampling):
    """Drawn siblings put in order of their own probability."""
    draft = tree_draft("iid")(keys, sampling)
    order = jnp.argsort(-jnp.asarray(DRAFTED)[ROOT][draft.tokens[:, :3]], axis=1)
    tokens = jnp.take_along_axis(draft.tokens[:, :3], order, axis=1)
    return draft.replace(tokens=draft.tokens.at[:, :3].set(tokens), valid=draft.valid.at[:, 3].set(False))


def unconditional_q(keys, sampling):
    return tree_draft("without_replacement")(keys, sampling).replace(siblings="iid")


def dropped_when_unlikely(keys, sampling):
    """A drawn token is thrown away because its own q is low."""
    draft = tree_draft("iid")(keys, sampling)
    likely = jnp.asarray(DRAFTED, jnp.float32)[ROOT][draft.tokens] > 0.3
    return draft.replace(valid=draft.valid & likely.at[:, 3].set(True))


FAULTS = {
    "raw_q": (raw_q, warped),
    "argmax_with_soft_q": (argmax_with_soft_q, plain),
    "sorted_by_q": (sorted_by_q, plain),
    "unconditional_q": (unconditional_q, plain),
    "dropped_when_unlikely": (dropped_when_unlikely, plain),
}


@pytest.mark.pitfall("transformers#47932")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault):
    make_draft, sampling = FAULTS[fault]
    tokens, _ = draw_sequences(Recursive(2), make_draft, sampling, draws=QUICK)
    assert p_value(tokens, sampling) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_one_hot_rule_asks_nothing_of_the_law(fault):
    make_draft, sampling = FAULTS[fault]
    tokens, _ = draw_sequences(OneHot(2), make_draft, sampling, draws=QUICK)
    assert p_value(tokens, sampling) > 1e-6


@pytest.mark.pitfall("tpu-inference rejection_sampler (code)")
def test_impossible_token_is_rejected_even_when_the_uniform_is_zero(monkeypatch):
    monkeypatch.setattr(Keys, "uniform", lambda self, purpose, slot: jnp.zeros_like(self.length, jnp.float32))
    keys, sampling = step_keys(3, 0), plain(3)
    draft = tree_draft("fixed")(keys, sampling)
    scores = laws.score(draft)
    scores = scores.replace(logits=scores.logits.at[:, 0, 2].set(-jnp.inf))
    verdict = Recursive(2).verify(draft, scores, sampling, keys)
    assert not np.any(np.asarray(verdict.path[:, 0]) == 0)


@pytest.mark.pitfall("llama.cpp#27694", "vllm#40551")
def test_acceptance_is_the_overlap_and_one_hot_accepts_less():
    def first_only(keys, sampling):
        draft = tree_draft("iid")(keys, sampling)
        return draft.replace(valid=draft.valid.at[:, 1:].set(False))

    _, exact = draw_sequences(Recursive(2), first_only, plain, draws=QUICK)
    _, match = draw_sequences(OneHot(2), first_only, plain, draws=QUICK)
    sigma = 0.5 / np.sqrt(QUICK)
    assert abs(exact - np.minimum(TARGET[ROOT], DRAFTED[ROOT]).sum()) < 5 * sigma
    assert abs(match - (TARGET[ROOT] * DRAFTED[ROOT]).sum()) < 5 * sigma


@pytest.mark.pitfall("vllm-ascend#2881")
def test_inputs_are_unchanged():
    keys, sampling = step_keys(8, 0), plain(8)
    draft = tree_draft("iid")(keys, sampling)
    scores = laws.score(draft)
    before = jax.tree.map(np.array, (draft, scores))
    Recursive(2).verify(draft, scores, sampling, keys)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, (draft, scores)))


def test_purposes_have_keys_of_their_own():
    keys = Keys(request_keys(0, [0]), jnp.asarray([7]))
    a, b = keys.uniform(ACCEPT, 0), keys.uniform(DRAFT, 0)
    assert a != b
    assert keys.uniform(ACCEPT, 1) != a
    assert Keys(request_keys(0, [1]), jnp.asarray([7])).uniform(ACCEPT, 0) != a
