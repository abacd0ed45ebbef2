"""NaN logits end a row with a named fault instead of emitting token 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def find_fault(logits_bmv: jax.Array) -> jax.Array:
    """`[B]` int32: the first node (0 the root) with a NaN logit, or -1."""
    bad_bm = jnp.isnan(jnp.max(logits_bmv, axis=-1))  # max keeps a NaN
    return jnp.where(bad_bm.any(-1), jnp.argmax(bad_bm, -1), -1).astype(jnp.int32)
