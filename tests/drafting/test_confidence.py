"""Chains that stop where the draft is unsure: what is left out, how wide the pass is, the contract and the law."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Context, Keys, make_sampling, request_keys, score
from specjax.decoding.widths import at_width, fitting, stop_widths
from specjax.drafting import Adaptive, Autoregressive, DraftModel, EarlyExit, Kangaroo, LayerSkip
from specjax.drafting.self_chain import entropy_of, sure
from specjax.evaluation.costs import unstopped
from specjax.models import causal_view, init_cache, init_decoder, merge
from specjax.models.kangaroo import kangaroo_config
from specjax.testing import contract
from specjax.verification import Recursive
from tests.drafting import common

NODES, LENGTH = 4, 9


def own_draft(vocab: int = common.VOCAB, **options) -> contract.Subject:
    """A draft near the target."""
    sub = common.subject(DraftModel(common.config(vocab=vocab), **options), vocab=vocab)
    noise = init_decoder(common.config(vocab=vocab), jax.random.key(5))
    near = jax.tree.map(lambda x, y: x + y / 2 if x.ndim > 1 else x, sub.target, noise)
    return dataclasses.replace(sub, params=near)


SUBJECTS = {
    "draft_model": lambda: own_draft(num_nodes=NODES),
    "early_exit": lambda: common.subject(EarlyExit(1, NODES)),
    "adaptive": lambda: common.subject(EarlyExit(1, NODES)),
    "layer_skip": lambda: common.subject(LayerSkip((1,), NODES)),
    "kangaroo": lambda: common.subject(Kangaroo(kangaroo_config(common.config(), 1, common.VOCAB), NODES, 0.0)),
}


@pytest.mark.pitfall("transformers#34240")
@pytest.mark.parametrize(
    ("name", "stop"),
    [
        *(pytest.param(x, "confidence", marks=pytest.mark.slow if x == "layer_skip" else ()) for x in SUBJECTS),
        *(
            pytest.param(x, "entropy", marks=() if x in ("draft_model", "early_exit") else pytest.mark.slow)
            for x in SUBJECTS
        ),
    ],
)
def test_the_unsure_node_is_left_out_with_all_behind_it(name, stop):
    """The same draws as without a stop, cut at the first unsure law; a narrow pass says what a whole one says."""
    sub = SUBJECTS[name]()
    seed = 0 if stop == "confidence" else 1  # texts behind which some rows stop in their first half
    tokens = jax.random.randint(jax.random.key(seed), (2, LENGTH), 0, sub.vocab)
    tokens = jnp.pad(tokens, [(0, 0), (0, 16 - LENGTH)])
    length = jnp.full((2,), LENGTH)
    context = Context(tokens, length, make_sampling([1.0, 1.0]))
    keys = Keys(request_keys(0, [0, 1]), length)

    def drafted(drafter, params, own):
        target, fed = merge(sub.graph, params), tokens[:, : LENGTH - 1]
        view = causal_view(jnp.zeros((2,), jnp.int32), LENGTH - 1)
        out, cache = target.cached(fed, init_cache(target.config, 2, 32), view, taps=drafter.taps)
        state = drafter.init_state(own, sub.tables, target, 2, 32)
        state = drafter.extend(own, sub.tables, target, state, fed, view.positions, out.taps, jnp.ones_like(fed) > 0)
        return target, *drafter.propose(own, sub.tables, target, cache, state, context, keys)

    @jax.jit
    def whole(params, own):
        target, draft, _, cache = drafted(sub.drafter, params, own)
        return draft, score(target, cache, draft.replace(resume=None), context, ())[0].logits

    draft, logits = whole(sub.target, sub.params)
    laws = np.asarray(draft.laws)
    # Both grow with how sure a law is.
    sureness = np.exp(laws).max(-1) if stop == "confidence" else (np.exp(laws) * laws).sum(-1)
    assert draft.widths is None and draft.valid.all()
    # Some row keeps a node, none keeps all.
    running = np.minimum.accumulate(sureness, axis=1).max(0)
    assert running[-1] < running[0]
    least = float(running[0] + running[-1]) / 2
    bound = {"min_confidence": least} if stop == "confidence" else {"max_entropy": -least}
    stopping = dataclasses.replace(sub.drafter, **bound)
    sizes = stop_widths(NODES, plain=draft.resume is None)
    if name == "adaptive":
        sizes = (0, 2, NODES)
        stopping = Adaptive(stopping, sizes, prior=1.0)
    rule = Recursive(NODES)

    @jax.jit
    def cut(params, own):
        target, draft, _, cache = drafted(stopping, params, own)

        def judge(draft, cache):
            scores, cache = score(target, cache, draft, context, ())
            return scores, rule.verify(draft, scores, context.sampling, keys), cache

        return draft, at_width(judge, draft, cache, NODES)[0].logits

    short, narrow = cut(sub.target, sub.params)
    valid = np.cumprod(sureness >= least, axis=1).astype(bool)
    np.testing.assert_array_equal(short.valid, valid)
    np.testing.assert_array_equal(short.tokens[valid], draft.tokens[valid])
    assert short.widths.sizes == sizes
    assert sizes[int(short.widths.choice)] == min(s for s in sizes if s >= valid.sum(1).max()) < NODES
    scored = np.pad(valid, [(0, 0), (1, 0)], constant_values=True)
    np.testing.assert_allclose(narrow[scored], logits[scored], atol=1e-5)


def test_widths_hold_every_valid_node():
    assert stop_widths(6, plain=True) == (0, 3, 6) and stop_widths(5, plain=False) == (1, 3, 5)
    assert stop_widths(1, plain=True) == (0, 1) and stop_widths(1, plain=False) == (1,)
    valid = jnp.asarray([[False] * 6, [True] * 3 + [False] * 3])
    assert [int(fitting(v[None], (0, 3, 6)).choice) for v in valid] == [0, 1]
    assert int(fitting(valid.at[0, 4].set(True), (0, 3, 6)).choice) == 2


def test_contract():
    sub = own_draft(num_nodes=3, min_confidence=0.3)
    contract.check_drafter(sub, Recursive)
    done = contract.check_equals_autoregressive(dataclasses.replace(sub, eos=()), Recursive, common.looping_requests())
    assert sum(c.accepted[1:].sum() for c in done) > 0 < sum(c.accepted[0] for c in done)


@pytest.mark.parametrize("bound", [{"min_confidence": 0.5}, {"max_entropy": 1.0}], ids=lambda x: next(iter(x)))
def test_law(bound):
    sub = own_draft(vocab=4, num_nodes=2, **bound)
    assert common.law_p_value(sub, Recursive, prompt=(0, 1, 3)) > common.FALSE_ALARM


def test_entropy_is_in_nats_and_of_the_tokens_that_may_come():
    logits = jnp.asarray([[0.0, 0.0, 0.0, 0.0], [3.0, -jnp.inf, 3.0, -jnp.inf], [9.0, -jnp.inf, -jnp.inf, -jnp.inf]])
    np.testing.assert_allclose(entropy_of(logits), [np.log(4), np.log(2), 0.0], atol=1e-6)
    assert sure(logits, 0.0, 1.0).tolist() == [False, True, True]
    assert sure(logits, 0.6, 1.0).tolist() == [False, False, True] and sure(logits, 0.0, math.inf).all()


def test_a_measured_draft_cost_is_that_of_every_pass():
    stopping = EarlyExit(1, NODES, 0.5, max_entropy=2.0)
    assert unstopped(stopping) == EarlyExit(1, NODES) and unstopped(Autoregressive()) == Autoregressive()


def test_confidence_is_a_probability_and_entropy_positive():
    with pytest.raises(ValueError, match="min_confidence=1.5; expected a probability"):
        DraftModel(common.config(), min_confidence=1.5)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"max_entropy={wrong}; expected nats above 0"):
            EarlyExit(1, NODES, max_entropy=wrong)
