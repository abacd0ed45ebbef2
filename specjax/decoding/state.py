"""All that a decoding loop carries. Every leaf has B first: a new request enters a finished row by `tree_map`."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding.draft import Context, Verdict
from specjax.decoding.processors import History
from specjax.decoding.sampling import Sampling
from specjax.models import KVCache


@flax.struct.dataclass
class Statistics:
    """Counts a row. What a cut (end of sequence, stop sequence, budget, fault) took from a block is in none of them.

    Attributes:
        steps: `[B]` int32 target passes.
        emitted: `[B]` int32 tokens that those passes emitted (the prefill's first token is not among them).
        accepted: `[B, D + 1]` int32, steps that emitted 0..D accepted draft tokens.
        reached: `[B, D]` int32, steps whose verification tried a node at this depth and emitted a token there.
        overlap: `[B, D]` float32, sum of the overlap at each depth over those steps.
    """

    steps: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    reached: jax.Array
    overlap: jax.Array

    def add(self, verdict: Verdict, emitted_b: jax.Array) -> Statistics:
        """Counts one step of the rows that emitted anything."""
        on = (emitted_b > 0).astype(jnp.int32)
        hit = jnp.arange(self.accepted.shape[1]) == jnp.minimum(verdict.num_accepted, emitted_b)[:, None]
        emitted = jnp.arange(self.reached.shape[1]) < emitted_b[:, None]
        reached = ~jnp.isnan(verdict.overlap) & emitted
        return Statistics(
            steps=self.steps + on,
            emitted=self.emitted + emitted_b,
            accepted=self.accepted + hit * on[:, None],
            reached=self.reached + reached,
            overlap=self.overlap + jnp.where(reached, verdict.overlap, 0.0),
        )


def init_statistics(batch: int, depth: int) -> Statistics:
    """All zero."""
    return Statistics(
        steps=jnp.zeros((batch,), jnp.int32),
        emitted=jnp.zeros((batch,), jnp.int32),
        accepted=jnp.zeros((batch, depth + 1), jnp.int32),
        reached=jnp.zeros((batch, depth), jnp.int32),
        overlap=jnp.zeros((batch, depth), jnp.float32),
    )


@flax.struct.dataclass
class DecodeState:
    """The carry of the decoding loop.

    The target cache holds `length - 1` entries; the root `tokens[length - 1]` is not yet fed.

    Attributes:
        tokens: `[B, L]` int32, prompt and output; what lies behind `length` is undefined.
        length: `[B]` int32 committed tokens.
        prompt_length: `[B]` int32.
        limit: `[B]` int32, the length at which the budget (or the context) ends.
        done: `[B]` bool.
        finish: `[B]` int32, see `FINISH_NAMES`.
        fault: `[B]` int32, -1 or the position whose logits were NaN or infinite.
        request: `[B, 2]` uint32 key data of the request.
        sampling: per-row parameters.
        cache: the target's.
        drafter: the drafter's own state.
        statistics: counts since the prefill.
        history: of tokens, for penalties; None where no row has any.
        stops: `[B, S, K]` int32 stop sequences (see `termination.stop_array`); None where no row has any.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    limit: jax.Array
    done: jax.Array
    finish: jax.Array
    fault: jax.Array
    request: jax.Array
    sampling: Sampling
    cache: KVCache
    drafter: Any
    statistics: Statistics
    history: History | None = None
    stops: jax.Array | None = None

    @property
    def context(self) -> Context:
        """What a drafter sees."""
        return Context(self.tokens, self.length, self.sampling, self.history)


def insert_row(state: DecodeState, row: int | jax.Array, new: DecodeState) -> DecodeState:
    """Puts the single row of `new` (a prefilled request of the same shapes) into `row` of `state`."""

    def put(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, fresh.astype(old.dtype), row, axis=0)

    return jax.tree.map(put, state, new)
