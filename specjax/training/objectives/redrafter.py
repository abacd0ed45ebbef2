"""ReDrafter: one recurrent network that drafts every depth, on a frozen target (Cheng et al. 2024, 2403.09919).

Training feeds the text's own tokens into the recurrence from every position at once; embeddings and vocabulary product
are the target's own, by reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, merge, split
from specjax.models.eagle import ahead
from specjax.models.redrafter import Redrafter, RedrafterConfig, init_redrafter, redrafter_graph
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.heads import HeadsLoss, hidden_states


@dataclasses.dataclass(frozen=True)
class RecurrentDrafting:
    """Cross-entropy at every depth, see `HeadsLoss`: depth i has the labels and the mask of a head i.

    Attributes:
        config: of the network; it shares the target's vocabulary product.
        steps: depths that are trained.
        criterion: weights of depths and of the target's law; the authors weigh all depths alike (`decay=1`).
    """

    config: RedrafterConfig
    steps: int = 5
    criterion: HeadsLoss = HeadsLoss(decay=1.0)

    def __post_init__(self) -> None:
        if self.config.own_head:
            raise ValueError("own_head=True: training keeps the target's vocabulary product; expected own_head=False")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}; expected at least 1")

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """A network that says what the target says."""
        del target, tables
        return init_redrafter(self.config, key)

    def counts(self, tables: Any, batch: Batch) -> jax.Array:
        """See `Counted`."""
        return self.criterion.counts(batch, tables["vocab"], self.steps)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See `HeadsLoss`."""
        del key
        vocab, hidden = tables["vocab"], hidden_states(batch)
        head = jax.lax.stop_gradient(target_head(target.config, split(target)[1], vocab))
        network: Redrafter = merge(redrafter_graph(self.config)[0], {**draft_params, "lm_head": {"kernel": head}})
        embeddings = jax.lax.stop_gradient(target.embed(jnp.asarray(batch.tokens))).astype(hidden.dtype)
        state, outputs = jnp.zeros_like(hidden), []
        for i in range(self.steps):
            state = network.advance(state, ahead(embeddings, i + 1))
            outputs.append(network(hidden, state))
        cap, counts = self.config.final_softcap, tables.get("counts")
        return self.criterion(jnp.stack(outputs, axis=2), batch, vocab, head, cap, counts)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        return SavedDrafter("redrafter", self.config, draft_params, tables, ("embed", "head"), info)
