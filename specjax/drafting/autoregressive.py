"""Plain decoding as a drafter that drafts nothing: N = 0 through the same loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """One token a pass; the baseline of every speedup."""

    taps: tuple[Tap, ...] = ()
    num_nodes: int = 0
    num_probes: int = 0
    depth: int = 0

    def kind(self, sampling: Sampling) -> Kind:
        """Nothing is drafted, so nothing is drawn."""
        del sampling
        return "fixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters."""
        del key, target
        return {}, {}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> Any:
        """No state."""
        del params, tables, target, batch, capacity
        return {}

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> Any:
        """Nothing to take in."""
        del params, tables, target, tokens, positions, taps, valid
        return state

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: Any,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, Any, KVCache]:
        """The empty chain."""
        del params, tables, target, keys
        empty = jnp.zeros((context.tokens.shape[0], 0), jnp.int32)
        return chain(empty, laws=None), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: Any,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> Any:
        """Nothing to take in."""
        del params, tables, target, context, draft, scores, verdict
        return state
