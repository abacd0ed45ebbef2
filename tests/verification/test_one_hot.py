"""The one-hot rule draws only where its draws lead; what it decides is as if it had drawn at every node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Draft, Keys, Scores, make_sampling, request_keys
from specjax.decoding.sampling import SAMPLE, draw, log_law
from specjax.verification import OneHot
from specjax.verification.longest_match import longest_match

ROWS, VOCAB, STEPS = 16, 3, 8
# A chain; a tree; a root with children only. With three tokens, siblings repeat one another.
SHAPES = {"chain": (-1, 0, 1, 2, 3), "tree": (-1, -1, 0, 0, 1, 2, 2, 4), "star": (-1,) * 6}


def case(parents, seed):
    rng, nodes = np.random.default_rng(seed), len(parents)
    depths = np.zeros(nodes + 1, np.int32)
    valid = rng.random((ROWS, nodes)) < 0.9
    for i, parent in enumerate(parents):
        depths[i + 1] = depths[parent + 1] + 1
        valid[:, i] &= valid[:, parent] if parent >= 0 else True
    draft = Draft(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (ROWS, nodes)), jnp.int32),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (ROWS, nodes)),
        valid=jnp.asarray(valid),
        law=jnp.full((ROWS, nodes), -1, jnp.int32),
        laws=jnp.zeros((ROWS, 0, VOCAB)),
        is_chain=parents == SHAPES["chain"],
    )
    logits = jnp.asarray(2 * rng.normal(size=(ROWS, nodes + 1, VOCAB)), jnp.float32)
    scores = Scores(logits, jnp.argmax(logits, -1), jnp.broadcast_to(jnp.asarray(depths), (ROWS, nodes + 1)), {})
    sampling = make_sampling(rng.uniform(0.5, 2, ROWS).tolist(), rng.integers(0, 3, ROWS).tolist())
    keys = Keys(request_keys(seed, list(range(ROWS))), jnp.asarray(rng.integers(2, 50, ROWS), jnp.int32))
    return draft, scores, sampling, keys


def verify(draft, scores, sampling, keys):
    return OneHot(5).verify(draft, scores, sampling, keys)


def drawn_everywhere(draft, scores, sampling, keys):
    laws = log_law(scores.logits, sampling)
    choice = jax.vmap(lambda law, depth: draw(keys.at(SAMPLE, keys.length + depth, 0), law), in_axes=1, out_axes=1)(
        laws, scores.depths
    )
    at_parent = jnp.take_along_axis(laws, (draft.parents + 1)[..., None], axis=1)
    chance = jnp.exp(jnp.take_along_axis(at_parent, draft.tokens[..., None], axis=2)[..., 0])
    return longest_match(draft, scores, choice, chance, 5)


@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_that_no_draw_leads_to_decide_nothing(shape):
    lazy, whole, accepted = jax.jit(verify), jax.jit(drawn_everywhere), 0
    for seed in range(STEPS):
        arguments = case(SHAPES[shape], seed)
        found, expected = lazy(*arguments), whole(*arguments)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        accepted += int(found.num_accepted.sum())
    assert accepted > ROWS * STEPS / 4
