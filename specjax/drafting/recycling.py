"""Token Recycling: a table of each token's likeliest successors, kept from every pass's logits (Luo et al. 2024)."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys, Kind, Sampling, Scores, Verdict
from specjax.decoding.tree import TreeSpec
from specjax.models import Decoder, KVCache, Tap

# How often the target's token is the k-th of its predecessor's row; the shape of the tree follows from it.
RANK_SHARES = (0.46, 0.13, 0.07, 0.05, 0.035, 0.03, 0.025, 0.02)


@flax.struct.dataclass
class RecyclingState:
    """What is known about successors.

    Attributes:
        successors: `[B, V, K]` int32, likeliest first; -1 where nothing is known. K * 4 bytes a token of the
            vocabulary and row.
        last: `[B]` int32 last token of the prompt so far, -1 before the first.
    """

    successors: jax.Array
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class Recycling:
    """A static tree whose nodes are read, level by level, from the table of successors.

    After each pass the root's and all nodes' rows are replaced by the K likeliest tokens of their logits, rejected
    nodes included (section 3.2 of the paper). The prompt, whose logits are never computed, enters its own successors
    first in their rows. Every request starts with an empty table.

    Attributes:
        num_nodes: N, nodes of the tree: the likeliest under `RANK_SHARES`.
        candidates: K, successors kept for a token, at most 8.
    """

    num_nodes: int = 24
    candidates: int = 8
    taps: tuple[Tap, ...] = ()
    num_probes: int = 0
    any_context: ClassVar[bool] = True  # The table is of tokens, not of places in the text.

    def __post_init__(self) -> None:
        if not 1 <= self.candidates <= len(RANK_SHARES):
            raise ValueError(f"candidates={self.candidates}; expected 1 to {len(RANK_SHARES)} successors a token")
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes}; a tree holds at least 1 node")
        _ = self.tree

    @property
    def tree(self) -> TreeSpec:
        """The static tree; a smaller one is its beginning."""
        return likeliest_tree(self.num_nodes, RANK_SHARES[: self.candidates])

    @property
    def depth(self) -> int:
        """The longest path of the tree."""
        return self.tree.depth

    def kind(self, sampling: Sampling) -> Kind:
        """Successors are looked up, not drawn."""
        del sampling
        return "fixed"

    def init_params(self, key: jax.Array, target: Decoder) -> tuple[Any, Any]:
        """No parameters, no tables.

        Raises:
            ValueError: more candidates than the target has tokens.
        """
        del key
        if self.candidates > target.config.vocab_size:
            raise ValueError(f"candidates={self.candidates}, but the target has {target.config.vocab_size} tokens")
        return {}, {}

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> RecyclingState:
        """Nothing is known."""
        del params, tables, capacity
        shape = (batch, target.config.vocab_size, self.candidates)
        return RecyclingState(jnp.full(shape, -1, jnp.int32), jnp.full((batch,), -1, jnp.int32))

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: RecyclingState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> RecyclingState:
        """Each token of the prompt becomes the first successor of the one before it."""
        del params, tables, target, positions, taps
        vocab = state.successors.shape[1]
        rows = jnp.arange(tokens.shape[0])

        def body(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            table, last = carry
            token, on = tokens[:, t], valid[:, t]
            row = jax.vmap(lambda own, at: own[at])(table, jnp.maximum(last, 0))
            where = jnp.where(on & (last >= 0), last, vocab)  # an index that is dropped
            table = table.at[rows, where].set(_to_front(row, token), mode="drop")
            return table, jnp.where(on, token, last)

        table, last = jax.lax.fori_loop(0, tokens.shape[1], body, (state.successors, state.last))
        return RecyclingState(table, last)

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: RecyclingState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, RecyclingState, KVCache]:
        """The tree's tokens, a level at a time; nodes without a known successor are invalid."""
        del params, tables, target, keys
        tree = self.tree
        tokens = jnp.full((context.tokens.shape[0], self.num_nodes), -1, jnp.int32)
        known = jnp.concatenate([context.last(1), tokens], axis=1)  # the root, then the nodes
        for level in tree.levels:
            nodes = jnp.asarray(level)
            parents = known[:, jnp.asarray([tree.parents[node] + 1 for node in level])]
            rows = jax.vmap(lambda own, at: own[at])(state.successors, jnp.maximum(parents, 0))  # [B, n, K]
            ranks = jnp.asarray([tree.child_ranks[node] for node in level])
            found = jnp.take_along_axis(rows, jnp.broadcast_to(ranks[:, None], (*rows.shape[:2], 1)), axis=2)[..., 0]
            known = known.at[:, nodes + 1].set(jnp.where(parents < 0, -1, found))
        tokens = known[:, 1:]
        return dataclasses.replace(tree.draft(jnp.maximum(tokens, 0)), valid=tokens >= 0), state, cache

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: RecyclingState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> RecyclingState:
        """The likeliest tokens at root and nodes; of nodes with the same token the last one counts."""
        del params, tables, target, verdict
        vocab = state.successors.shape[1]
        tokens = jnp.concatenate([context.last(1), draft.tokens], axis=1)
        there = jnp.concatenate([jnp.ones_like(draft.valid[:, :1]), draft.valid], axis=1)
        same = (tokens[:, :, None] == tokens[:, None]) & there[:, None]
        later = jnp.triu(jnp.ones((tokens.shape[1],) * 2, bool), 1)
        where = jnp.where(there & ~(same & later).any(-1), tokens, vocab)  # an index that is dropped
        best = top_tokens(scores.logits, self.candidates)
        table = jax.vmap(lambda own, at, new: own.at[at].set(new, mode="drop"))(state.successors, where, best)
        return dataclasses.replace(state, successors=table)


