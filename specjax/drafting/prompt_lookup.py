"""Prompt lookup: propose what followed the latest earlier occurrence of the last few tokens.

Saxena 2023; `prompt_lookup_num_tokens` of Hugging Face's assisted generation, `ngram` of vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """A chain copied from prompt and output.

    The longest matching n-gram wins; among equally long ones the latest. Nothing is proposed without a match.

    Attributes:
        num_nodes: tokens to propose.
        max_ngram: longest suffix to look up.
        min_ngram: shortest suffix that counts as a match.
    """

    num_nodes: int = 8
    max_ngram: int = 3
    min_ngram: int = 1
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} and max_ngram={self.max_ngram}; expected 1 <= min_ngram <= max_ngram"
            )
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; prompt lookup proposes at least 1 token")

    @property
    def depth(self) -> int:
        """The chain's length."""
        return self.num_nodes

    def kind(self, sampling: Sampling) -> Kind:
        """Copied tokens are chosen, not drawn."""
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
        """Looks the suffix up; nodes past the committed text, and all nodes without a match, are invalid."""
        del params, tables, target, keys
        source_b, found_b = find_continuation(context.tokens, context.length, self.max_ngram, self.min_ngram)
        slots = source_b[:, None] + jnp.arange(self.num_nodes)
        inside = slots < context.length[:, None]
        picked = jnp.take_along_axis(context.tokens, jnp.minimum(slots, context.tokens.shape[1] - 1), axis=1)
        draft = chain(picked, laws=None)
        return dataclasses.replace(draft, valid=found_b[:, None] & inside), state, cache


def find_continuation(
    tokens_bl: jax.Array, length_b: jax.Array, max_ngram: int, min_ngram: int
) -> tuple[jax.Array, jax.Array]:
    """Where the text behind the best earlier match of the suffix begins.

    Returns:
        `(start [B] int32, found [B] bool)`.
    """
    buffer = tokens_bl.shape[1]
    slots = jnp.arange(buffer)
    # matched[b, s]: how many tokens that end at slot s - 1 agree with the suffix, counted backwards.
    matched = jnp.zeros(tokens_bl.shape, jnp.int32)
    running = jnp.ones(tokens_bl.shape, bool)
    for back in range(1, max_ngram + 1):
        tail = jnp.take_along_axis(tokens_bl, jnp.maximum(length_b[:, None] - back, 0), axis=1)
        earlier = jnp.roll(tokens_bl, back, axis=1)
        running &= (earlier == tail) & (slots >= back)[None] & (back <= length_b[:, None])
        matched += running
    usable = (slots[None] < length_b[:, None]) & (matched >= min_ngram)
    value = jnp.where(usable, matched * buffer + slots[None], -1)
    best = jnp.argmax(value, axis=1)
    return best.astype(jnp.int32), jnp.max(value, axis=1) >= 0
