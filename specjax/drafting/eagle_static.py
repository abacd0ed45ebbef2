"""EAGLE's static tree (Li et al. 2024, 2401.15077, section 3.1): the same places of the candidates in every step.

Each level is one pass over the nodes that have children; a node takes its parent's candidate of its rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys, Kind, Sampling
from specjax.decoding.tree import TreeSpec
from specjax.drafting.eagle import FeatureDrafter, FeatureState
from specjax.drafting.heads import first_nodes, likeliest
from specjax.models import Decoder, KVCache, View


@dataclasses.dataclass(frozen=True)
class EagleStatic(FeatureDrafter):
    """A static tree of likeliest tokens.

    Attributes:
        config: the network, of EAGLE-1 or EAGLE-3.
        num_nodes: N, the tree's.
        tree: which candidates are drafted.
    """

    tree: TreeSpec = TreeSpec(())

    def __post_init__(self) -> None:
        if not self.tree.num_nodes or self.num_nodes != self.tree.num_nodes:
            raise ValueError(f"num_nodes={self.num_nodes} with a tree of {self.tree.num_nodes} nodes; expected as many")
        if self.tree.max_children > self.config.head_size:
            raise ValueError(
                f"a node has {self.tree.max_children} children, the draft vocabulary only {self.config.head_size} "
                "tokens; expected fewer children"
            )

    @property
    def depth(self) -> int:
        """D."""
        return self.tree.depth

    def at_width(self, width: int) -> EagleStatic:
        """The same head with the first nodes of its tree."""
        tree = first_nodes(self.tree, width)
        return dataclasses.replace(self, num_nodes=tree.num_nodes, tree=tree)

    def kind(self, sampling: Sampling) -> Kind:
        """Nodes are chosen, at every temperature."""
        del sampling
        return "fixed"

    def propose(
        self,
        params: Any,
        tables: Any,
        target: Decoder,
        cache: KVCache,
        state: FeatureState,
        context: Context,
        keys: Keys,
    ) -> tuple[Draft, FeatureState, KVCache]:
        """One pass a level."""
        del keys
        net, vocab = self.network(params, tables, target), tables.get("vocab")
        parents, ranks = np.asarray(self.tree.parents), np.asarray(self.tree.child_ranks)
        prefix, batch = context.length - 1, context.tokens.shape[0]
        feature, hidden, own = self.catch_up(net, state, context)
        # Of the nodes of the last pass (at first the root): their indices, the draft's features, what its head reads.
        expanded, features, hidden = np.asarray([-1]), feature[:, None], hidden[:, None]
        ran: list[int] = []  # nodes in the draft's scratch slots, in order
        picks = jnp.zeros((batch, self.num_nodes), jnp.int32)
        for children in self.tree.levels:
            members = np.asarray(children)
            seen = self.tree.on_paths(expanded, ran)
            on_path = jnp.broadcast_to(seen, (batch, *seen.shape))
            logits = context.process(net.logits(hidden), picks[:, np.asarray(ran, int)], on_path, vocab)
            ids = likeliest(logits, int(ranks[members].max()) + 1)
            owner = np.searchsorted(expanded, parents[members])
            picks = picks.at[:, members].set(ids[:, owner, ranks[members]])
            inner = members[np.isin(members, parents)]
            if not len(inner):
                break
            features = features[:, np.searchsorted(expanded, parents[inner])]
            ran += inner.tolist()
            seen = self.tree.on_paths(inner, ran)
            depths = np.asarray(self.tree.node_depths)[ran] - 1
            view = View(
                prefix,
                jnp.broadcast_to(seen, (batch, *seen.shape)),
                jnp.broadcast_to(depths.astype(np.int32), (batch, len(ran))),
            )
            tokens = picks[:, inner] if vocab is None else vocab[picks[:, inner]]
            features, hidden, own = net.cached(tokens, features, own, view)
            expanded = inner
        tokens_bn = picks if vocab is None else vocab[picks]
        return self.tree.draft(tokens_bn, vocab=vocab), dataclasses.replace(state, cache=own, ran=state.count), cache


__all__ = ["EagleStatic"]
