"""EAGLE's objectives on a tiny target."""

import functools

import jax
import jax.numpy as jnp
import pytest

from specjax.models import merge
from specjax.models.eagle import Eagle3Config, EagleConfig, draft_layer
from specjax.testing import tiny_target
from specjax.training import hidden_states
from specjax.training.data import lay_out
from specjax.training.objectives.eagle import EagleRegression
from specjax.training.objectives.eagle3 import TrainingTimeTest
from tests.training import common

KEY = jax.random.key(0)
TAPS, STEPS, LENGTH = (0, 1, 2), 3, 160


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def objective(name, target, **changes):
    layer = draft_layer(target.config, intermediate_size=48, head_size=16)
    if name == "eagle":
        return EagleRegression(EagleConfig(layer=layer), **{"noise": 0.0, **changes})
    config = Eagle3Config(layer=layer, taps=TAPS, target_hidden_size=target.config.hidden_size)
    return TrainingTimeTest(config, **{"steps": STEPS, **changes})


def stored(target, documents):
    """One row as a store would hold it."""
    batch = lay_out([documents], LENGTH)
    arrays = hidden_states._compute(target, batch, hidden_states.StoreConfig(pass_rows=1, shard_rows=1, taps=TAPS))
    taps = {str(tap): arrays[str(tap)] for tap in TAPS}
    return batch.replace(normed=arrays["normed"], lse=arrays["lse"], taps=taps)


@functools.partial(jax.jit, static_argnames=("objective", "graph"))
def traced(objective, graph, target_params, params, vocab, batch):
    def loss(params):
        found = objective.loss(params, {"vocab": vocab}, merge(graph, target_params), batch, KEY)
        return found.sum, found

    return jax.grad(loss, has_aux=True)(params)


def value(objective, target, batch, params=None):
    """Gradient and loss."""
    params = objective.init(KEY, common.network(target), {}) if params is None else params
    return traced(objective, target.graph, target.params, params, jnp.asarray(common.vocabulary()), batch)


@pytest.mark.pitfall("Megatron-LM#3159,#1532,#1661; Megatron-Bridge#6103; miles#3219")
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_packed_documents_are_apart_and_every_parameter_gets_gradient(target, name):
    made, subject = common.documents(target, 3), objective(name, target)
    gradient, packed = value(subject, target, stored(target, made))
    parts = [value(subject, target, stored(target, [document]))[1] for document in made]
    assert float(packed.weight) == sum(float(p.weight) for p in parts) > 10
    assert float(packed.sum) == pytest.approx(sum(float(p.sum) for p in parts), rel=1e-4)
    for key, (top, bottom) in packed.metrics.items():
        assert float(top) == pytest.approx(sum(float(p.metrics[key][0]) for p in parts), rel=1e-4, abs=1e-4)
        assert float(bottom) == sum(float(p.metrics[key][1]) for p in parts)
    dead = [jax.tree_util.keystr(k) for k, g in jax.tree_util.tree_leaves_with_path(gradient) if not jnp.any(g != 0)]
    assert not dead
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradient))
