"""The native attention: the dense product's values, the same bits in every company, and nothing of unseen slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import attention, causal_view, native
from specjax.models.attention import View, cached_attention
from specjax.models.cache import LayerCache

pytestmark = pytest.mark.skipif(not native.available(), reason="no C++ compiler: the native kernels are not used here")
SLOTS = 200


def case(batch: int, heads: int, kv_heads: int, width: int, parents: tuple[int, ...], seed: int = 0):
    """Queries, a cache, and a view of the same random tree behind prefixes of several lengths."""
    rng = np.random.default_rng(seed)
    tokens = len(parents) + 1
    mask, depths = np.eye(tokens, dtype=bool), np.zeros(tokens, np.int32)
    for node, parent in enumerate(parents, 1):
        mask[node] |= mask[parent + 1]
        depths[node] = depths[parent + 1] + 1
    view = View(
        prefix=jnp.asarray(rng.integers(0, SLOTS - tokens, batch), jnp.int32).at[0].set(130),
        mask=jnp.broadcast_to(mask, (batch, tokens, tokens)),
        depths=jnp.broadcast_to(depths, (batch, tokens)),
    )

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q = draw(batch, tokens, heads, width) * 2
    return q, LayerCache(draw(batch, SLOTS, kv_heads, width), draw(batch, SLOTS, kv_heads, width)), view


def dense(q, layer, view, window, softcap):
    """The formula in float64, slot by slot."""
    out = np.zeros(q.shape)
    group = q.shape[2] // layer.k.shape[2]
    q, k, v = (np.asarray(x, np.float64) for x in (q, layer.k, layer.v))
    for b, t, h in np.ndindex(q.shape[:3]):
        prefix, depths = int(view.prefix[b]), np.asarray(view.depths[b])
        slots = [*range(prefix), *(prefix + j for j in np.flatnonzero(view.mask[b, t]))]
        if window:
            at = [s if s < prefix else prefix + depths[s - prefix] for s in slots]
            slots = [s for s, p in zip(slots, at, strict=True) if p > prefix + depths[t] - window]
        scores = k[b, slots, h // group] @ q[b, t, h]
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, slots, h // group]
    return out


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap"),
    [(9, 3, 64, None, 0.0), (4, 4, 5, None, 0.0), (4, 1, 20, 33, 0.0), (6, 2, 40, None, 3.0), (2, 2, 136, 7, 30.0)],
)
def test_values(heads, kv_heads, width, window, softcap):
    q, layer, view = case(3, heads, kv_heads, width, (-1, -1, 0, 2, 1))
    found = jax.jit(cached_attention, static_argnums=(3, 4))(q, layer, view, window, softcap)
    np.testing.assert_allclose(found, dense(q, layer, view, window, softcap), rtol=2e-5, atol=2e-5)


def test_a_token_is_the_same_bits_in_every_batch_and_every_chain():
    q, layer, view = case(5, 6, 2, 24, (0, 1, 2, 3, 4, 5, 6))
    view = dataclasses.replace(causal_view(view.prefix, 8), prefix=view.prefix)
    run = jax.jit(cached_attention, static_argnums=(3, 4))
    whole = np.asarray(run(q, layer, view, None, 0.0))
    for b in range(5):
        row = jax.tree.map(lambda x, b=b: x[b : b + 1], (q, layer, view))
        np.testing.assert_array_equal(run(*row, None, 0.0)[0], whole[b])
        for t in range(8):  # token t alone, its predecessors committed
            one = causal_view(view.prefix[b : b + 1] + t, 1)
            np.testing.assert_array_equal(run(q[b : b + 1, t : t + 1], row[1], one, None, 0.0)[0, 0], whole[b, t])


def test_slots_that_a_token_does_not_see_are_not_touched():
    q, layer, view = case(2, 4, 2, 16, (-1, -1, 0))
    run = jax.jit(cached_attention, static_argnums=(3, 4))
    clean = np.asarray(run(q, layer, view, None, 0.0))
    first = int(view.prefix[0])
    for name in ("k", "v"):
        spoiled = getattr(layer, name).at[0, first + 2].set(jnp.nan).at[0, first + 4 :].set(jnp.inf)
        found = np.asarray(run(q, dataclasses.replace(layer, **{name: spoiled}), view, None, 0.0))
        np.testing.assert_array_equal(found[0, [0, 1, 3]], clean[0, [0, 1, 3]])
        assert np.isnan(found[0, 2]).all()
        np.testing.assert_array_equal(found[1], clean[1])


def test_vmap_adds_rows():
    cases = [case(2, 4, 2, 8, (-1, 0), seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    found = jax.jit(jax.vmap(lambda q, layer, view: cached_attention(q, layer, view, None, 0.0)))(*stacked)
    for one, row in zip(cases, found, strict=True):
        np.testing.assert_array_equal(cached_attention(*one, None, 0.0), row)


def test_many_tokens_and_other_dtypes_fall_to_xla(monkeypatch):
    q, layer, view = case(1, 4, 2, 8, (-1, 0))
    monkeypatch.setattr(native, "cached_attention", lambda *_, **__: pytest.fail("the kernel was called"))
    short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer)
    assert cached_attention(q.astype(jnp.bfloat16), short, view, None, 0.0).dtype == jnp.bfloat16
    many = attention.NATIVE_TOKENS + 1
    long = causal_view(jnp.zeros((1,), jnp.int32), many)
    assert cached_attention(jnp.ones((1, many, 4, 8)), layer, long, None, 0.0).shape == (1, many, 4, 8)


def test_shapes_that_do_not_fit_are_refused():
    q, layer, view = case(1, 4, 2, 8, (-1, 0))
    with pytest.raises(Exception, match="cached_attention expects q"):
        native.cached_attention(
            q.reshape(1, 3, 2, 2, 8),
            layer.k[:, :, :1],
            layer.v,
            view.prefix,
            view.mask,
            view.depths,
            window=None,
            softcap=0.0,
        ).block_until_ready()
