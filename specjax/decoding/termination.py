"""Where a row ends: end-of-sequence tokens, stop sequences, the budget or the context, inside a block or not.

A row's text is cut behind the first token that ends it and nowhere else. Where several ends fall on the same token, an
end-of-sequence token comes before a stop sequence, and both before the budget; NaN logits come before all of them,
because nothing is emitted then.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

RUNNING, STOP, LENGTH, FAULT, STOP_SEQUENCE = range(5)
FINISH_NAMES = {
    RUNNING: "running",
    STOP: "stop",
    LENGTH: "length",
    FAULT: "fault",
    STOP_SEQUENCE: "stop_sequence",
}

MAX_STOP_TOKENS = 32
_PAD = -1  # In front of a stop sequence: agrees with everything.
_OUTSIDE = -2  # A token that no stop sequence may use: it is not part of the output.

Stops = Sequence[Sequence[int]]


def check_stops(stops: Stops, vocab: int, what: str) -> None:
    """Checks one request's stop sequences of token ids.

    Raises:
        ValueError: an empty or too long sequence, or an id outside the vocabulary; `what` names the request.
    """
    for i, stop in enumerate(stops):
        if not isinstance(stop, Sequence | np.ndarray) or isinstance(stop, str):
            raise ValueError(f"stop sequence {i} of {what} is {stop!r}; expected a sequence of token ids")
        if not 1 <= len(stop) <= MAX_STOP_TOKENS:
            raise ValueError(
                f"stop sequence {i} of {what} has {len(stop)} tokens; expected 1 to {MAX_STOP_TOKENS} of them"
            )
        outside = [t for t in stop if not (isinstance(t, numbers.Integral) and 0 <= int(t) < vocab)]
        if outside:
            raise ValueError(f"stop sequence {i} of {what} holds token {outside[0]!r}; expected ids in 0..{vocab - 1}")


def stop_array(stops: Sequence[Stops]) -> np.ndarray | None:
    """`[B, S, K]` int32, one set of stop sequences a row, right-aligned; None where no row has any.

    S and K are rounded up to powers of two, so that few programs are compiled.
    """
    most = max(map(len, stops), default=0)
    if not most:
        return None
    longest = max(len(stop) for row in stops for stop in row)
    array = np.full((len(stops), 1 << (most - 1).bit_length(), 1 << (longest - 1).bit_length()), _PAD, np.int32)
    for row, sequences in zip(array, stops, strict=True):
        for slot, stop in zip(row, sequences, strict=False):
            slot[-len(stop) :] = stop
    return array


def find_stops(
    stops_bsk: jax.Array, tokens_bl: jax.Array, length_b: jax.Array, prompt_length_b: jax.Array, block_bd: jax.Array
) -> jax.Array:
    """`[B, D]` bool: some stop sequence ends with this token of the block.

    A sequence counts where all its tokens are output, from this block or from earlier ones: the prompt's tail is the
    user's own text and never part of one.
    """
    back = stops_bsk.shape[2] - 1
    slots = length_b[:, None] - back + jnp.arange(back)
    earlier = jnp.take_along_axis(tokens_bl, jnp.maximum(slots, 0), axis=1)
    earlier = jnp.where(slots >= prompt_length_b[:, None], earlier, _OUTSIDE)
    text = jnp.concatenate([earlier, block_bd], axis=1)
    windows_bdk = text[:, jnp.arange(block_bd.shape[1])[:, None] + jnp.arange(back + 1)]
    stops = stops_bsk[:, :, None]
    same_bsd = ((stops == _PAD) | (stops == windows_bdk[:, None])).all(-1)
    return (same_bsd & (stops_bsk[:, :, -1] != _PAD)[:, :, None]).any(1)


def cut(
    block_bd: jax.Array,
    offered_b: jax.Array,
    room_b: jax.Array,
    eos: tuple[int, ...],
    stopped_bd: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """How many tokens of a block are emitted, and why the row ends with them.

    Args:
        block_bd: int32 tokens in order.
        offered_b: int32, how many of them the verification gave, at least 1.
        room_b: int32 tokens left of budget and context.
        eos: end-of-sequence ids.
        stopped_bd: where a stop sequence ends; None for no stop sequences.

    Returns:
        `(count [B] int32, finish [B] int32)`, `RUNNING` where the row goes on.
    """
    offered = jnp.arange(block_bd.shape[1]) < offered_b[:, None]
    ended = (block_bd[..., None] == jnp.asarray(eos, jnp.int32)).any(-1)
    to_eos = _first(ended & offered)
    to_stop = _first(stopped_bd & offered) if stopped_bd is not None else jnp.full_like(to_eos, block_bd.shape[1] + 1)
    count = jnp.minimum(jnp.minimum(offered_b, room_b), jnp.minimum(to_eos, to_stop))
    finish = jnp.where(count == room_b, LENGTH, RUNNING)
    finish = jnp.where(count == to_stop, STOP_SEQUENCE, finish)
    return count, jnp.where(count == to_eos, STOP, finish).astype(jnp.int32)


def _first(hit_bd: jax.Array) -> jax.Array:
    """Tokens up to and including the first hit; more than the block has where there is none."""
    return jnp.where(hit_bd.any(-1), jnp.argmax(hit_bd, -1) + 1, hit_bd.shape[1] + 1).astype(jnp.int32)
