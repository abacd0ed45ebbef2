"""Lossy rules are what they say, by hand-made laws, and a G-test says that they are lossy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Draft, Keys, Scores, make_sampling
from specjax.decoding.tree import depths
from specjax.testing.laws import draw_sequences, p_value, plain, step_keys, tree_draft
from specjax.verification import Lenient, Threshold, Typical

ROOT, SHARP, FLAT = [0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]


def verdict_of(rule, tokens, parents, laws):
    """The rule's verdict on one tree of fixed choices, with the target's laws at root and nodes."""
    parents = jnp.asarray([parents], jnp.int32)
    tokens = jnp.asarray([tokens], jnp.int32)
    draft = Draft(tokens, parents, tokens >= 0, jnp.full_like(tokens, -1), jnp.zeros((1, 0, 1)))
    logits = jnp.log(jnp.asarray([laws], jnp.float32))
    scores = Scores(logits, jnp.argmax(logits, -1), depths(parents), {})
    return jax.tree.map(
        lambda x: np.asarray(x)[0],
        jax.jit(lambda *a: rule.verify(*a))(draft, scores, make_sampling([1.0]), step_keys(1, 0)),
    )


def test_threshold_accepts_above_its_bar():
    tokens, parents, laws = [2, 1, 0, 0], [-1, -1, 1, 0], [ROOT, SHARP, SHARP, FLAT, FLAT]
    # 0.15 and 0.3 at the root, 0.97 under either.
    assert verdict_of(Threshold(2, bar=0.2), tokens, parents, laws).path.tolist() == [1, 2]
    # Two paths of two: the likelier is taken, although it comes later.
    assert verdict_of(Threshold(2, bar=0.1), tokens, parents, laws).path.tolist() == [1, 2]
    # The longest is taken, although a shorter one is likelier.
    assert verdict_of(Threshold(2, bar=0.1), [2, 1, 1, 0], parents, laws).path.tolist() == [0, 3]
    found = verdict_of(Threshold(2, bar=0.31), tokens, parents, laws)
    assert found.path.tolist() == [-1, -1] and found.num_accepted == 0
    # Of the first child 0.15, whether or not it was accepted; nothing below the root was reached.
    assert found.overlap[0] == pytest.approx(0.15) and np.isnan(found.overlap[1])


def test_typical_lowers_its_bar_with_entropy():
    """At a flat law delta exp(-H) = 0.3 / 4 < 0.09, and 0.25 passes; at the root the bar is 0.09."""
    laws = [ROOT, FLAT, SHARP, FLAT, FLAT]
    parents = [-1, -1, 0, 1]
    entropy = -sum(p * np.log(p) for p in ROOT)
    bar = min(0.09, 0.3 * np.exp(-entropy))
    assert 0.05 < bar < 0.15
    assert verdict_of(Typical(2), [2, 3, 3, 0], parents, laws).path.tolist() == [0, 2]
    assert verdict_of(Typical(2), [3, 3, 3, 0], parents, laws).path.tolist() == [-1, -1]
    # The same token under a sharp law: 0.01 is below the hard bar.
    assert verdict_of(Typical(2), [3, 2, 3, 3], parents, laws).path.tolist() == [1, -1]
    # By entropy alone the bar is 0.9 exp(-H): 0.29 at the root, 0.225 at the flat law.
    assert verdict_of(Typical(2, epsilon=1.0, delta=0.9), [1, 2, 3, 3], parents, laws).path.tolist() == [0, 2]


@pytest.mark.parametrize(("uniform", "accepted"), [(0.59, 1), (0.61, 0)])
def test_lenient_multiplies_q(uniform, accepted, monkeypatch):
    """p(x) = 0.15 and q(x) = 1: accepted with 0.15 / 0.25."""
    monkeypatch.setattr(Keys, "uniform", lambda self, purpose, slot: jnp.full_like(self.length, uniform, jnp.float32))
    found = verdict_of(Lenient(1, leniency=0.25), [2], [-1], [ROOT, FLAT])
    assert found.num_accepted == accepted
    assert accepted or found.next_token != 2  # the residual is the exact rule's


@pytest.mark.parametrize(
    "rule", [pytest.param(Typical(2), marks=pytest.mark.slow), Threshold(2, bar=0.1), Lenient(2, leniency=0.7)]
)
def test_a_g_test_finds_them_out(rule):
    tokens, accepted = draw_sequences(rule, tree_draft("iid"), plain, draws=1 << 14)
    assert accepted > 0.1
    assert p_value(tokens, plain) < 1e-6
