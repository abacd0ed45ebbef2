"""Medusa (Cai et al. 2024): heads that do not see each other draft a static tree in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.decoding import Context, Draft, Keys
from specjax.drafting.heads import HeadsDrafter, HeadsState, likeliest
from specjax.models import Decoder, KVCache, merge
from specjax.models.medusa import MedusaConfig, MedusaHeads, heads_graph


@dataclasses.dataclass(frozen=True)
class Medusa(HeadsDrafter):
    """Every node of depth i + 1 with rank r is head i's token of rank r, whatever stands before it.

    Bias and penalties count: those of the committed text, as the heads do not know what else stands before.
    """

    config: MedusaConfig

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
        """One pass of the heads that the tree is deep."""
        del target, keys
        network: MedusaHeads = merge(heads_graph(self.config)[0], params)
        vocab = tables.get("vocab")
        logits_bdv = context.process(network.logits(network(state.hidden, self.depth)), vocab=vocab)
        candidates_bdc = likeliest(logits_bdv, self.tree.max_children)
        heads, ranks = np.asarray(self.tree.node_depths) - 1, np.asarray(self.tree.child_ranks)
        ids_bn = candidates_bdc[:, heads, ranks]
        tokens_bn = ids_bn if vocab is None else jnp.asarray(vocab)[ids_bn]
        return self.tree.draft(tokens_bn, vocab=vocab), state, cache
