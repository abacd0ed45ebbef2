from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from specjax.checkpoints.train_state import Checkpoints
from specjax.training import OptimizerConfig, make_optimizer
from specjax.training.optimizer import OPTIMIZERS


def params():
    return {"lm_head": {"kernel": jnp.ones((2, 3))}, "layers": {0: {"w": jnp.ones(4)}, 10: {"w": jnp.ones(4)}}}


def moved(**options):
    """How far two equal steps take every parameter."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, steps=10, schedule="constant", clip=0.0, **options))
    tree, state = params(), optimizer.init(params())
    for _ in range(2):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, tree), state, tree)
        tree = jax.tree.map(jnp.add, tree, updates)
    return jax.tree.map(lambda new, old: np.asarray(new - old), tree, params())


def test_groups_learn_at_their_own_rates():
    base, found = moved(), moved(rates=(("lm_head", 0.5), ("layers/10", 0.0)))
    np.testing.assert_allclose(found["lm_head"]["kernel"], 0.5 * base["lm_head"]["kernel"], rtol=1e-5)
    np.testing.assert_array_equal(found["layers"][10]["w"], 0.0)
    np.testing.assert_array_equal(found["layers"][0]["w"], base["layers"][0]["w"])
    # Weight decay is part of a step, and goes the same way.
    decayed, halved = moved(weight_decay=0.3), moved(weight_decay=0.3, rates=(("lm_head", 0.5),))
    assert not np.allclose(decayed["lm_head"]["kernel"], base["lm_head"]["kernel"], rtol=1e-3)
    first = decayed["lm_head"]["kernel"].mean(), halved["lm_head"]["kernel"].mean()
    assert first[1] == pytest.approx(first[0] / 2, rel=0.02)


def test_a_path_that_no_parameter_has_and_a_pair_that_is_none_are_named():
    with pytest.raises(ValueError, match="no parameter lies at 'layers/1'; there are layers/0/w, layers/10/w, lm_head"):
        moved(rates=(("layers/1", 0.5),))
    for wrong in (("lm_head", -1.0), ("lm_head",), "lm_head"):
        with pytest.raises(ValueError, match="expected a pair of a path and a factor of 0 or more"):
            OptimizerConfig(learning_rate=0.1, steps=10, rates=(wrong,))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_down_and_its_state_is_kept(name, tmp_path):
    config = OptimizerConfig(learning_rate=0.05, steps=30, schedule="constant", weight_decay=0.01, name=name)
    optimizer, tree = make_optimizer(config), params()
    state = optimizer.init(tree)

    @jax.jit
    def step(tree, state):
        updates, state = optimizer.update(tree, state, tree)  # the gradient of half a sum of squares
        return optax.apply_updates(tree, updates), state

    for _ in range(10):
        tree, state = step(tree, state)
    assert all(float(jnp.sum(x**2)) < 0.9 * x.size for x in jax.tree.leaves(tree))
    checkpoints = Checkpoints(epath.Path(tmp_path), "m")
    checkpoints.save(1, {"params": tree, "opt_state": state}, {"m": 0.0})
    checkpoints._manager.wait_until_finished()
    kept = checkpoints.restore(jax.eval_shape(lambda: {"params": params(), "opt_state": optimizer.init(params())}))
    checkpoints.close()
    resumed, expected = step(kept["params"], kept["opt_state"]), step(tree, state)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weight_decay_is_by_the_learning_rate_and_of_matrices_alone():
    for name in OPTIMIZERS:
        without, decayed = (moved(name=name, weight_decay=decay) for decay in (0.0, 0.3))
        np.testing.assert_allclose(decayed["layers"][0]["w"], without["layers"][0]["w"], atol=1e-6)
        # Two steps of 0.1 from 1: by 0.03 each, a little less where a step has gone before.
        assert 0.03 < float((without["lm_head"]["kernel"] - decayed["lm_head"]["kernel"]).mean()) < 0.09, name


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="optimizer 'adam' is unknown; expected adamw, adafactor, lion, muon, sgd"):
        OptimizerConfig(learning_rate=0.1, steps=10, name="adam")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("learning_rate", (0.0, -1.0, math.nan, math.inf)),
        ("clip", (-1.0, math.nan, math.inf)),  # negative, it turned every step uphill
        ("weight_decay", (-5.0, math.nan, math.inf)),
        ("final_fraction", (-0.1, 1.1, math.nan)),
        ("b1", (-0.1, 1.0, math.nan)),
        ("b2", (-0.1, 1.0, math.nan)),
        ("warmup", (-1, 10)),
    ],
)
def test_numbers_out_of_range_are_named(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field}={value}"):
            OptimizerConfig(**{"learning_rate": 0.1, "steps": 10, field: value})


def test_factors_that_are_no_numbers_are_named():
    for factor in (math.nan, math.inf, "a"):
        with pytest.raises(ValueError, match="expected a pair of a path and a factor of 0 or more"):
            OptimizerConfig(learning_rate=0.1, steps=10, rates=(("lm_head", factor),))
