"""Medusa-1: heads on a frozen target (Cai et al. 2024, section 2.2.1).

Only the residual blocks are trained; the vocabulary product is the target's own, by reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, merge, split
from specjax.models.medusa import MedusaConfig, MedusaHeads, heads_graph, init_heads
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.heads import HeadsLoss, exported, hidden_states


@dataclasses.dataclass(frozen=True)
class Medusa:
    """Cross-entropy of every head, see `HeadsLoss`.

    Attributes:
        config: of the heads; they share the target's vocabulary product.
        criterion: weights of heads and of the target's law.
    """

    config: MedusaConfig
    criterion: HeadsLoss = HeadsLoss()

    def __post_init__(self) -> None:
        if self.config.own_head:
            raise ValueError("own_head=True: training keeps the target's vocabulary product; expected own_head=False")

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Heads that say what the target says."""
        del target, tables
        return init_heads(self.config, key)

    def counts(self, tables: Any, batch: Batch) -> jax.Array:
        """See `Counted`."""
        return self.criterion.counts(batch, tables["vocab"], self.config.num_heads)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See `HeadsLoss`."""
        del key
        vocab = tables["vocab"]
        head = jax.lax.stop_gradient(target_head(target.config, split(target)[1], vocab))
        network: MedusaHeads = merge(heads_graph(self.config)[0], {**draft_params, "lm_head": {"kernel": head}})
        x_btkd = network(hidden_states(batch))
        cap, counts = self.config.final_softcap, tables.get("counts")
        return self.criterion(x_btkd, batch, vocab, head, cap, counts)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`; the held-out accuracies go with the heads, so that trees can be built from them."""
        return exported("medusa", self.config, self.criterion.ranks, ("head",), draft_params, tables, info)
