"""What XLA makes of the loop: the key-value cache is updated where it lies, and never copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from specjax.decoding import Loop, Request, Weights, prefill
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.evaluation.compiled import whole_copies
from specjax.testing import tiny_target
from specjax.verification import Greedy

DRAFTERS = {"autoregressive": Autoregressive(), "prompt_lookup": PromptLookup(3), "draft_model": None}


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_copy_of_the_cache(name):
    target = tiny_target()
    drafter = DRAFTERS[name] or DraftModel(target.config, 3)
    params = target.params if name == "draft_model" else {}
    loop, weights = Loop(target.graph, drafter, Greedy(drafter.depth), eos=()), Weights(target.params, params, {})
    requests = [Request((1, 2, 3), 8), Request((1, 2, 3, 4, 5), 8)]
    state = prefill(loop, weights, requests, context=512, buffer=384, seed=0)
    leaf = state.cache.layers[0].k
    compiled = Loop.run.lower(loop, weights, state, jnp.int32(100)).compile()
    assert whole_copies(compiled.as_text(), leaf.shape) == []
    # Donated: what comes out lies where what went in lay.
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.cache.layers))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes


def test_a_copy_would_be_seen():
    @jax.jit
    def shifts(x):
        return jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), x.transpose(0, 2, 1)

    x = jnp.zeros((2, 8, 8), jnp.float32)
    assert whole_copies(shifts.lower(x).compile().as_text(), x.shape)
