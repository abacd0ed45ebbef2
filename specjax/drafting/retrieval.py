"""Retrieval: continuations come from a store of the user's texts (REST, He et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Stateless
from specjax.drafting.prefix_tree import prefix_tree
from specjax.drafting.text_store import SEPARATOR, SORTED_DEPTH, TextStore
from specjax.models import Decoder, KVCache, Tap


@dataclasses.dataclass(frozen=True)
class Retrieval(Stateless):
    """A tree of what follows the longest suffix of the text that the store holds.

    The store's suffix array lies on the device; all suffix lengths are searched at once by bisection. Of the matches
    of the longest one, up to `candidates`, evenly spaced in the sorted order, become a tree of their commonest
    prefixes (sections 3.1 and 3.2 of the paper).

    Attributes:
        num_nodes: N, nodes of the tree.
        depth: D, tokens taken from a match.
        max_match: longest suffix to look up.
        min_match: shortest suffix that counts as a match.
        candidates: C, matches that are looked at.
    """

    num_nodes: int = 16
    depth: int = 6
    max_match: int = 16
    min_match: int = 2
    candidates: int = 32
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match <= SORTED_DEPTH:
            raise ValueError(
                f"min_match={self.min_match} and max_match={self.max_match}; "
                f"expected 1 <= min_match <= max_match <= {SORTED_DEPTH}"
            )
        if not 1 <= self.depth <= self.num_nodes <= self.depth * self.candidates:
            raise ValueError(
                f"depth={self.depth}, num_nodes={self.num_nodes} and candidates={self.candidates}; "
                "expected 1 <= depth <= num_nodes <= depth * candidates"
            )

    @property
    def topology(self) -> str:
        """The matches decide the tree in every step."""
        return "dynamic_tree"

    def kind(self, sampling: Sampling) -> Kind:
        """Copied tokens are chosen, not drawn."""
        del sampling
        return "fixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters, and a store without text; see `store_tables` for one with."""
        del key, target
        return {}, {"tokens": jnp.full((1,), SEPARATOR, jnp.int32), "order": jnp.zeros((1,), jnp.int32)}

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
        del params, target, keys
        tokens, order = tables["tokens"], tables["order"]
        slots = context.length[:, None] - self.max_match + jnp.arange(self.max_match)
        suffix = jnp.take_along_axis(context.tokens, jnp.maximum(slots, 0), axis=1)
        first, count, matched = jax.vmap(lambda s, n: longest_match(tokens, order, s, n, self.min_match))(
            suffix, context.length
        )
        picks = jnp.arange(self.candidates)
        held = jnp.minimum(count, self.candidates)[:, None]
        # 0, C / held, ... of the matches: evenly spaced when there are more than C.
        spread = first[:, None] + jnp.where(
            (count > self.candidates)[:, None], _scaled(picks, count[:, None], self.candidates), picks
        )
        starts = order[jnp.minimum(spread, order.shape[0] - 1)] + matched[:, None]
        places = starts[..., None] + jnp.arange(self.depth)
        found = tokens[jnp.minimum(places, tokens.shape[0] - 1)]
        valid = (picks < held)[..., None] & (places < tokens.shape[0]) & (found != SEPARATOR)
        return prefix_tree(jnp.maximum(found, 0), valid, self.num_nodes), state, cache


def store_tables(store: TextStore) -> dict[str, jax.Array]:
    """A store as the drafter's tables, on the device."""
    return {"tokens": jnp.asarray(store.tokens), "order": jnp.asarray(store.order)}


def longest_match(
    tokens_s: jax.Array, order_s: jax.Array, suffix_m: jax.Array, length: jax.Array, shortest: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the longest end of a text occurs in a store.

    Args:
        tokens_s: the store's.
        order_s: its suffix array.
        suffix_m: the text's last M tokens; M is the longest match.
        length: the text's length; of a shorter text the first tokens of `suffix_m` are not read.
        shortest: of the matches that count.

    Returns:
        Place of the first match in the order, number of matches (0: none), and their length; int32 scalars.
    """
    longest = suffix_m.shape[0]
    sizes = jnp.arange(shortest, longest + 1)  # [Q] one query a length
    within = jnp.arange(longest)
    query = suffix_m[jnp.clip(longest - sizes[:, None] + within, 0, longest - 1)]  # [Q, M]; read up to its own size

    def bound(or_equal: bool) -> jax.Array:
        """Per query the number of suffixes that are smaller (or begin with it)."""

        def body(_: jax.Array, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = ends
            middle = (low + high) // 2
            places = order_s[jnp.minimum(middle, order_s.shape[0] - 1)][:, None] + within
            held = jnp.where(places < tokens_s.shape[0], tokens_s[jnp.minimum(places, tokens_s.shape[0] - 1)], -2)
            differs = (held != query) & (within < sizes[:, None])
            at = jnp.argmax(differs, axis=1)[:, None]
            smaller = jnp.take_along_axis(held, at, axis=1) < jnp.take_along_axis(query, at, axis=1)
            before = jnp.where(differs.any(1), smaller[:, 0], or_equal)
            open_ = low < high
            return jnp.where(open_ & before, middle + 1, low), jnp.where(open_ & ~before, middle, high)

        ends = jnp.zeros(sizes.shape, jnp.int32), jnp.full(sizes.shape, order_s.shape[0], jnp.int32)
        return jax.lax.fori_loop(0, order_s.shape[0].bit_length(), body, ends)[0]

    first = bound(or_equal=False)
    count = jnp.where(sizes <= length, bound(or_equal=True) - first, 0)
    best = jnp.max(jnp.where(count > 0, jnp.arange(sizes.shape[0]), -1))
    at = jnp.maximum(best, 0)
    return first[at], jnp.where(best >= 0, count[at], 0), sizes[at].astype(jnp.int32)


def _scaled(pick: jax.Array, count: jax.Array, parts: int) -> jax.Array:
    """`pick * count // parts` without an overflow of int32."""
    return pick * (count // parts) + pick * (count % parts) // parts
