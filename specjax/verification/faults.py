"""Logits that are not a law's end a row with a named fault instead of emitting token 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding.draft import Scores
from specjax.decoding.sampling import no_law


def find_fault(path_bd: jax.Array, scores: Scores) -> jax.Array:
    """`[B]` int32: the first of root (0) and accepted nodes (node i is i + 1) whose logits are no law, or -1.

    Other nodes decide nothing that is emitted: plain decoding would never have run them.

    Args:
        path_bd: `[B, D]` accepted nodes by depth, -1 behind the last.
        scores: of root and nodes.
    """
    slots = jnp.pad(path_bd + 1, ((0, 0), (1, 0)))  # What is behind the last node looks at the root again.
    bad = jnp.take_along_axis(no_law(scores.logits), slots, axis=1)
    first = jnp.take_along_axis(slots, jnp.argmax(bad, -1)[:, None], axis=1)[:, 0]
    return jnp.where(bad.any(-1), first, -1).astype(jnp.int32)
