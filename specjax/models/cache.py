"""The KV cache: fixed buffers, one valid length a row, a scratch area behind it for tokens under trial."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specjax.models.config import ModelConfig
from specjax.parallel import rows_are_spread

CHUNK = 256
SHORT = 64  # A cache of no more slots is a single, shorter chunk: tests of laws run thousands of short rows.
UNROLLED_ROWS = 16  # Batches above this are scattered on CPUs too: a program with one update a row grows too long.


@flax.struct.dataclass
class LayerCache:
    """Keys and values of one layer.

    Attributes:
        k: `[B, S, K, H]`; slot s < length holds position s, the slots behind it are scratch.
        v: `[B, S, K, H]`.
    """

    k: jax.Array
    v: jax.Array


@flax.struct.dataclass
class KVCache:
    """All layers, and how many slots of each row hold committed tokens.

    Attributes:
        layers: one `LayerCache` a layer; one buffer each, so that every update is in place.
        length: `[B]` int32. Rolling back is lowering it, or not raising it.
    """

    layers: tuple[LayerCache, ...]
    length: jax.Array


def init_cache(config: ModelConfig, batch: int, capacity: int) -> KVCache:
    """An empty cache of at least `capacity` slots a row, rounded up to whole attention chunks (or one short one)."""
    slots = SHORT if capacity <= SHORT else -(-capacity // CHUNK) * CHUNK
    shape = (batch, slots, config.num_kv_heads, config.head_dim)
    # Every leaf its own buffer: a shared one cannot be donated twice.
    layers = tuple(
        LayerCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.num_layers)
    )
    return KVCache(layers, jnp.zeros((batch,), jnp.int32))


def write_rows(buffer_bskh: jax.Array, new_btkh: jax.Array, start_b: jax.Array) -> jax.Array:
    """Writes T consecutive slots of each row from that row's own start."""

    def unrolled(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        for b in range(buffer.shape[0]):
            buffer = jax.lax.dynamic_update_slice(buffer, new[b : b + 1], (b, start[b], 0, 0))
        return buffer

    def scattered(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        # Rows by vmap, not by index: where they are spread over devices, each then writes its own without a collective.
        def row(buffer: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
            return buffer.at[start + jnp.arange(new.shape[0])].set(new, mode="drop", unique_indices=True)

        return jax.vmap(row)(buffer, new, start)

    new = new_btkh.astype(buffer_bskh.dtype)
    if buffer_bskh.shape[0] > UNROLLED_ROWS or rows_are_spread():
        return scattered(buffer_bskh, new, start_b)
    return jax.lax.platform_dependent(buffer_bskh, new, start_b, cpu=unrolled, default=scattered)


def write(layer: LayerCache, k_btkh: jax.Array, v_btkh: jax.Array, start_b: jax.Array) -> LayerCache:
    """Puts new entries at `start_b` of each row; the buffers are updated in place when donated.

    An entry that is not finite must be felt by the tokens that see it and by no others. Masked weights are 0, and 0
    times a value that is not finite would be NaN: such values are written as 0, with keys of NaN beside them.
    """
    finite = jnp.isfinite(v_btkh).all(-1, keepdims=True)
    k_btkh, v_btkh = jnp.where(finite, k_btkh, jnp.nan), jnp.where(finite, v_btkh, 0)
    return LayerCache(write_rows(layer.k, k_btkh, start_b), write_rows(layer.v, v_btkh, start_b))


def compact(cache: KVCache, path_bd: jax.Array) -> KVCache:
    """Moves accepted tree nodes to the slots that follow the root's.

    The root lies at slot `length` and node i at `length + 1 + i`. A chain never needs this: its accepted
    nodes already lie in order.

    Args:
        cache: as the scoring pass left it, `length` not yet raised.
        path_bd: accepted node indices by depth, -1 behind the last.

    Returns:
        The cache with node `path[d]` at slot `length + 1 + d`.
    """
    depth = path_bd.shape[1]
    first_b = cache.length + 1
    slots_bd = first_b[:, None] + jnp.where(path_bd < 0, jnp.arange(depth), path_bd)

    def move(buffer: jax.Array) -> jax.Array:
        kept = jnp.take_along_axis(buffer, slots_bd[:, :, None, None], axis=1)
        return write_rows(buffer, kept, first_b)

    layers = tuple(LayerCache(move(x.k), move(x.v)) for x in cache.layers)
    return dataclasses.replace(cache, layers=layers)
