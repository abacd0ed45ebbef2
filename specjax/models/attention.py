"""Attention: over a KV cache with a scratch mask (decoding), and over whole sequences (training)."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import native
from specjax.models.cache import CHUNK, LayerCache
from specjax.models.config import RopeConfig
from specjax.parallel import active_mesh

NATIVE_TOKENS = 64  # By then XLA's products over many tokens have caught up.
MASKED = -1e30  # Finite: a fully masked chunk must stay an exact no-op of the running softmax.


@flax.struct.dataclass
class View:
    """What the T tokens of one cached pass may see, and where they are written.

    Slots below `prefix` are visible to every token. Slot `prefix + j` is scratch entry j.

    Attributes:
        prefix: `[B]` int32 committed slots.
        mask: `[B, T, M]` bool; token t sees scratch entry j. `M - T` entries were written by earlier passes.
        depths: `[B, M]` int32; scratch entry j stands at position `prefix + depths[j]`.
    """

    prefix: jax.Array
    mask: jax.Array
    depths: jax.Array

    @property
    def start(self) -> jax.Array:
        """`[B]` slot of this pass's first token."""
        return self.prefix + self.mask.shape[2] - self.mask.shape[1]

    @property
    def positions(self) -> jax.Array:
        """`[B, T]` positions of this pass's tokens."""
        return self.prefix[:, None] + self.depths[:, -self.mask.shape[1] :]


def causal_view(prefix_b: jax.Array, tokens: int, earlier: int = 0) -> View:
    """The view of `tokens` consecutive tokens that follow `prefix` and `earlier` scratch entries."""
    batch, width = prefix_b.shape[0], earlier + tokens
    mask = np.tril(np.ones((tokens, width), bool), earlier)
    return View(
        prefix=prefix_b,
        mask=jnp.broadcast_to(mask, (batch, tokens, width)),
        depths=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width)),
    )


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies `[head_dim / 2]` float32, after context-extension scaling."""
    dims = np.arange(0, head_dim, 2, dtype=np.float64)
    inv = rope.theta ** -(dims / head_dim)
    if rope.scaling == "linear":
        inv = inv / rope.factor
    elif rope.scaling == "llama3":
        wavelength = 2 * np.pi / inv
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - low) / (high - low)
        smooth = np.clip(smooth, 0.0, 1.0)
        inv = (1 - smooth) * inv / rope.factor + smooth * inv
    elif rope.scaling == "yarn":
        inv = _yarn(rope, head_dim, inv)
    elif rope.scaling != "none":
        raise ValueError(f"unknown rope scaling {rope.scaling!r}; expected none, linear, llama3 or yarn")
    return inv.astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int, inv: np.ndarray) -> np.ndarray:
    """Peng et al. 2023: keep fast frequencies, interpolate slow ones, a linear ramp between."""

    def dimension(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * np.pi)
        return head_dim * np.log(ratio) / (2 * np.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return inv / rope.factor * ramp + inv * (1 - ramp)


def rotate(x_btnh: jax.Array, positions_bt: jax.Array, rope: RopeConfig) -> jax.Array:
    """Applies the rotary embedding, half-split layout, angles in float32."""
    inv = rope_frequencies(rope, x_btnh.shape[-1])
    angles = positions_bt[..., None].astype(jnp.float32) * inv
    factor = rope.attention_factor
    cos, sin = jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor
    a, b = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_btnh.dtype)


def _scores(q_btkgh: jax.Array, k_bskh: jax.Array, softcap: float) -> jax.Array:
    """Scores `[B, K, G, T, S]` float32 of scaled queries."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q_btkgh, k_bskh, preferred_element_type=jnp.float32)
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def _visible(view: View, slots_s: jax.Array, window: int | None) -> jax.Array:
    """`[B, T, S]`: which of the given cache slots each token attends to."""
    width = view.mask.shape[2]
    entry_bs = slots_s[None] - view.prefix[:, None]
    inside = jnp.clip(entry_bs, 0, width - 1)
    scratch_bts = jnp.take_along_axis(view.mask, inside[:, None, :], axis=2)
    visible = (entry_bs < 0)[:, None] | (((entry_bs >= 0) & (entry_bs < width))[:, None] & scratch_bts)
    if window is None:
        return visible
    depth_bs = jnp.take_along_axis(view.depths, inside, axis=1)
    position_bs = jnp.where(entry_bs < 0, slots_s[None], view.prefix[:, None] + depth_bs)
    return visible & (position_bs[:, None] > view.positions[..., None] - window)


