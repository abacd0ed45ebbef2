"""Layouts of weights: the packed tree is the same network, and its rows are the same bits however many ride along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import causal_view, init_cache, merge, native, pack
from specjax.models.linear import linear
from specjax.testing import tiny_target


@pytest.fixture
def kernel():
    if not native.available():
        pytest.skip("no C++ compiler: the native kernel is not used here")


@pytest.mark.parametrize("inputs, outputs", [(64, 96), (576, 1000), (33, 7), (5, 3)])
def test_native_product(kernel, inputs, outputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, inputs)).astype(np.float32)
    w = rng.normal(size=(outputs, inputs)).astype(np.float32)
    whole = np.asarray(jax.jit(native.skinny_matmul)(x, w))
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-4, atol=1e-4)
    for rows in range(1, 33):
        np.testing.assert_array_equal(jax.jit(native.skinny_matmul)(x[:rows], w), whole[:rows])


def test_shapes_that_do_not_fit_are_refused(kernel):
    with pytest.raises(Exception, match="skinny_matmul expects"):
        jax.block_until_ready(jax.jit(native.skinny_matmul)(jnp.ones((2, 3)), jnp.ones((4, 5))))


def test_packed_tree_is_the_same_network():
    target = tiny_target()
    tokens = jnp.asarray([[5, 6, 7, 8, 9]])

    def run(params):
        network = merge(target.graph, params)
        out, _ = network.cached(
            tokens, init_cache(target.config, 1, 8), causal_view(jnp.zeros((1,), jnp.int32), 5), taps=("normed",)
        )
        return network.logits(out.taps["normed"])

    np.testing.assert_allclose(run(target.params), run(pack(target.params)), rtol=1e-4, atol=1e-4)


def test_many_rows_and_no_compiler_fall_to_xla(monkeypatch):
    x, w = jnp.ones((40, 8)), jnp.arange(24.0).reshape(8, 3)
    np.testing.assert_allclose(linear(x, w.T[None]), x @ w, rtol=1e-5)
    monkeypatch.setattr(native, "available", lambda: False)
    np.testing.assert_allclose(linear(x[:2], w.T[None]), x[:2] @ w, rtol=1e-5)


def test_a_compiler_that_fails_is_said_and_xla_serves(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "compiler", lambda: "false")
    monkeypatch.setattr(native, "CACHE", tmp_path)
    with pytest.warns(RuntimeWarning, match="no native kernels.*false could not compile skinny_matmul.cc"):
        assert not native.available.__wrapped__()
    assert not list(tmp_path.iterdir())


def test_kernels_are_built_where_no_home_can_be_written(kernel, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(native, "CACHE", tmp_path / "file" / "native")
    with pytest.warns(RuntimeWarning, match="native cannot be written.*every process compiles its kernels"):
        cache = native._cache()
    assert cache.is_dir() and not list(cache.iterdir())
