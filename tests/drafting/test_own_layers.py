"""Early exit and layer skipping: the contract, the law, and that draft and remainder are the whole target."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Context, Keys, Request, make_sampling, prefill, request_keys, score
from specjax.drafting.early_exit import EarlyExit
from specjax.drafting.layer_skip import LayerSkip
from specjax.models import causal_view, merge
from specjax.testing import contract
from specjax.verification import Recursive
from tests.drafting import common

EXIT = EarlyExit(exit_layer=1, num_nodes=3)
SKIP = LayerSkip(skip=(1,), num_nodes=3)
# Of 3 layers: one without its attention, one without its MLP, one whole or left out whole.
SUBLAYERS = LayerSkip(num_nodes=3, skip_attention=(1,), skip_mlp=(2,))
MIXED = LayerSkip((2,), num_nodes=3, skip_attention=(0,), skip_mlp=(1,))


@pytest.mark.pitfall("transformers#34240")
@pytest.mark.parametrize(
    ("drafter", "layers"),
    [
        (EXIT, 2),
        pytest.param(SKIP, 2, marks=pytest.mark.slow),
        (SUBLAYERS, 3),
        pytest.param(MIXED, 3, marks=pytest.mark.slow),
    ],
    ids=["early_exit", "layer_skip", "sublayers", "mixed"],
)
def test_contract(drafter, layers):
    sub = common.subject(drafter, layers=layers)
    contract.check_drafter(sub, Recursive)
    done = contract.check_equals_autoregressive(sub, Recursive, common.looping_requests())
    assert sum(c.accepted[1:].sum() for c in done) > 0


@pytest.mark.parametrize(
    "drafter",
    [
        EXIT,
        pytest.param(dataclasses.replace(SKIP, min_confidence=0.4), marks=pytest.mark.slow),
        LayerSkip(num_nodes=2, skip_attention=(1,), skip_mlp=(0,)),
    ],
    ids=["exit", "skip_stop", "sublayers"],
)
def test_law(drafter):
    sub = common.subject(drafter, vocab=4)
    assert common.law_p_value(sub, Recursive, prompt=(0, 1, 3)) > common.FALSE_ALARM


@pytest.fixture(scope="module")
def drafted():
    """One draft of early exit with everything around it, and the logits of a full pass over root and draft."""
    sub = common.subject(EXIT, layers=3)
    loop, weights = sub.loop(Recursive)
    requests = [Request(tuple(range(n)), 8) for n in (3, 9)]
    state = prefill(loop, weights, requests, context=64, seed=0)

    @jax.jit
    def run(params, cache, tokens, length):
        target = merge(sub.graph, params)
        context = Context(tokens, length, make_sampling([0.0, 0.0]))
        draft, _, filled = EXIT.propose({}, {}, target, cache, {}, context, Keys(request_keys(0, [0, 1]), length))
        resumed, _ = score(target, filled, draft, context, ())
        whole, _ = score(target, cache, draft.replace(resume=None), context, ())
        skipped, _, _ = SKIP.propose({}, {}, target, cache, {}, context, Keys(request_keys(0, [0, 1]), length))
        kept = []  # the layers that are left, fed the drafted text one token at a time
        own, token = cache, context.last(1)
        for i in range(SKIP.num_nodes):
            out, own = target.cached(token, own, causal_view(length - 1 + i, 1), skip=(1,), taps=("normed",))
            kept.append(jnp.argmax(target.logits(out.taps["normed"][:, 0]), -1))
            token = skipped.tokens[:, i : i + 1]
        return draft, resumed.logits, whole.logits, skipped.tokens, jnp.stack(kept, 1)

    return run(sub.target, state.cache, state.tokens, state.length)


@pytest.mark.pitfall("transformers#34240")
def test_draft_and_remainder_are_the_full_pass(drafted):
    _, resumed, whole, _, _ = drafted
    np.testing.assert_allclose(resumed, whole, atol=1e-5)


def test_the_draft_is_what_the_layers_that_draft_say(drafted):
    _, _, _, skipped, kept = drafted
    np.testing.assert_array_equal(skipped, kept)


def without(params: dict, drafter: LayerSkip) -> dict:
    """A target whose skipped sublayers add nothing: their last products are 0."""
    params = jax.tree.map(lambda x: x, params)
    for i in (*drafter.skip, *drafter.skip_attention):
        params["layers"][i]["attn"]["o"]["kernel"] = jnp.zeros_like(params["layers"][i]["attn"]["o"]["kernel"])
    for i in (*drafter.skip, *drafter.skip_mlp):
        params["layers"][i]["mlp"]["down"]["kernel"] = jnp.zeros_like(params["layers"][i]["mlp"]["down"]["kernel"])
    return params


@pytest.mark.parametrize("drafter", [SUBLAYERS, MIXED], ids=["sublayers", "mixed"])
def test_a_skipped_sublayer_adds_nothing_and_verification_fills_its_slots(drafter):
    sub = common.subject(drafter, layers=3)
    loop, weights = sub.loop(Recursive)
    state = prefill(loop, weights, [Request(tuple(range(n)), 8) for n in (3, 9)], context=64, seed=0)

    @jax.jit
    def run(params, cache, tokens, length):
        target = merge(sub.graph, params)
        context = Context(tokens, length, make_sampling([0.0, 0.0]))
        keys = Keys(request_keys(0, [0, 1]), length)
        draft, _, scratch = drafter.propose({}, {}, target, cache, {}, context, keys)
        left, own, token, said = merge(sub.graph, without(params, drafter)), cache, context.last(1), []
        for i in range(drafter.num_nodes):
            out, own = left.cached(token, own, causal_view(length - 1 + i, 1), taps=("normed",))
            said.append(jnp.argmax(target.logits(out.taps["normed"][:, 0]), -1))
            token = draft.tokens[:, i : i + 1]
        after, fresh = (score(target, begin, draft, context, ()) for begin in (scratch, cache))
        return draft, jnp.stack(said, 1), scratch, after, fresh

    draft, said, scratch, (verified, filled), (whole, fresh) = run(sub.target, state.cache, state.tokens, state.length)
    np.testing.assert_array_equal(draft.tokens, said)
    np.testing.assert_allclose(verified.logits, whole.logits, atol=1e-5)
    for i, (before, drafted) in enumerate(zip(state.cache.layers, scratch.layers, strict=True)):
        wrote = not np.array_equal(before.k, drafted.k)
        assert wrote == (i not in (*drafter.skip, *drafter.skip_attention))
    for mine, theirs in zip(filled.layers, fresh.layers, strict=True):
        for row, length in enumerate(np.asarray(state.length)):
            end = int(length) + drafter.num_nodes
            np.testing.assert_allclose(mine.k[row, :end], theirs.k[row, :end], atol=1e-5)
            np.testing.assert_allclose(mine.v[row, :end], theirs.v[row, :end], atol=1e-5)


def test_whole_sequences_skip_the_same_sublayers():
    sub = common.subject(MIXED, layers=3)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    positions, segments = jnp.arange(8)[None], jnp.zeros((1, 8), jnp.int32)
    skipping = merge(sub.graph, sub.target).full(
        tokens, positions, segments, skip=(2,), skip_attention=(0,), skip_mlp=(1,)
    )
    emptied = merge(sub.graph, without(sub.target, MIXED)).full(tokens, positions, segments)
    np.testing.assert_allclose(skipping.hidden, emptied.hidden, atol=1e-5)


def test_stopping_leaves_the_unsure_nodes_out():
    """No law of 13 tokens is that sure: nothing is drafted, and decoding is plain."""
    sub = common.subject(dataclasses.replace(EXIT, min_confidence=0.9999))
    done = contract.check_equals_autoregressive(sub, Recursive, common.looping_requests()[:1])
    assert done[0].accepted[1:].sum() == 0 and done[0].steps == done[0].emitted


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (EarlyExit(exit_layer=3), "exit_layer=3 lies outside the model: the target has 3 layers; expected 1 to 2"),
        (EarlyExit(exit_layer=0), "exit_layer=0 lies outside the model"),
        (LayerSkip(skip=(0, 1, 2)), r"skip=\(0, 1, 2\) leaves none of the target's 3 layers"),
        (LayerSkip(skip=(4,)), "skip names layer 4; the target has layers 0 to 2"),
        (LayerSkip(skip=(1, 1)), r"skip=\(1, 1\) names a layer twice"),
        (LayerSkip(skip=()), "skip is empty, and so are skip_attention and skip_mlp"),
        (LayerSkip(skip_attention=(3,)), "skip_attention names layer 3; the target has layers 0 to 2"),
        (LayerSkip(skip_mlp=(1, 1)), r"skip_mlp=\(1, 1\) names a layer twice"),
        (LayerSkip((1,), skip_mlp=(1,)), "skip leaves out layer 1 whole, and skip_mlp names it too"),
        (
            LayerSkip((0,), skip_attention=(1, 2), skip_mlp=(2, 1)),
            r"skip=\(0,\), skip_attention=\(1, 2\), skip_mlp=\(2, 1\) leaves none of the target's 3 layers",
        ),
    ],
)
def test_layers_that_are_not_there(drafter, message):
    with pytest.raises(ValueError, match=message):
        common.subject(drafter, layers=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_nodes": 0}, "num_nodes=0"), ({"min_confidence": 1.0}, "min_confidence=1.0; expected a probability")],
)
def test_chains_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        EarlyExit(exit_layer=1, **options)
    with pytest.raises(ValueError, match=message):
        LayerSkip(skip=(0,), **options)
