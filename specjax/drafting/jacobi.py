"""Jacobi decoding: the target's guesses at all positions of a block are the next draft (Santilli et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Stateless, Verdict
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap


@flax.struct.dataclass
class JacobiState:
    """The block.

    Attributes:
        block: `[B, N]` int32 guesses at the tokens behind the root.
        started: `[B]` bool, whether the target has made any.
    """

    block: jax.Array
    started: jax.Array


@dataclasses.dataclass(frozen=True)
class Jacobi(Stateless):
    """A block of guesses that slides over the text.

    Each pass takes the block as a chain. What agrees with the target is accepted; the target's own choices behind it
    are the next guesses, and the last of them fills the places that come free. The first block repeats the root. At
    temperature > 0 the guesses are the target's likeliest tokens.

    Attributes:
        num_nodes: N, the block's length.
    """

    num_nodes: int = 8
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; a Jacobi block holds at least 1 token")

    @property
    def depth(self) -> int:
        """The block's length."""
        return self.num_nodes

    def kind(self, sampling: Sampling) -> Kind:
        """Guesses are argmaxes, not drawn."""
        del sampling
        return "fixed"

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> JacobiState:
        """No guesses yet."""
        del params, tables, target, capacity
        return JacobiState(jnp.zeros((batch, self.num_nodes), jnp.int32), jnp.zeros((batch,), bool))

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: JacobiState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, JacobiState, KVCache]:
        """The block as a chain."""
        del params, tables, target, keys
        return chain(jnp.where(state.started[:, None], state.block, context.last(1)), laws=None), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: JacobiState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> JacobiState:
        """The target's choices behind the next root."""
        del params, tables, target, context, draft
        slots = verdict.num_accepted[:, None] + 1 + jnp.arange(self.num_nodes)
        block = jnp.take_along_axis(scores.argmax, jnp.minimum(slots, self.num_nodes), axis=1)
        return JacobiState(block, jnp.ones_like(state.started))
