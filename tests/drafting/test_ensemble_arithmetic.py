"""Ensembles: the arithmetic of each method, on numbers that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Draft, Keys
from specjax.decoding.sampling import DRAFT
from specjax.decoding.tree import chain
from specjax.drafting.ensemble.members import fold
from specjax.drafting.ensemble.mixture import acceptance_gradient, mix
from specjax.drafting.ensemble.proxy import pick
from specjax.drafting.ensemble.union import join, merge_prefixes
from specjax.drafting.ensemble.vote import vote


def test_members_draw_with_keys_of_their_own() -> None:
    keys = Keys(jnp.asarray([[1, 2], [3, 4]], jnp.uint32), jnp.asarray([9, 9]))
    draws = [np.asarray(k.uniform(DRAFT, 0)) for k in (keys, fold(keys, 0), fold(keys, 1), fold(fold(keys, 0), 0))]
    assert len({float(x) for pair in draws for x in pair}) == 8


def drawn_chain(tokens: list[int], law: int = 0) -> Draft:
    laws = jnp.full((1, len(tokens), 5), jnp.log(0.2)) + law
    return chain(jnp.asarray([tokens], jnp.int32), laws=laws)


def test_shared_prefixes_are_merged() -> None:
    drafts = [drawn_chain([1, 2, 3]), chain(jnp.asarray([[1, 4]], jnp.int32), laws=None), drawn_chain([1, 2, 0], 1)]
    joined = join(drafts)
    assert joined.law.tolist() == [[0, 1, 2, -1, -1, 3, 4, 5]] and joined.laws.shape == (1, 6, 5)
    assert joined.parents.tolist() == [[-1, 0, 1, -1, 3, -1, 5, 6]]
    merged = merge_prefixes(joined)
    # 1 -> 2 -> 3, beside it 1 -> 4 under the first 1, and 1 -> 2 -> 0 under the first 2.
    assert merged.parents.tolist() == [[-1, 0, 1, -1, 0, -1, 0, 1]]
    invalid = merge_prefixes(dataclasses.replace(joined, valid=joined.valid.at[:, 0].set(False)))
    assert invalid.parents.tolist() == [[-1, 0, 1, -1, 3, -1, 3, 6]]


def test_votes_ties_and_abstentions() -> None:
    runs = jnp.asarray(
        [
            [[4], [7], [7]],  # two against one
            [[4], [7], [-1]],  # a tie: who was right more often
            [[4], [-1], [-1]],  # one vote is enough
            [[-1], [-1], [-1]],  # nobody votes
            [[4], [7], [5]],  # all differ, equal accuracy: the first
        ]
    )
    accuracy = jnp.asarray([[0.9, 0.1, 0.1], [0.1, 0.9, 0.5], [0.0, 1, 1], [1, 1, 1], [0.5, 0.5, 0.5]])
    winner, agreeing = vote(runs, accuracy)
    assert winner[:3].tolist() == [1, 1, 0] and winner[4] == 0
    assert agreeing.tolist() == [2, 1, 1, 0, 1]


def test_a_run_is_voted_on_whole() -> None:
    runs = jnp.asarray([[[4, 1], [4, 2], [4, 2]], [[4, 1], [4, 2], [4, -1]]])
    winner, agreeing = vote(runs, jnp.full((2, 3), 0.5))
    assert winner.tolist() == [1, 0] and agreeing.tolist() == [2, 1]


def test_mixtures_leave_out_members_without_a_law() -> None:
    with np.errstate(divide="ignore"):
        laws = jnp.asarray(np.log([[[0.5, 0.5, 0], [0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]]))
    q, some = mix(laws, jnp.asarray([[0.2, 0.3, 0.5]] * 2))
    np.testing.assert_allclose(q[0], [0.2, 0.2, 0.6], atol=1e-6)
    assert some.tolist() == [True, False] and abs(float(q[1].sum()) - 1) < 1e-6


def test_the_gradient_of_acceptance() -> None:
    key = jax.random.split(jax.random.key(3), 3)
    laws = jax.nn.log_softmax(2 * jax.random.normal(key[0], (1, 1, 3, 6)))
    p = jax.nn.softmax(2 * jax.random.normal(key[1], (1, 1, 6)))
    weights = jax.nn.softmax(jax.random.normal(key[2], (1, 3)))

    def alpha(w: jax.Array) -> jax.Array:
        return jnp.minimum(p[0, 0], w[0] @ jnp.exp(laws[0, 0])).sum()

    np.testing.assert_allclose(acceptance_gradient(p, laws, weights)[:, 0], jax.grad(alpha)(weights), atol=1e-6)
    silent = laws.at[:, :, 1].set(-jnp.inf)
    gain = acceptance_gradient(p, silent, weights)[0, 0]
    assert min(gain[0], gain[2]) <= gain[1] <= max(gain[0], gain[2])


def test_the_chosen_run_keeps_its_own_laws() -> None:
    fixed = chain(jnp.asarray([[3, 4], [3, 4]], jnp.int32), laws=None)
    laws = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (2, 2, 5)))
    drawn = chain(jnp.asarray([[1, 2], [0, 1]], jnp.int32), laws=laws)
    draft = pick([fixed, drawn], jnp.asarray([0, 1]))
    assert draft.tokens.tolist() == [[3, 4], [0, 1]] and draft.law.tolist() == [[-1, -1], [0, 1]]
    np.testing.assert_array_equal(draft.laws[1], laws[1])
    assert draft.is_chain and pick([fixed, fixed], jnp.asarray([0, 1])).laws.shape == (2, 0, 1)