def cached_attention(q_btnh: jax.Array, layer: LayerCache, view: View, window: int | None, softcap: float) -> jax.Array:
    """Attends from T new tokens, already written, to the cache.

    Args:
        q_btnh: scaled, rotated queries.
        layer: keys and values `[B, S, K, H]`, S a multiple of the chunk, or shorter than one.
        view: what is visible.
        window: sliding window in positions, or None.
        softcap: tanh cap on the scores, 0 for none.

    Returns:
        `[B, T, N, H]`, float32 softmax. On a CPU the cost follows the valid length (a native kernel, or where it
        does not fit a loop over chunks with a dynamic trip count); elsewhere it is one dense masked product over the
        capacity.
    """
    batch, tokens, heads, width = q_btnh.shape
    kv_heads = layer.k.shape[2]
    q = q_btnh.reshape(batch, tokens, kv_heads, heads // kv_heads, width)

    def by_length(q: jax.Array, k: jax.Array, v: jax.Array, view: View) -> jax.Array:
        # XLA cannot split a foreign call over devices. Elsewhere than on a CPU this is traced too, and never run.
        if (
            jax.default_backend() == "cpu"
            and q.dtype == k.dtype == jnp.float32
            and tokens <= NATIVE_TOKENS
            and active_mesh() is None
            and native.available()
        ):
            return native.cached_attention(q, k, v, view.prefix, view.mask, view.depths, window=window, softcap=softcap)
        return _chunked(q, k, v, view, window, softcap)

    def dense(q: jax.Array, k: jax.Array, v: jax.Array, view: View) -> jax.Array:
        visible = _visible(view, jnp.arange(k.shape[1]), window)
        scores = jnp.where(visible[:, None, None], _scores(q, k, softcap), MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v, preferred_element_type=jnp.float32)

    out = jax.lax.platform_dependent(q, layer.k, layer.v, view, cpu=by_length, default=dense)
    return out.reshape(batch, tokens, heads, width).astype(q_btnh.dtype)


def _chunked(
    q_btkgh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, view: View, window: int | None, softcap: float
) -> jax.Array:
    """Running softmax over chunks of the cache, from the window's first chunk to the last valid one."""
    batch, tokens, kv_heads, group, width = q_btkgh.shape
    chunk = min(CHUNK, k_bskh.shape[1])
    last = (jnp.max(view.prefix) + view.mask.shape[2] + chunk - 1) // chunk
    first = 0 if window is None else jnp.maximum(jnp.min(view.positions) - window + 1, 0) // chunk

    def body(c: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        top, total, mixed = carry
        k = jax.lax.dynamic_slice_in_dim(k_bskh, c * chunk, chunk, axis=1)
        v = jax.lax.dynamic_slice_in_dim(v_bskh, c * chunk, chunk, axis=1)
        visible = _visible(view, c * chunk + jnp.arange(chunk), window)[:, None, None]
        scores = jnp.where(visible, _scores(q_btkgh, k, softcap), MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        decay = jnp.exp(top - new_top)
        part = jnp.einsum("bkgts,bskh->bkgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * decay + weights.sum(-1), mixed * decay[..., None] + part

    shape = (batch, kv_heads, group, tokens)
    init = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
    _, total, mixed = jax.lax.fori_loop(first, last, body, init)
    return (mixed / total[..., None]).transpose(0, 3, 1, 2, 4)


def full_attention(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    mask_bts: jax.Array,
    softcap: float,
) -> jax.Array:
    """Attention over whole sequences under a boolean mask, for training and reference.

    Args:
        q_btnh: scaled, rotated queries.
        k_bskh: keys.
        v_bskh: values.
        mask_bts: True where token t attends to s; every row has at least one.
        softcap: tanh cap on the scores, 0 for none.

    Returns:
        `[B, T, N, H]`.
    """
    if not softcap:
        return jax.nn.dot_product_attention(q_btnh, k_bskh, v_bskh, mask=mask_bts[:, None], scale=1.0)
    batch, tokens, heads, width = q_btnh.shape
    kv_heads = k_bskh.shape[2]
    q = q_btnh.reshape(batch, tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.where(mask_bts[:, None, None], _scores(q, k_bskh, softcap), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_bskh.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_bskh).reshape(q_btnh.shape).astype(q_btnh.dtype)


def causal_mask(positions_bt: jax.Array, segments_bt: jax.Array, window: int | None) -> jax.Array:
    """`[B, T, T]`: same segment, not later, within the window. Positions restart in each segment."""
    back = positions_bt[:, :, None] - positions_bt[:, None, :]
    mask = (back >= 0) & (segments_bt[:, :, None] == segments_bt[:, None, :])
    return mask if window is None else mask & (back < window)
