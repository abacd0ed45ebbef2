"""LayerSkip's schedules against the paper's formulas, and its loss against one written out exit by exit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import graph, init_decoder, merge
from specjax.models.target import config_hash
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import Batch, Document, TextRows, lay_out
from specjax.training.objectives.layerskip import LayerSkipPretraining, Schedule, layer_outputs
from tests.drafting import common

LAYERS, LENGTH, STEPS = 3, 24, 80


def document(seed: int, length: int, prompt: int = 0) -> Document:
    return Document(np.random.default_rng(seed).integers(0, common.VOCAB, length).astype(np.int32), prompt)


BATCH = jax.tree.map(jnp.asarray, lay_out([[document(1, 9), document(2, 12)], [document(3, 20, prompt=4)]], LENGTH))
CONFIG = common.config(LAYERS)


@functools.cache
def params() -> Any:
    return jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, init_decoder(CONFIG, jax.random.key(0)))


def objective(**changes: Any) -> LayerSkipPretraining:
    defaults = {"dropout": 0.0, "exit_scale": 0.5, "curriculum": "gradual"}
    return LayerSkipPretraining(CONFIG, Schedule(LAYERS, STEPS, **{**defaults, **changes}))


# ---- Schedules ----


def test_dropout_grows_with_depth_and_time() -> None:
    schedule = Schedule(4, 9, dropout=0.3)
    np.testing.assert_allclose(schedule.rates(jnp.asarray(0)), 0)
    depth = 2 ** (np.arange(4) / 3) - 1
    np.testing.assert_allclose(schedule.rates(jnp.asarray(8)), 0.3 * depth, rtol=1e-6)
    np.testing.assert_allclose(schedule.rates(jnp.asarray(4)), 0.3 * depth * (2**0.5 - 1), rtol=1e-6)
    assert depth[0] == 0 and depth[-1] == 1
    constant = dataclasses.replace(schedule, ramp="constant")
    np.testing.assert_allclose(constant.rates(jnp.asarray(0)), 0.3 * depth, rtol=1e-6)


def test_exits_weigh_by_the_sum_of_the_layers_below() -> None:
    # e(l): 0, 1, 3 times the scale; at the last layer 3 + the scale times 0 + 1 + 2.
    found = Schedule(4, STEPS, exit_scale=0.5, curriculum="all").weights(jnp.asarray(0))
    np.testing.assert_allclose(found, np.asarray([0, 0.5, 1.5, 4.5]) / 6.5, rtol=1e-6)
    alone = Schedule(4, STEPS, exit_scale=0.0, curriculum="all").weights(jnp.asarray(0))
    np.testing.assert_allclose(alone, [0, 0, 0, 1])


def enabled(schedule: Schedule, step: int) -> list[int]:
    return np.flatnonzero(schedule.enabled(jnp.asarray(step))).tolist()


def test_the_rotational_curriculum_turns_by_one_layer_a_step() -> None:
    schedule = Schedule(6, STEPS, curriculum="rotational", every=3)
    assert [enabled(schedule, t) for t in range(4)] == [[0, 3, 5], [1, 4, 5], [2, 5], [0, 3, 5]]
    weights = schedule.weights(jnp.asarray(1))
    assert float(weights.sum()) == pytest.approx(1) and np.flatnonzero(weights).tolist() == [1, 4, 5]


def test_the_gradual_curriculum_comes_down_from_the_last_layer_in_half_the_steps() -> None:
    schedule = Schedule(4, 80, curriculum="gradual")
    assert [enabled(schedule, t) for t in (0, 19, 20, 29, 30, 39, 40, 79)] == [
        [3],
        [3],
        [2, 3],
        [2, 3],
        [1, 2, 3],
        [1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 1}, "layers=1: a model of one layer has no early exit"),
        ({"dropout": 1.0}, r"dropout=1.0; expected a probability in \[0, 1\)"),
        ({"exit_scale": -0.1}, "exit_scale=-0.1; expected 0 or more"),
        ({"ramp": "linear"}, "ramp='linear'; expected constant or exponential"),
        ({"curriculum": "rot"}, "curriculum='rot'; expected all, rotational, gradual"),
        ({"every": 5}, "every=5; expected 1 to the 4 layers"),
    ],
)
def test_schedules_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**{"layers": 4, "steps": 10, **options})


# ---- The loss ----


def by_hand(own: Any, batch: Batch, skip: tuple[int, ...] = ()) -> tuple[jax.Array, jax.Array]:
    """Sums of cross-entropy and of right first choices behind each layer, `[L]` each, from partial passes."""
    network = merge(graph(CONFIG)[0], own)
    mask, label = batch.predicts, jnp.roll(batch.tokens, -1, axis=1)
    losses, hits = [], []
    for stop in range(1, LAYERS + 1):
        out = network.full(batch.tokens, batch.positions, batch.segments, stop=stop, skip=skip, taps=("normed",))
        log_p = jax.nn.log_softmax(network.logits(out.taps["normed"]), -1)
        losses.append(-jnp.sum(jnp.where(mask, jnp.take_along_axis(log_p, label[..., None], -1)[..., 0], 0)))
        hits.append(jnp.sum(mask & (jnp.argmax(log_p, -1) == label)))
    return jnp.stack(losses), jnp.stack(hits)


@functools.cache
def gradients() -> tuple[Any, Any]:
    """Of the objective and of the sum by hand, as functions of the step."""
    made = objective()

    def mine(own: Any, step: jax.Array) -> jax.Array:
        return made.loss({"target": own}, {"step": step}, None, BATCH, jax.random.key(0)).sum

    def expected(own: Any, step: jax.Array) -> jax.Array:
        return jnp.sum(made.schedule.weights(step) * by_hand(own, BATCH)[0])

    return jax.jit(jax.value_and_grad(mine)), jax.jit(jax.value_and_grad(expected))


@pytest.mark.parametrize("step", [0, 30, STEPS])
def test_value_and_gradient_are_those_of_the_weighted_exits(step: int) -> None:
    """At first the last layer alone counts, then more: exits that are off leave no trace."""
    mine, expected = (fn(params(), jnp.asarray(step)) for fn in gradients())
    assert float(mine[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(mine[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=jax.tree_util.keystr(path))
        assert jnp.any(a != 0), jax.tree_util.keystr(path)


def test_held_out_rows_are_measured_behind_every_layer() -> None:
    found = jax.jit(lambda p: objective(dropout=0.5).loss({"target": p}, {}, None, BATCH, None))(params())
    losses, hits = jax.jit(by_hand)(params(), BATCH)
    count = float(jnp.sum(BATCH.predicts))
    assert float(found.weight) == count == 8 + 11 + 16
    for i in range(LAYERS):
        loss, match = found.metrics[f"loss_exit_{i + 1}"], found.metrics[f"match_exit_{i + 1}"]
        assert float(loss[0]) == pytest.approx(float(losses[i]), rel=1e-5) and float(match[0]) == float(hits[i])
        assert float(loss[1]) == float(match[1]) == count
    assert float(found.sum) == pytest.approx(float(losses[-1]), rel=1e-5)
    assert found.metrics["match"] == found.metrics[f"match_exit_{LAYERS}"]
    assert float(found.metrics["match_exits"][0]) == pytest.approx(float(np.mean(hits)))


def test_rows_skip_the_layers_that_are_dropped_for_them() -> None:
    network = merge(graph(CONFIG)[0], params())
    kept = jnp.asarray([[True, True], [False, True], [True, False]])
    found = layer_outputs(network, BATCH, kept)
    for row, skip in enumerate([(1,), (2,)]):
        expected = network.full(BATCH.tokens, BATCH.positions, BATCH.segments, skip=skip).hidden
        np.testing.assert_allclose(found[-1, row], expected[row], atol=1e-5)
    np.testing.assert_array_equal(found[1, 0], found[0, 0])


def test_dropout_is_drawn_a_layer_and_row_with_the_key() -> None:
    """Every loss is that of some set of dropped layers; the first layer is never dropped, the last one often."""
    made = objective(dropout=0.6, exit_scale=0.0, ramp="constant")
    one = jax.tree.map(lambda x: x[:1], BATCH)

    @jax.jit
    def losses(own: Any, keys: jax.Array) -> jax.Array:
        return jax.lax.map(lambda k: made.loss({"target": own}, {"step": jnp.asarray(0)}, None, one, k).sum, keys)

    found = np.asarray(losses(params(), jax.random.split(jax.random.key(1), 64)))
    sets = [(), (1,), (2,), (1, 2)]
    known = np.asarray([float(by_hand(params(), one, skip)[0][-1]) for skip in sets])
    which = np.argmin(np.abs(found[:, None] - known), axis=1)
    np.testing.assert_allclose(found, known[which], rtol=1e-4)
    counts = np.bincount(which, minlength=4)
    assert (counts > 0).all()
    # 0.6 (sqrt 2 - 1) = 0.25 and 0.6.
    assert 0.1 < counts[[1, 3]].sum() / 64 < 0.42 and 0.4 < counts[[2, 3]].sum() / 64 < 0.8


def test_the_trainer_tells_the_objective_the_step() -> None:
    target = dataclasses.replace(
        tiny_target(width=16), config=CONFIG, graph=graph(CONFIG)[0], params=params(), config_hash=config_hash(CONFIG)
    )
    trainer = Trainer(
        target=target,
        objective=objective(),
        tables={},
        optimizer=OptimizerConfig(learning_rate=1e-4, steps=STEPS),
        config=TrainerConfig(steps=STEPS, batch=2, best="x/match"),
        train=TextRows(BATCH),
        held_out={},
    )
    losses, _ = jax.jit(by_hand)(params(), BATCH)
    for step in (0, STEPS):
        state = dataclasses.replace(trainer.init(), step=jnp.asarray(step, jnp.int32))
        _, metrics = trainer.step(state, BATCH)
        expected = jnp.sum(trainer.objective.schedule.weights(jnp.asarray(step)) * losses) / jnp.sum(BATCH.predicts)
        assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_there_is_no_drafter_to_save() -> None:
    with pytest.raises(ValueError, match="LayerSkip trains the target, no drafter"):
        objective().export({}, {}, {})
