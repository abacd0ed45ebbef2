"""Plain decoding as a drafter that drafts nothing: N = 0 through the same loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class Autoregressive(Stateless):
    """One token a pass; the baseline of every speedup."""

    taps: tuple[Tap, ...] = ()
    num_nodes: int = 0
    num_probes: int = 0
    depth: int = 0

    def kind(self, sampling: Sampling) -> Kind:
        """Nothing is drafted, so nothing is drawn."""
        del sampling
        return "fixed"

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
