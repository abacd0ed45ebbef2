"""Medusa-2: the target stands still while the heads warm up, and is not spoilt when it moves."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.medusa import MedusaConfig
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig
from specjax.training.data import TextRows, lay_out, pack
from specjax.training.objectives.heads import HeadsLoss
from specjax.training.objectives.medusa_joint import MedusaJoint
from specjax.training.objectives.registry import PRETRAINING
from tests.training import common

STEPS, WARMUP = 12, 4


@pytest.fixture(scope="module")
def target():
    return tiny_target(layers=1, width=16)


def objective(target, **changes):
    c = target.config
    heads = MedusaConfig(hidden_size=c.hidden_size, vocab_size=c.vocab_size, head_size=c.vocab_size, num_heads=2)
    return MedusaJoint(c, heads, HeadsLoss(ranks=2), **({"warmup": WARMUP} | changes))


def trainer(target, made):
    rows, _ = pack(common.documents(target, 40), 96)
    return Trainer(
        target=target,
        objective=made,
        tables={},
        optimizer=OptimizerConfig(learning_rate=3e-3, steps=STEPS, schedule="constant", rates=(("heads", 4.0),)),
        config=TrainerConfig(steps=STEPS, batch=2, best="held/match", log_every=1, eval_every=STEPS),
        train=TextRows(lay_out(rows[2:], 96)),
        held_out={"held": TextRows(lay_out(rows[:2], 96))},
    )


def moved(a, b):
    return [float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]


@pytest.fixture(scope="module")
def history(target):
    """Parameters after every update, and what is held out before and after."""
    made = trainer(target, objective(target, anchor=0.3))
    state = made.init()
    params = [jax.tree.map(jnp.copy, state.params)]
    before = made.evaluate(state.params)
    for step in range(STEPS):
        first = 2 * (step % (made.train.rows // 2))
        state, metrics = made.step(state, made.load(made.train, np.arange(first, first + 2)))
        assert math.isfinite(float(metrics["loss"]))
        params.append(jax.tree.map(jnp.copy, state.params))
    return params, before, made.evaluate(state.params)


def test_the_target_changes_only_in_the_joint_stage(target, history):
    params, _, _ = history
    assert max(moved(params[0]["target"], target.params)) == 0
    for step in range(1, STEPS + 1):
        still = max(moved(params[step]["target"], params[step - 1]["target"])) == 0
        assert still == (step <= WARMUP)
        # A head's bias and weight; all of them move in both stages.
        assert min(moved(params[step]["heads"], params[step - 1]["heads"])) > 0
    assert min(moved(params[-1]["target"]["layers"], params[0]["target"]["layers"])) > 0


def test_the_target_does_not_get_worse(history):
    _, before, after = history
    perplexity = [math.exp(found["held/loss_next"]) for found in (before, after)]
    assert perplexity[1] < perplexity[0]
    assert before["held/loss"] == before["held/loss_next"] and after["held/loss"] == after["held/loss_next"]
    # A teacher-forced head that learns is right more often.
    assert after["held/match_0"] >= before["held/match_0"]


def test_the_loss_is_the_papers(target):
    """L_LM + lambda_0 sum decay^i L_i, at the start, where heads say what the target says."""
    made = objective(target, warmup=0, weight=0.5)
    document = common.documents(target, 1)[0]
    batch = lay_out([[document]], 96)
    params = made.init(jax.random.key(0), common.network(target), {})
    loss = jax.jit(lambda p: made.loss(p, {"step": 0}, common.network(target), batch, jax.random.key(0)))(params)
    law = np.asarray(jax.nn.log_softmax(common.logits(target, document), -1), np.float64)
    tokens, first = document.tokens, document.prompt_length - 1
    count = len(tokens) - 1 - first
    own = -sum(law[t, tokens[t + 1]] for t in range(first, len(tokens) - 1))
    heads = [-sum(law[t, tokens[t + 2 + i]] for t in range(first, len(tokens) - 2 - i)) for i in range(2)]
    assert float(loss.weight) == count
    assert float(loss.sum) == pytest.approx(own + 0.5 * (heads[0] + 0.8 * heads[1]), rel=1e-4)


def test_what_cannot_be_trained(target):
    made = objective(target)
    with pytest.raises(ValueError, match="joint training shares the target's whole product of 259"):
        dataclasses.replace(made, config=dataclasses.replace(made.config, head_size=9))
    with pytest.raises(ValueError, match="teacher=0.5: the target's law changes"):
        dataclasses.replace(made, criterion=HeadsLoss(teacher=0.5))
    with pytest.raises(ValueError, match="anchor=2"):
        objective(target, anchor=2)
    with pytest.raises(ValueError, match="warmup=5 of steps=5: the target would never be trained"):
        PRETRAINING["medusa2"](target, 5, num_heads=2, warmup=5)


def test_heads_are_exported_for_the_new_target(target):
    saved = objective(target).export({"target": {}, "heads": {0: {}, 1: {}}}, {}, {"held_out": {}})
    assert (saved.method, saved.shares, saved.tables["vocab"].shape) == ("medusa", ("head",), (259,))
    assert set(saved.params) == {"heads"}
