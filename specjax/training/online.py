"""The target's hidden states computed in the training step itself, where a pass of the target is cheap to repeat.

On accelerators this replaces the hidden-state store: no disk, any amount of text. The arrays are those of the store,
not rounded to bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import Decoder, Tap
from specjax.parallel import on_own_rows
from specjax.training.data import Batch

CHUNK = 1024  # Positions whose logits exist at a time on a device.


def online_taps(objective: Any, chosen: Sequence[Tap] = ()) -> tuple[Tap, ...]:
    """The layer inputs to compute beside the final hidden state: those chosen, or else those the objective reads.

    Raises:
        ValueError: the objective reads one that is not among those chosen.
    """
    own = tuple(tap for tap in getattr(getattr(objective, "config", None), "taps", ()) if isinstance(tap, int))
    if missing := [tap for tap in own if chosen and tap not in chosen]:
        raise ValueError(
            f"data.taps={tuple(chosen)} lacks {', '.join(map(str, missing))} of the layer inputs {own} that the "
            "objective reads; add them, or leave data.taps empty for just these"
        )
    return tuple(chosen) or own


def with_hidden_states(target: Decoder, batch: Batch, taps: tuple[Tap, ...]) -> Batch:
    """A batch with what the frozen target computes on it; no gradient flows into the target.

    Args:
        target: the target.
        batch: packed rows of text.
        taps: layer inputs to keep besides the final hidden state.
    """
    out = target.full(batch.tokens, batch.positions, batch.segments, taps=(*taps, "normed"))
    kept = {str(tap): jax.lax.stop_gradient(out.taps[tap]) for tap in (*taps, "normed")}
    normed = kept.pop("normed")
    lse = jax.lax.stop_gradient(_log_sum_exp(target, normed))
    return dataclasses.replace(batch, normed=normed, lse=jnp.where(batch.predicts, lse, 0.0), taps=kept)


def _log_sum_exp(target: Decoder, normed_btd: jax.Array) -> jax.Array:
    """Float32 `[B, T]`, without logits for more than a chunk of positions; every device does its own rows."""

    def own(_: Any, x_btd: jax.Array) -> tuple[tuple[()], jax.Array]:
        flat = x_btd.reshape(-1, x_btd.shape[-1])
        chunk = min(CHUNK, len(flat))
        size = -(-len(flat) // chunk) * chunk
        chunks = jnp.pad(flat, ((0, size - len(flat)), (0, 0))).reshape(-1, chunk, flat.shape[-1])
        lse = jax.lax.map(lambda x: jax.nn.logsumexp(target.logits(x).astype(jnp.float32), axis=-1), chunks)
        return (), lse.reshape(-1)[: len(flat)].reshape(x_btd.shape[:2])

    return on_own_rows(own, normed_btd)[1]
