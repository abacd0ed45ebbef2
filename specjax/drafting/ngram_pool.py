"""A pool of n-grams by their first token: hashed buckets of a fixed size, the least recently used entry gives way."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

HASH = 2654435761  # Knuth's multiplicative hash, so that neighbouring ids spread over the buckets.


@flax.struct.dataclass
class Pool:
    """n-grams of each row, K buckets of G entries.

    Attributes:
        first: `[B, K, G]` int32 first token of each entry; -1 while it is empty.
        rest: `[B, K, G, J]` int32 the n - 1 tokens behind it.
        used: `[B, K, G]` int32, when the entry was last put in; 0 while it is empty.
        clock: `[B]` int32, counts what was put in.
    """

    first: jax.Array
    rest: jax.Array
    used: jax.Array
    clock: jax.Array


def init_pool(batch: int, buckets: int, entries: int, rest: int) -> Pool:
    """An empty pool for n-grams of `rest + 1` tokens."""
    shape = (batch, buckets, entries)
    return Pool(
        first=jnp.full(shape, -1, jnp.int32),
        rest=jnp.zeros((*shape, rest), jnp.int32),
        used=jnp.zeros(shape, jnp.int32),
        clock=jnp.zeros((batch,), jnp.int32),
    )


def bucket_of(token_b: jax.Array, buckets: int) -> jax.Array:
    """`[B]` int32 bucket that a first token belongs to."""
    mixed = token_b.astype(jnp.uint32) * jnp.uint32(HASH)
    return ((mixed >> 8) % buckets).astype(jnp.int32)


def look_up(pool: Pool, first_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The n-grams that begin with a token: what follows it `[B, G, J]`, and which of these are there `[B, G]`."""
    bucket = bucket_of(first_b, pool.first.shape[1])
    return _at(pool.rest, bucket), _at(pool.first, bucket) == first_b[:, None]


def put_all(pool: Pool, grams_bwn: jax.Array, wanted_bw: jax.Array) -> Pool:
    """Puts W n-grams in, in order; one that is there already counts as used anew.

    Args:
        pool: is replaced.
        grams_bwn: first token and the n - 1 behind it.
        wanted_bw: bool, which of them to put in.
    """
    rows = jnp.arange(grams_bwn.shape[0])
    entries = pool.first.shape[2]

    def body(i: jax.Array, pool: Pool) -> Pool:
        first, rest, wanted = grams_bwn[:, i, 0], grams_bwn[:, i, 1:], wanted_bw[:, i]
        bucket = bucket_of(first, pool.first.shape[1])
        known = (_at(pool.first, bucket) == first[:, None]) & (_at(pool.rest, bucket) == rest[:, None]).all(-1)
        oldest = jnp.argmin(_at(pool.used, bucket), axis=1)
        slot = jnp.where(known.any(1), jnp.argmax(known, axis=1), oldest)
        slot = jnp.where(wanted, slot, entries)  # an index that is dropped
        clock = pool.clock + wanted
        return Pool(
            first=pool.first.at[rows, bucket, slot].set(first, mode="drop"),
            rest=pool.rest.at[rows, bucket, slot].set(rest, mode="drop"),
            used=pool.used.at[rows, bucket, slot].set(clock, mode="drop"),
            clock=clock,
        )

    return jax.lax.fori_loop(0, grams_bwn.shape[1], body, pool)


def _at(array_bk: jax.Array, bucket_b: jax.Array) -> jax.Array:
    return jax.vmap(lambda array, bucket: array[bucket])(array_bk, bucket_b)
