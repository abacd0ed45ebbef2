"""What waits for a draft's own layer: the target's hidden states since it last ran (EAGLE, Hydra++)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.decoding import Verdict


def path_nodes(verdict: Verdict) -> jax.Array:
    """`[B, D + 1]` places in a pass of the root and the accepted path, in order; 0 behind its end."""
    nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1) + 1
    return jnp.where(jnp.arange(nodes.shape[1]) <= verdict.num_accepted[:, None], nodes, 0)


def still_pending(
    waiting_bwd: jax.Array, count_b: jax.Array, ran_b: jax.Array, fresh_bwd: jax.Array, new_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What is pending after a verdict: those that were not run, then those that it adds.

    Args:
        waiting_bwd: pending before it, at most W.
        count_b: how many.
        ran_b: how many of them were run.
        fresh_bwd: what the verdict adds.
        new_b: how many; with those that were not run at most W.

    Returns:
        The pending ones `[B, W, d]`, and how many `[B]`.
    """
    width, left_b = waiting_bwd.shape[1], count_b - ran_b
    place = jnp.arange(width)
    index = jnp.where(place < left_b[:, None], ran_b[:, None] + place, width + place - left_b[:, None])
    both = jnp.concatenate([waiting_bwd, fresh_bwd], axis=1)
    return jnp.take_along_axis(both, index[..., None], axis=1), left_b + new_b
