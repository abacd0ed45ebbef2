"""Plain decoding as a drafter that drafts nothing, through the same loop: N = 0, or N nodes that are all invalid."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class Autoregressive(Stateless):
    """One token a pass; the baseline of every speedup.

    Passes of one token and of N + 1 round differently, and in 16-bit precision near-ties turn on it. With `num_nodes`
    the passes have the shape of a verification, for texts that differ from a method's in nothing but the method.

    Attributes:
        num_nodes: N, invalid in every row; 0 for speed.
    """

    taps: tuple[Tap, ...] = ()
    num_nodes: int = 0
    num_probes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 0:
            raise ValueError(f"num_nodes={self.num_nodes} of plain decoding; expected 0, or what a method drafts")

    @property
    def depth(self) -> int:
        """As deep as a chain of its nodes."""
        return self.num_nodes

    @property
    def draft_passes(self) -> int:
        """None: nothing is drafted."""
        return 0

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
        """The empty chain, or one of invalid nodes."""
        del params, tables, target, keys
        draft = chain(jnp.zeros((context.tokens.shape[0], self.num_nodes), jnp.int32), laws=None)
        return dataclasses.replace(draft, valid=jnp.zeros_like(draft.valid)), state, cache
