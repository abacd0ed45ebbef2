"""Suffix decoding: copy what followed earlier occurrences of the text's end, as far as the match is long.

SuffixDecoding (Oliaro et al. 2024), SAM Decoding (Hu et al. 2024). Both keep a suffix tree or automaton; here one
vectorised comparison over the token buffer finds the same matches: nothing is kept, so nothing has to be rolled back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class Suffix(Stateless):
    """A chain of the most frequent continuation of the longest match in prompt and output.

    All earlier occurrences of the longest suffix that occurs earlier vote for the next token; those that agree with
    the most frequent one (of equal ones the latest) vote on. Nodes end where the match's length or their frequency
    says so; without a match nothing is proposed.

    Attributes:
        num_nodes: N, the most tokens to propose.
        max_match: longest suffix to look for.
        min_match: shortest suffix that counts as a match.
        factor: tokens proposed for each matched token (alpha of SuffixDecoding, section 3).
        min_frequency: nodes end where fewer than this share of the occurrences go on so.
    """

    num_nodes: int = 8
    max_match: int = 24
    min_match: int = 1
    factor: float = 1.0
    min_frequency: float = 0.1
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0
    length_follows_match: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"min_match={self.min_match} and max_match={self.max_match}; expected 1 <= min_match <= max_match"
            )
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; suffix decoding proposes at least 1 token")
        if not self.factor * self.max_match >= 1:
            raise ValueError(f"factor={self.factor} proposes nothing even for {self.max_match} matched tokens")
        if not 0 <= self.min_frequency <= 1:
            raise ValueError(f"min_frequency={self.min_frequency}; expected a share in [0, 1]")

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
        """Looks the suffix up and follows the vote."""
        del params, tables, keys
        matched = match_lengths(context.tokens, context.length, self.max_match)
        longest_b = matched.max(1)
        voters = (matched == longest_b[:, None]) & (longest_b >= self.min_match)[:, None]
        tokens, frequency = follow_votes(
            context.tokens, context.length, voters, self.num_nodes, target.config.vocab_size
        )
        allowed = jnp.floor(self.factor * longest_b).astype(jnp.int32)[:, None] > jnp.arange(self.num_nodes)
        valid = allowed & (frequency >= self.min_frequency) & (frequency > 0)
        draft = chain(tokens, laws=None)
        return dataclasses.replace(draft, valid=jnp.cumprod(valid, axis=1).astype(bool)), state, cache


def match_lengths(tokens_bl: jax.Array, length_b: jax.Array, longest: int) -> jax.Array:
    """`[B, L]`: how many tokens before slot s, counted backwards, agree with the end of the text; at most `longest`.

    0 at slots that hold no token of the text. No comparison is made beyond the longest match of any row.
    """
    slots = jnp.arange(tokens_bl.shape[1])

    def more(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return (carry[0] <= longest) & jnp.any(carry[1])

    def body(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        back, running, matched = carry
        tail = jnp.take_along_axis(tokens_bl, jnp.maximum(length_b - back, 0)[:, None], axis=1)
        earlier = jnp.take(tokens_bl, jnp.maximum(slots - back, 0), axis=1)
        running &= (earlier == tail) & (slots >= back)
        return back + 1, running, matched + running

    init = (jnp.int32(1), slots[None] < length_b[:, None], jnp.zeros(tokens_bl.shape, jnp.int32))
    return jax.lax.while_loop(more, body, init)[2]


def follow_votes(
    tokens_bl: jax.Array, length_b: jax.Array, voters_bl: jax.Array, count: int, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """The path that most voters take, token by token.

    Args:
        tokens_bl: the text.
        length_b: its length.
        voters_bl: slots whose continuations vote; a voter at slot s votes first for the token there.
        count: tokens to follow.
        vocab: ids below this are valid.

    Returns:
        Tokens `[B, count]`, and the share of the voters `[B, count]` float32 that went so up to and with each; 0
        behind the last.
    """
    slots = jnp.arange(tokens_bl.shape[1])

    def row(tokens: jax.Array, length: jax.Array, voters: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(voters: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            vote = jnp.take(tokens, jnp.minimum(slots + i, len(slots) - 1))
            voters &= slots + i < length
            ballots = jnp.zeros((vocab,), jnp.int32).at[vote].add(voters.astype(jnp.int32))
            won = jnp.where(voters, ballots[vote], -1)
            token = vote[jnp.argmax(jnp.where(won == won.max(), slots, -1))]  # of equal counts the latest
            voters &= vote == token
            return voters, (token, voters.sum())

        total = voters.sum()
        _, (path, agreed) = jax.lax.scan(body, voters, jnp.arange(count))
        return path, agreed / jnp.maximum(total, 1)

    return jax.vmap(row)(tokens_bl, length_b, voters_bl)
