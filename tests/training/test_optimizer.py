from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import OptimizerConfig, make_optimizer


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
