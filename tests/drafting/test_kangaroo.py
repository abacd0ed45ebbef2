"""Kangaroo in the loop: the contract, the law, an adapter cache that lacks nothing, drafts that training foresees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.build import make_drafter
from specjax.checkpoints.drafters import SavedDrafter, save_drafter
from specjax.decoding import prefill
from specjax.drafting.kangaroo import Kangaroo
from specjax.models import causal_view, init_cache, merge
from specjax.models.kangaroo import kangaroo_config, kangaroo_graph
from specjax.testing import contract, tiny_target
from specjax.verification import Greedy, Recursive
from tests.drafting import common

LAYERS, EXIT, NODES, DRAFT_VOCAB = 3, 2, 3, 11


@functools.cache
def subject(confidence: float = 0.0, vocab: int = common.VOCAB, draft_vocab: int = DRAFT_VOCAB) -> contract.Subject:
    """A reduced draft vocabulary whose ids are not the target's; nothing ends a text but the budget."""
    config = kangaroo_config(common.config(LAYERS, vocab), EXIT, draft_vocab)
    sub = common.subject(Kangaroo(config, NODES, confidence), layers=LAYERS, vocab=vocab)
    ids = jnp.arange(vocab - draft_vocab, vocab, dtype=jnp.int32)
    head = sub.target["embed"]["embedding"][ids].T
    params = {**sub.params, "lm_head": {"kernel": head}}
    return dataclasses.replace(sub, params=params, tables={"vocab": ids}, eos=())


@pytest.mark.pitfall("transformers#34240")
def test_contract() -> None:
    contract.check_drafter(dataclasses.replace(subject(0.3), eos=(2, 5)), Recursive)


def test_law() -> None:
    sub = subject(0.4, vocab=4, draft_vocab=3)
    assert common.law_p_value(sub, Recursive, prompt=(0, 1, 3)) > common.FALSE_ALARM


@functools.cache
def completions() -> list[Any]:
    return contract.check_equals_autoregressive(subject(), Greedy, common.looping_requests())


@jax.jit
def _said(params: Any, target_params: Any, tokens: jax.Array) -> jax.Array:
    """The adapter's first choice in target ids at each position, as training runs it: whole rows, true tokens."""
    sub = subject()
    target = merge(sub.graph, target_params)
    net = merge(kangaroo_graph(sub.drafter.config)[0], params)
    positions = jnp.arange(tokens.shape[0])[None]
    hidden = target.full(tokens[None], positions, jnp.ones_like(positions), stop=EXIT).hidden
    logits = net.logits(net.full(hidden, positions, jnp.ones_like(positions)), target)
    return sub.tables["vocab"][jnp.argmax(logits[0], -1)]


def test_the_loop_accepts_what_training_measures() -> None:
    """Every step of the loop, replayed on the finished text by whole-sequence predictions with the true tokens fed in.

    It fails when the adapter's cache lacks a token, above all the last one of a draft that was accepted whole.
    """
    sub, found, replayed = subject(), np.zeros(NODES + 1, int), np.zeros(NODES + 1, int)
    for request, completion in zip(common.looping_requests(), completions(), strict=True):
        text = np.asarray([*request.prompt, *completion.tokens])
        said = np.asarray(_said(sub.params, sub.target, jnp.asarray(np.pad(text, (0, 128 - len(text))))))
        length = len(request.prompt) + 1
        while length < len(text):
            right = [k < len(text) - length and said[length - 1 + k] == text[length + k] for k in range(NODES)]
            count = int(np.cumprod(right).sum())
            replayed[min(count, len(text) - length)] += 1
            length += count + 1
        found += completion.accepted
    assert found[NODES] > 0 and found[0] > 0
    assert found.tolist() == replayed.tolist()


def test_the_adapters_cache_is_that_of_a_fresh_pass() -> None:
    sub = subject()
    loop, weights = sub.loop(Greedy)
    requests = common.looping_requests()
    state = loop.run(
        weights, prefill(loop, weights, requests, context=contract.CONTEXT, seed=0, buffer=contract.BUFFER), 6
    )
    held = 24
    tokens = jnp.asarray(state.tokens)[:, :held]
    view = causal_view(jnp.zeros(3, jnp.int32), held)

    @jax.jit
    def fresh(target_params: Any, params: Any) -> Any:
        target = merge(sub.graph, target_params)
        out, _ = target.cached(tokens, init_cache(target.config, 3, held), view, stop=EXIT)
        net = merge(kangaroo_graph(sub.drafter.config)[0], params)
        return net.cached(out.hidden, init_cache(sub.drafter.config.layer, 3, held), view)[1]

    expected = fresh(sub.target, sub.params)
    assert int(state.length.min()) > held - 4 + 6
    lengths = np.minimum(np.asarray(state.length) - 1, held)
    for row, n in enumerate(lengths):
        for name in ("k", "v"):
            mine = np.asarray(getattr(state.drafter.cache.layers[0], name))[row, :n]
            np.testing.assert_allclose(mine, np.asarray(getattr(expected.layers[0], name))[row, :n], atol=1e-4)


def test_an_unsure_adapter_drafts_nothing() -> None:
    sub = subject(0.9999)
    done = contract.check_equals_autoregressive(sub, Greedy, common.looping_requests()[:1])
    assert done[0].accepted[1:].sum() == 0 and done[0].steps == done[0].emitted


def test_a_saved_adapter_is_found_by_name(tmp_path: Any) -> None:
    small = tiny_target(width=16)
    config = kangaroo_config(small.config, 1, 32)
    drafter = Kangaroo(config)
    params, tables = drafter.init_params(jax.random.key(0), merge(small.graph, small.params))
    save_drafter(tmp_path, SavedDrafter("kangaroo", config, params, tables, ("head",)), small, dtype="float32")
    loaded = make_drafter("kangaroo", small, source=str(tmp_path))
    assert loaded.drafter == drafter and loaded.drafter.num_nodes == 6 and loaded.drafter.min_confidence == 0.6
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (loaded.params, loaded.tables), (params, tables))
    assert all(jax.tree.leaves(same))
    assert make_drafter("kangaroo", small, source=str(tmp_path), num_nodes=2).drafter.depth == 2
    with pytest.raises(ValueError, match="is a head of method 'kangaroo', not 'medusa'"):
        make_drafter("medusa", small, source=str(tmp_path))


@pytest.mark.parametrize("exit_layer", [0, LAYERS])
def test_an_exit_layer_outside_the_target(exit_layer: int) -> None:
    with pytest.raises(ValueError, match=f"exit_layer={exit_layer} lies outside the model: the target has 3 layers"):
        kangaroo_config(common.config(LAYERS), exit_layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_nodes": 0}, "num_nodes=0"), ({"min_confidence": 1.0}, "min_confidence=1.0; expected a probability")],
)
def test_chains_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kangaroo(kangaroo_config(common.config(LAYERS), EXIT), **options)
