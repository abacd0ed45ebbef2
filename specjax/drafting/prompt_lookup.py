"""Prompt lookup: propose what followed an earlier occurrence of the last few tokens.

Saxena 2023; `prompt_lookup_num_tokens` of Hugging Face's assisted generation, `ngram` of vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.tree import chain
from specjax.drafting.suffix import follow_votes, match_lengths
from specjax.models import Decoder, KVCache, Tap

# Which of equally long matches is copied from.
Policy = Literal["latest", "earliest", "most_frequent"]


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """A chain copied from prompt and output.

    The longest matching n-gram wins. Among equally long ones `latest` takes the latest that `num_nodes` tokens follow,
    or where none has so many behind it, the latest; `earliest` the first, as Hugging Face's does. What follows the
    match is copied up to the end of the text and from the match on again: a text that repeats itself goes on
    repeating. `most_frequent` lets all of them vote, token by token, and ends with the last voter's text. Nothing is
    proposed without a match.

    Attributes:
        num_nodes: tokens to propose.
        max_ngram: longest suffix to look up.
        min_ngram: shortest suffix that counts as a match.
        policy: which of equally long matches is copied from; see above.
    """

    num_nodes: int = 8
    max_ngram: int = 3
    min_ngram: int = 1
    policy: Policy = "latest"
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} and max_ngram={self.max_ngram}; expected 1 <= min_ngram <= max_ngram"
            )
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; prompt lookup proposes at least 1 token")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r} of prompt lookup; expected one of {', '.join(get_args(Policy))}")

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
        """Looks the suffix up; without a match all nodes are invalid."""
        del params, tables, keys
        picked, valid = self.look_up(context.tokens, context.length, target.config.vocab_size)
        return dataclasses.replace(chain(picked, laws=None), valid=valid), state, cache

    def look_up(self, tokens_bl: jax.Array, length_b: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
        """What to propose behind texts: tokens and which of them are `[B, N]`; ids are below `vocab`."""
        matches = longest_matches(tokens_bl, length_b, self.max_ngram, self.min_ngram)
        if self.policy == "most_frequent":
            picked, share = follow_votes(tokens_bl, length_b, matches, self.num_nodes, vocab)
            return picked, share > 0
        picked = continuation(tokens_bl, length_b, matches, self.num_nodes, latest=self.policy == "latest")
        return picked, jnp.broadcast_to(matches.any(1)[:, None], picked.shape)


def longest_matches(tokens_bl: jax.Array, length_b: jax.Array, max_ngram: int, min_ngram: int) -> jax.Array:
    """`[B, L]`: the slots in front of which the longest n-gram that ends the text stands too; none for a short one."""
    matched = match_lengths(tokens_bl, length_b, max_ngram)
    longest = matched.max(1, keepdims=True)
    return (matched == longest) & (longest >= min_ngram)


def continuation(
    tokens_bl: jax.Array, length_b: jax.Array, matches_bl: jax.Array, count: int, *, latest: bool
) -> jax.Array:
    """`[B, count]` tokens behind one of the matches: the latest with so many behind it, if there is one, or the first.

    Where the text ends before, they go on at the match again. Without a match they mean nothing.
    """
    slots = jnp.arange(tokens_bl.shape[1])
    whole = matches_bl & (slots <= length_b[:, None] - count)
    last = jnp.argmax(jnp.where(jnp.where(whole.any(1, keepdims=True), whole, matches_bl), slots, -1), axis=1)
    start = last if latest else jnp.argmax(matches_bl, axis=1)
    behind = jnp.arange(count) % jnp.maximum(length_b - start, 1)[:, None]
    return jnp.take_along_axis(tokens_bl, start[:, None] + behind, axis=1)
