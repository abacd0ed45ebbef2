"""What XLA makes of the loop: the key-value cache is updated where it lies, and never copied."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.decoding import Loop, Request, Weights, prefill
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.drafting.adaptive import Adaptive
from specjax.evaluation.compiled import whole_copies
from specjax.models import merge
from specjax.testing import tiny_target
from specjax.verification import Greedy, Recursive
from tests.contract.stubs import STUBS

DRAFTERS = {"autoregressive": Autoregressive(), "prompt_lookup": PromptLookup(3), "draft_model": None}
# A tree, whose path is compacted; verification that resumes at a layer; probes; a switch between widths of the pass.
SAMPLED = {
    "tree": STUBS["feature_tree"],
    "resume": STUBS["early_exit"],
    "probes": STUBS["jacobi_window"],
    "widths": Adaptive(PromptLookup(4), (0, 2, 4)),
    "widths of a draft": Adaptive(DraftModel(dataclasses.replace(tiny_target().config, num_kv_heads=1), 4), (0, 2, 4)),
}


@pytest.mark.parametrize(
    "name", [*DRAFTERS, *list(SAMPLED)[:-1], pytest.param("widths of a draft", marks=pytest.mark.slow)]
)
def test_no_copy_of_the_cache(name):
    target, temperature, rule = tiny_target(), float(name in SAMPLED), Recursive if name in SAMPLED else Greedy
    drafter = (DRAFTERS | SAMPLED)[name] or DraftModel(target.config, 3)
    params, tables = drafter.init_params(jax.random.key(0), merge(target.graph, target.params))
    loop, weights = Loop(target.graph, drafter, rule(drafter.depth), eos=()), Weights(target.params, params, tables)
    requests = [Request(tuple(range(1, n)), 8, temperature=temperature) for n in (4, 6)]
    state = prefill(loop, weights, requests, context=512, buffer=384, seed=0)
    leaf = state.cache.layers[0].k
    compiled = Loop.run.lower(loop, weights, state, jnp.int32(100)).compile()
    assert whole_copies(compiled.as_text(), leaf.shape) == []
    if isinstance(drafter, Adaptive) and isinstance(drafter.inner, DraftModel):
        own = state.drafter.inner.cache.layers[0].k
        assert own.shape != leaf.shape and whole_copies(compiled.as_text(), own.shape) == []
    # Donated: what comes out lies where what went in lay.
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(state.cache.layers))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes


def test_a_copy_would_be_seen():
    @jax.jit
    def shifts(x):
        return jnp.concatenate([x[:, 1:], x[:, :1]], axis=1), x.transpose(0, 2, 1)

    x = jnp.zeros((2, 8, 8), jnp.float32)
    assert whole_copies(shifts.lower(x).compile().as_text(), x.shape)