def top_tokens(logits: jax.Array, count: int, group: int = 64) -> jax.Array:
    """Ids `[..., count]` int32 of the largest logits `[..., V]`, without ordering the vocabulary.

    The largest values lie in the groups with the largest maxima: those are found first, then the values within them.
    """
    vocab = logits.shape[-1]
    if vocab <= group * count:
        return jax.lax.top_k(logits, count)[1].astype(jnp.int32)
    short = -vocab % group
    padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, short)], constant_values=-jnp.inf)
    groups = padded.reshape(*logits.shape[:-1], -1, group)
    _, best = jax.lax.top_k(groups.max(-1), count)  # [..., count] groups
    best = jnp.sort(best, -1)  # of equal logits the lowest id first, as everywhere
    members = jnp.take_along_axis(groups, best[..., None], axis=-2).reshape(*logits.shape[:-1], count * group)
    _, at = jax.lax.top_k(members, count)
    return (jnp.take_along_axis(best, at // group, axis=-1) * group + at % group).astype(jnp.int32)


@functools.cache
def likeliest_tree(num_nodes: int, shares: tuple[float, ...]) -> TreeSpec:
    """The `num_nodes` nodes that are accepted most often if the k-th candidate of any node is so with `shares[k]`.

    Nodes are numbered by that probability, so that a smaller tree is the beginning of a larger one.
    """
    parents: list[int] = []
    ranks: list[int] = []
    # (minus probability, tie, parent, rank): a node's next sibling and first child enter when it leaves.
    frontier = [(-shares[0], 0, -1, 0)]
    reach = {-1: 1.0}
    while len(parents) < num_nodes:
        if not frontier:
            raise ValueError(f"num_nodes={num_nodes}; no tree of {len(shares)} candidates a node has so many")
        value, _, parent, rank = heapq.heappop(frontier)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        reach[node] = -value
        heapq.heappush(frontier, (value * shares[0], 2 * node + 1, node, 0))
        if rank + 1 < len(shares):
            heapq.heappush(frontier, (-reach[parent] * shares[rank + 1], 2 * node + 2, parent, rank + 1))
    return TreeSpec(tuple(parents), tuple(ranks))


def _to_front(row_bk: jax.Array, token_b: jax.Array) -> jax.Array:
    """Moves a token to the front of a row of distinct tokens, or puts it there and drops the last."""
    count = row_bk.shape[1]
    hit = row_bk == token_b[:, None]
    place = jnp.where(hit.any(1), jnp.argmax(hit, axis=1), count - 1)[:, None]
    slots = jnp.arange(count)
    shifted = jnp.take(row_bk, jnp.maximum(slots - 1, 0), axis=1)
    moved = jnp.where(slots <= place, shifted, row_bk)
    return moved.at[:, 0].set(token_b)
