"""Logits that are not a law's end a row with a named fault instead of emitting token 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Draft, Scores
from specjax.decoding.sampling import no_law


def find_fault(draft: Draft, scores: Scores) -> jax.Array:
    """`[B]` int32: the first node (0 the root) whose logits are no law, or -1. Invalid nodes do not count."""
    there_bm = jnp.pad(draft.valid, ((0, 0), (1, 0)), constant_values=True)
    bad_bm = no_law(scores.logits) & there_bm
    return jnp.where(bad_bm.any(-1), jnp.argmax(bad_bm, -1), -1).astype(jnp.int32)
