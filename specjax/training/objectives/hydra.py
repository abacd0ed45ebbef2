"""Hydra and Hydra++: heads in sequence on a frozen target (Ankner et al. 2024, sections 3 and 4).

Training feeds the text's own tokens; embeddings and vocabulary product are the target's own, by reference.
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
from specjax.models.medusa import HydraConfig, HydraHeads, heads_graph, init_heads
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.heads import HeadsLoss, exported, hidden_states


@dataclasses.dataclass(frozen=True)
class Hydra:
    """Cross-entropy of every head, see `HeadsLoss`.

    Attributes:
        config: of the heads; they share the target's vocabulary product.
        criterion: weights of heads and of the target's law.
    """

    config: HydraConfig
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
        network: HydraHeads = merge(heads_graph(self.config)[0], {**draft_params, "lm_head": {"kernel": head}})
        x_btkd = teacher_forced(network, batch, target)
        cap, counts = self.config.final_softcap, tables.get("counts")
        return self.criterion(x_btkd, batch, vocab, head, cap, counts)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`; the held-out accuracies go with the heads, so that trees can be built from them."""
        return exported("hydra", self.config, self.criterion.ranks, ("embed", "head"), draft_params, tables, info)


def teacher_forced(network: HydraHeads, batch: Batch, target: Decoder) -> jax.Array:
    """What each head gives to the vocabulary product `[B, T, K, d]`, with the text's tokens in front of it."""
    inputs = hidden_states(batch)
    read = network.read(jax.lax.stop_gradient(target.embed(jnp.asarray(batch.tokens))))
    if network.prefix is not None:
        inputs = network.prefix.full(inputs, jnp.asarray(batch.positions), jnp.asarray(batch.segments))
    outputs = []
    for i in range(network.config.num_heads):
        inputs = jnp.concatenate([inputs, ahead(read, i + 1)], axis=-1)
        outputs.append(network(i, inputs))
    return jnp.stack(outputs, axis=2)
