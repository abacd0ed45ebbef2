"""The target's hidden states computed in the step are those of the store, and train the same draft."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import build
from specjax.models import merge
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import Batch, TextRows, lay_out, pack
from specjax.training.hidden_states import HiddenStates, StoreConfig, write_store
from specjax.training.objectives import Distill
from specjax.training.objectives.registry import OBJECTIVES
from specjax.training.online import online_taps, with_hidden_states
from tests.training import common


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def store(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    write_store(directory, target, common.documents(target), StoreConfig(96, shard_rows=4, pass_rows=4, taps=(1,)))
    return HiddenStates(directory, target)


def text_of(batch: Batch) -> Batch:
    return dataclasses.replace(batch, normed=None, lse=None, taps={})


def test_online_states_are_the_stored_ones(target, store):
    stored = store.batch(np.arange(4))
    compute = jax.jit(lambda params, batch: with_hidden_states(merge(target.graph, params), batch, (1,)))
    found = compute(target.params, jax.tree.map(jnp.asarray, text_of(stored)))
    known = stored.segments > 0
    for name, ours, theirs in (("normed", found.normed, stored.normed), ("1", found.taps["1"], stored.taps["1"])):
        scale = np.abs(np.asarray(ours)).max()
        apart = np.abs(np.asarray(ours) - theirs.astype(np.float32))[known].max()
        assert apart < 2**-8 * scale, name  # bfloat16 keeps eight bits
    np.testing.assert_allclose(np.asarray(found.lse), stored.lse, atol=0.05)


def test_a_step_learns_the_same_online(target, store):
    made = Trainer(
        target=target,
        objective=Distill(common.student(target)),
        tables={"vocab": jnp.asarray(common.vocabulary())},
        optimizer=OptimizerConfig(learning_rate=1e-2, steps=20),
        config=TrainerConfig(steps=1, batch=4, best="held/match"),
        train=store,
        held_out={},
    )
    stored = store.batch(np.arange(4))
    with pytest.raises(ValueError, match="hidden-state store, not text"):
        made.step(made.init(), text_of(stored))
    _, expected = made.step(made.init(), stored)
    rows = pack(common.documents(target), 96)[0]
    online = dataclasses.replace(made, online=(), train=TextRows(lay_out(rows, 96)))
    _, found = online.step(online.init(), text_of(stored))
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=0.02)
    assert float(found["tokens"]) == float(expected["tokens"])


def test_the_layers_computed_are_those_the_objective_reads(target):
    def eagle3(taps):
        return OBJECTIVES["eagle3"](target, intermediate_size=16, draft_vocab=16, taps=taps)

    assert online_taps(eagle3((0, 1))) == (0, 1) and online_taps(eagle3((0,)), (1, 0)) == (1, 0)
    with pytest.raises(ValueError, match=r"data.taps=\(2, 15\) lacks 0 of the layer inputs \(0, 2\)"):
        online_taps(eagle3((0, 2)), (2, 15))
    # Of any target: those of the objective.
    assert build.load_config("configs/eagle3.py", "any").data.taps == ()
