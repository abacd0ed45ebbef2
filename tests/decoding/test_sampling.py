"""Warped laws equal transformers' processors; bad values are named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import log_law, make_sampling
from specjax.decoding.sampling import draw, no_law


@pytest.mark.pitfall("sglang-jax#637")
@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (0.9, 20, 0.6, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 9, 0.9, 0.2),
    ],
)
def test_law_equals_transformers(temperature, top_k, top_p, min_p):
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(size=(3, 200)).astype(np.float32) * 3
    expected = torch.tensor(logits)
    steps = [TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    for step in steps:
        expected = step(None, expected)
    expected = torch.softmax(expected, -1).numpy()
    found = jnp.exp(
        log_law(jnp.asarray(logits), make_sampling([temperature] * 3, [top_k] * 3, [top_p] * 3, [min_p] * 3))
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_rows_have_parameters_of_their_own():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 50)), jnp.float32)
    mixed = jnp.exp(log_law(logits, make_sampling([0.0, 1.0, 0.5], [0, 3, 0], [1.0, 1.0, 0.7])))
    assert (np.asarray(mixed[0] > 0).sum(-1) == 1).all()
    assert (np.argmax(mixed[0], -1) == np.argmax(logits[0], -1)).all()
    assert (np.asarray(mixed[1] > 0).sum(-1) == 3).all()
    alone = jnp.exp(log_law(logits[2:], make_sampling([0.5], [0], [0.7])))
    np.testing.assert_array_equal(mixed[2:], alone)


def test_tokens_tied_with_the_kth_are_kept():
    law = jnp.exp(log_law(jnp.asarray([[2.0, 1.0, 1.0, 0.0]]), make_sampling([1.0], [2])))
    assert (np.asarray(law[0] > 0) == [True, True, True, False]).all()


def test_extreme_logits_stay_finite():
    logits = jnp.asarray([[1e4, -1e4, 0.0, -jnp.inf]])
    for warps in ({}, {"top_k": [2]}, {"top_p": [0.9]}, {"min_p": [0.5]}):
        law = jnp.exp(log_law(logits, make_sampling([1.0], **warps)))
        assert np.isfinite(law).all() and abs(float(law.sum()) - 1) < 1e-6


def test_a_small_temperature_does_not_overflow():
    """Quotients of 1e4 and the smallest temperatures are infinite, and two of them would be no law."""
    logits = jnp.asarray([[1e4, 1e4, 9.9e3, -jnp.inf]] * 3)
    law = jnp.exp(log_law(logits, make_sampling([1e-37, 1e-30, 1.0], [3] * 3, [0.9] * 3, [0.1] * 3)))
    np.testing.assert_allclose(law, [[0.5, 0.5, 0, 0]] * 3, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e30, 2e38, 3.4e38])
def test_a_large_temperature_is_uniform_over_what_is_possible(temperature):
    """XLA divides by multiplying with a reciprocal, which is 0 there, and 0 times -inf is no law."""
    law = jnp.exp(log_law(jnp.asarray([[5.0, -jnp.inf, -5.0]]), make_sampling([temperature])))
    np.testing.assert_allclose(law, [[0.5, 0, 0.5]], atol=1e-6)


def test_a_vocabulary_suppressed_throughout_has_the_law_that_is_drawn_from():
    """As a reduced draft vocabulary may be; without a law nothing could be verified against it."""
    law = log_law(jnp.full((2, 3), -jnp.inf), make_sampling([1.0, 0.0], [2] * 2, [0.9] * 2))
    np.testing.assert_array_equal(jnp.exp(law), [[1, 0, 0]] * 2)
    assert draw(jax.random.split(jax.random.key(0), 2), law).tolist() == [0, 0]


def test_what_is_no_law():
    inf, nan = jnp.inf, jnp.nan
    rows = jnp.asarray([[0.0, -inf], [nan, 1.0], [0.0, inf], [-inf, -inf], [-inf, nan]])
    assert no_law(rows).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("shape", [(1, 5, 49152), (8, 5, 259), (160, 10, 5), (4, 2000)])
def test_what_is_no_law_in_large_arrays(shape):
    """There XLA's maximum on CPUs drops a NaN."""
    logits, find = jax.random.normal(jax.random.key(0), shape), jax.jit(no_law)
    assert not find(logits).any()
    for place in (0, shape[-1] // 2, shape[-1] - 1):
        for value in (jnp.nan, jnp.inf):
            found = find(logits.at[..., -1, place].set(value))
            assert found[..., -1].all() and not found[..., :-1].any()


def test_draws_follow_the_law():
    law = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
    keys = jax.random.split(jax.random.key(0), 20000)
    counts = np.bincount(np.asarray(draw(keys, jnp.broadcast_to(law, (20000, 3)))), minlength=3) / 20000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=0.02)


@pytest.mark.slow
def test_the_law_of_a_long_tail_is_kept():
    """Two million tokens of 5e-8 each beside one of 0.9: with noise of 23 bits that one is drawn with 0.98."""
    law = jnp.full((1, 1 << 21), jnp.log(0.1 / ((1 << 21) - 1))).at[0, 7].set(jnp.log(0.9))
    drawn = [int(draw(jax.random.key(i)[None], law)[0]) == 7 for i in range(128)]
    assert abs(np.mean(drawn) - 0.9) < 0.05


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([-0.1],), r"temperature=-0.1 in row 0"),
        (([float("nan")],), r"temperature=nan in row 0"),
        ((["hot"],), r"temperature=hot in row 0; expected a number >= 0"),
        (([None],), r"temperature=None in row 0"),
        (([1.0, 1.0], [5, -1]), r"top_k=-1 in row 1"),
        (([1.0], [float("inf")]), r"top_k=inf in row 0; expected an integer >= 0"),
        (([1.0], [1 << 40]), r"top_k=1099511627776 in row 0"),
        (([1.0], [0], [0.0]), r"top_p=0.0 in row 0; expected a number in \(0, 1\]"),
        (([1.0], [0], [1.5]), r"top_p=1.5"),
        (([1.0], [0], [1.0], [1.0]), r"min_p=1.0"),
        (([1.0, 1.0], [3]), r"top_k has 1 values for 2 rows"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(*arguments)


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
)
@pytest.mark.parametrize("value", [np.array([0.5, 0.6]), np.array([1.0]), [0.5]])
def test_an_array_is_no_value_of_one_row(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value} in row 0; expected a")):
        make_sampling(**{"temperature": [1.0], name: [value]})
