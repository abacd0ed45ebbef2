"""Every rule against the exact law, on many draws (a million in the slow tests); faults that a G-test must catch."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Keys, TreeSpec, request_keys
from specjax.decoding.sampling import ACCEPT, DRAFT
from specjax.drafting import DraftModel
from specjax.testing import check_rule, contract
from specjax.testing.laws import (
    DRAFTED,
    ROOT,
    TARGET,
    VOCAB,
    chain_draft,
    draw_sequences,
    mapped,
    p_value,
    plain,
    tree_draft,
    warped,
)
from specjax.testing.markov import markov_config, markov_params
from specjax.verification import Block, KSeq, OneHot, Recursive, Traversal
from specjax.verification.registry import RULES

QUICK = 1 << 16
KINDS = ["iid", "without_replacement", "fixed", "mixed"]


def spent(kind):
    """The law has one token to give; the siblings behind it are what a draw from nothing comes to."""

    def make(keys, sampling):
        n = keys.length.shape[0]
        law = jnp.full((n, 1, VOCAB), -jnp.inf).at[:, :, 3].set(0.0)
        tokens = jnp.broadcast_to(jnp.asarray([3, 0, 0]), (n, 3))
        return TreeSpec((-1,) * 3).draft(tokens, law=jnp.zeros((n, 3), jnp.int32), laws=law, siblings=kind)

    return make


def without_the_first(kind):
    """The first sibling is invalid: those behind it were drawn all the same with its token taken out."""

    def make(keys, sampling):
        draft = tree_draft(kind)(keys, sampling)
        return draft.replace(valid=draft.valid.at[:, 0].set(False))

    return make


CASES = [
    *((rule, tree_draft, kind, plain) for rule in (Recursive, OneHot, Traversal) for kind in KINDS),
    (Recursive, tree_draft, "without_replacement", warped),
    (Recursive, spent, "without_replacement", plain),
    (Traversal, spent, "without_replacement", plain),
    *((rule, without_the_first, "without_replacement", plain) for rule in (Recursive, Traversal)),
    *((rule, lambda kind: mapped(tree_draft(kind)), "mixed", warped) for rule in (Recursive, Traversal)),
    (KSeq, tree_draft, "iid", plain),
    (Block, chain_draft, "iid", plain),
    (Block, chain_draft, "fixed", plain),
]


@pytest.mark.pitfall("EAGLE#329", "jaymody/speculative-sampling#3", "mlx-swift-lm#459", "LookaheadDecoding#6")
@pytest.mark.parametrize(("rule", "shape", "kind", "sampling"), CASES)
def test_output_law_is_the_targets(rule, shape, kind, sampling):
    tokens, accepted = draw_sequences(rule(2), shape(kind), sampling, draws=QUICK)
    assert kind in rule(2).exact_for
    assert accepted > 0.01
    assert p_value(tokens, sampling) > 1e-6


def test_every_exact_rule_is_among_the_cases():
    tested = {(rule, kind) for rule, _, kind, _ in CASES}
    for name, make in RULES.items():
        rule = make(2)
        # The one has no law to test; the other's chains have no siblings.
        if name not in ("greedy", "block") and not (isinstance(rule, Recursive) and type(rule) is not Recursive):
            assert {(type(rule), kind) for kind in rule.exact_for} <= tested, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "chains", "cases"),
    [(Recursive, False, 9), (OneHot, False, 9), (Traversal, False, 9), (KSeq, False, 3), (Block, True, 5)],
)
def test_the_contract_with_a_million_draws(rule, chains, cases):
    assert len(check_rule(rule, chains_only=chains)) == cases


class WithoutMap(Recursive):
    """Takes draft ids for the target's."""

    def verify(self, draft, scores, sampling, keys):
        return super().verify(draft.replace(vocab=None), scores, sampling, keys)


def test_a_rule_that_ignores_the_draft_vocabulary_is_caught():
    with pytest.raises(AssertionError, match="WithoutMap does not keep the target's law on a 'iid' draft with warped"):
        check_rule(lambda depth: WithoutMap(depth, frozenset({"iid"})), draws=QUICK)


@pytest.mark.parametrize(
    ("exact_for", "says"),
    [
        (frozenset(), r"exact_for is \[\]; expected at least one of"),
        (frozenset("iid"), "exact_for has 'd'; known kinds"),
    ],
)
def test_a_rule_that_declares_nothing_is_not_passed(exact_for, says):
    with pytest.raises(ValueError, match=says):
        check_rule(lambda depth: Recursive(depth, exact_for))


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
    return draft.replace(tokens=draft.tokens.at[:, :3].set(tokens), valid=draft.valid.at[:, 3:].set(False))


def unconditional_q(keys, sampling):
    return tree_draft("without_replacement")(keys, sampling).replace(siblings="iid")


def dropped_when_unlikely(keys, sampling):
    """A drawn token is thrown away because its own q is low."""
    draft = tree_draft("iid")(keys, sampling)
    likely = jnp.asarray(DRAFTED, jnp.float32)[ROOT][draft.tokens] > 0.3
    return draft.replace(valid=draft.valid & likely.at[:, 3:].set(True))


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


def test_purposes_have_keys_of_their_own():
    keys = Keys(request_keys(0, [0]), jnp.asarray([7]))
    a, b = keys.uniform(ACCEPT, 0), keys.uniform(DRAFT, 0)
    assert a != b
    assert keys.uniform(ACCEPT, 1) != a
    assert Keys(request_keys(0, [1]), jnp.asarray([7])).uniform(ACCEPT, 0) != a


@pytest.mark.slow
def test_block_verification_over_several_steps():
    """It looks at the uniforms of positions that it does not keep: keys must differ from step to step."""
    drafter, law = DraftModel(markov_config(VOCAB), num_nodes=2), 0.5 * TARGET + 0.5 * DRAFTED
    assert contract.law_p_value(drafter, markov_params(law), {}, Block, draws=1 << 18, tokens=5) > 1e-6
