"""Hydra (Ankner et al. 2024): heads in sequence; every node is drafted from its own path's tokens.

Hydra++ runs a layer of its own over the target's hidden states first, with a cache of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Scores, Verdict
from specjax.decoding.widths import switch_in_place
from specjax.drafting.heads import HeadsDrafter, HeadsState, likeliest
from specjax.drafting.pending import path_nodes, still_pending
from specjax.models import Decoder, KVCache, Tap, causal_view, init_cache, merge
from specjax.models.medusa import HydraConfig, HydraHeads, PrefixLayer, heads_graph


@dataclasses.dataclass(frozen=True)
class Hydra(HeadsDrafter):
    """One pass of head i for all nodes of depth i that have children: it reads their paths' embeddings."""

    config: HydraConfig

    @property
    def draft_passes(self) -> int:
        """Passes of a step, one a head."""
        return self.depth

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: HeadsState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, HeadsState, KVCache]:
        """As many passes as the tree is deep."""
        del keys
        network: HydraHeads = merge(heads_graph(self.config)[0], params)
        vocab = tables.get("vocab")
        parents, ranks = np.asarray(self.tree.parents), np.asarray(self.tree.child_ranks)
        # Of the nodes last drafted (at first the root): their indices, tokens [B, n], and what their parents read.
        nodes, tokens_bn = np.asarray([-1]), context.last(1)
        read_bnx = state.hidden[:, None]
        drafted: list[jax.Array] = []
        order: list[int] = []  # of the nodes so far
        draft_ids_ba = jnp.zeros((tokens_bn.shape[0], 0), jnp.int32)
        for level, children in enumerate(self.tree.levels):
            members = np.asarray(children)
            expanded = np.unique(parents[members])
            at = np.searchsorted(nodes, expanded)
            embeddings = network.read(target.embed(tokens_bn[:, at]))
            read_bnx = jnp.concatenate([read_bnx[:, at], embeddings], axis=-1)
            logits = network.logits(level, network(level, read_bnx))
            # Penalties count a node's own ancestors.
            on_path_bma = jnp.broadcast_to(self._on_path(expanded, order), (*logits.shape[:2], len(order)))
            logits = context.process(logits, draft_ids_ba, on_path_bma, vocab)
            ids = likeliest(logits, int(ranks[members].max()) + 1)
            owner = np.searchsorted(expanded, parents[members])
            picked = ids[:, owner, ranks[members]]
            tokens_bn = picked if vocab is None else jnp.asarray(vocab)[picked]
            read_bnx, nodes = read_bnx[:, owner], members
            drafted.append(tokens_bn)
            order += children
            draft_ids_ba = jnp.concatenate([draft_ids_ba, picked.astype(jnp.int32)], axis=1)
        tokens_bn = jnp.concatenate(drafted, axis=1)[:, np.argsort(order)]
        return self.tree.draft(tokens_bn, vocab=vocab), state, cache

    def _on_path(self, expanded: np.ndarray, drafted: list[int]) -> np.ndarray:
        """`[m, A]`: which of the nodes drafted so far are an expanded node or its ancestors."""
        mask = np.zeros((len(expanded), len(drafted)), bool)
        for row, node in enumerate(expanded):
            while node >= 0:
                mask[row, drafted.index(node)] = True
                node = self.tree.parents[node]
        return mask


@flax.struct.dataclass
class PrefixState(HeadsState):
    """What the prefix layer has seen, and what it has still to see.

    Attributes:
        cache: of the layer; its `length` is not used.
        pending: `[B, D + 1, d]` hidden states that the target has made since the last draft, in order.
        count: `[B]` how many are pending, at least 1; the last is that before the root.
        ran: `[B]` how many of them the layer has run since the last verdict: all, or none in a step without a draft.
    """

    cache: KVCache
    pending: jax.Array
    count: jax.Array
    ran: jax.Array


@dataclasses.dataclass(frozen=True)
class HydraPlusPlus(Hydra):
    """Hydra on what the prefix layer makes of the hidden states; a step begins with its pass over the pending ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.prefix is None:
            raise ValueError("these heads have no prefix layer; expected a config with `prefix`")

    @property
    def draft_passes(self) -> int:
        """Passes of a step, the prefix layer's and one a head."""
        return self.depth + 1

    def init_state(self, params: Any, tables: Any, target: Decoder, batch: int, capacity: int) -> PrefixState:
        """An empty cache, and the place for the last hidden state of a prompt."""
        assert self.config.prefix is not None
        hidden = super().init_state(params, tables, target, batch, capacity).hidden
        return PrefixState(
            hidden=hidden,
            cache=init_cache(self.config.prefix, batch, capacity),
            pending=jnp.zeros((batch, self.depth + 1, hidden.shape[-1]), hidden.dtype),
            count=jnp.ones((batch,), jnp.int32),
            ran=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: HeadsState,
        tokens: jax.Array,
        positions: jax.Array,
        taps: dict[Tap, jax.Array],
        valid: jax.Array,
    ) -> PrefixState:
        """Runs the layer over a prompt chunk; its last hidden state stays pending, to be run again as it was."""
        assert isinstance(state, PrefixState)
        view = causal_view(positions[:, 0], positions.shape[1])
        _, cache = self._prefix(params).cached(taps["normed"], state.cache, view)
        hidden = super().extend(params, tables, target, state, tokens, positions, taps, valid).hidden
        pending = state.pending.at[:, 0].set(hidden)
        return dataclasses.replace(state, hidden=hidden, cache=cache, pending=pending)

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: HeadsState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, PrefixState, KVCache]:
        """A pass of the layer over what is pending, then the heads'."""
        assert isinstance(state, PrefixState)
        out, own = self._catch_up(params, state, context)
        hidden = jnp.take_along_axis(out, (state.count - 1)[:, None, None], axis=1)[:, 0]
        draft, _, cache = super().propose(params, tables, target, cache, HeadsState(hidden), context, keys)
        return draft, dataclasses.replace(state, cache=own, ran=state.count), cache

    def rest(self, params: Any, tables: Any, target: Decoder, state: HeadsState, context: Context) -> PrefixState:
        """A step without a draft: its hidden state joins the pending ones, which are run when they fill up."""
        del tables, target
        assert isinstance(state, PrefixState)
        waiting = state

        def run(cache: KVCache) -> tuple[jax.Array, KVCache]:
            return waiting.count, self._catch_up(params, dataclasses.replace(waiting, cache=cache), context)[1]

        full = jnp.any(waiting.count >= waiting.pending.shape[1]).astype(jnp.int32)
        ran, cache = switch_in_place(full, [lambda cache: (jnp.zeros_like(waiting.count), cache), run], waiting.cache)
        return dataclasses.replace(waiting, cache=cache, ran=ran)

    def commit(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        state: HeadsState,
        context: Context,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
    ) -> PrefixState:
        """Keeps the target's hidden states of root and accepted path."""
        del params, tables, target, context, draft
        assert isinstance(state, PrefixState)
        fresh = jnp.take_along_axis(scores.taps["normed"], path_nodes(verdict)[..., None], axis=1)
        pending, count = still_pending(state.pending, state.count, state.ran, fresh, verdict.num_accepted + 1)
        return dataclasses.replace(state, pending=pending, count=count, ran=jnp.zeros_like(count))

    def _catch_up(self, params: Any, state: PrefixState, context: Context) -> tuple[jax.Array, KVCache]:
        """Runs the pending hidden states through the layer; what it makes of them `[B, D + 1, d]`, and its cache."""
        # Finished rows have emitted fewer tokens than they accepted; nothing is read of them.
        start = jnp.maximum(context.length - 1 - state.count, 0)
        view = causal_view(start, state.pending.shape[1])
        return self._prefix(params).cached(state.pending, state.cache, view)

    def _prefix(self, params: Any) -> PrefixLayer:
        layer = self._network(params).prefix
        assert layer is not None, "only Hydra++ has a prefix layer"
        return layer

    def _network(self, params: Any) -> HydraHeads:
        network: HydraHeads = merge(heads_graph(self.config)[0], params)
        return network
