"""Kangaroo's adapter on a frozen target (Liu et al. 2024, section 3.1): the target's law as teacher.

The paper's cross-entropy with the target's law is the forward Kullback-Leibler divergence up to a constant. What the
adapter reads in the decoding loop are the target's own early layers, so training sees what drafting sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, merge, split
from specjax.models.kangaroo import Adapter, KangarooConfig, init_adapter, kangaroo_graph, with_head
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.distill import divergence_loss, divergence_of


@dataclasses.dataclass(frozen=True)
class KangarooDistillation:
    """A divergence between the target's law and the adapter's, see `divergence_loss`.

    Attributes:
        config: the adapter.
        divergence: a key of `DIVERGENCES`.
    """

    config: KangarooConfig
    divergence: str = "forward_kl"

    def __post_init__(self) -> None:
        divergence_of(self.divergence)

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """The attention that comes next in the target; no randomness."""
        del key, tables
        return init_adapter(self.config, split(target)[1])

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See `divergence_loss`; embedding, head and target stay frozen."""
        del key
        vocab = tables["vocab"]
        head = jax.lax.stop_gradient(target_head(target.config, split(target)[1], vocab))
        net: Adapter = merge(kangaroo_graph(self.config)[0], with_head(self.config, draft_params, head))
        hidden = net.full(jax.lax.stop_gradient(self._exit(target, batch)), batch.positions, batch.segments)
        divergence = divergence_of(self.divergence)
        return divergence_loss(divergence, hidden, lambda x: net.logits(x, target), vocab, target, batch)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        reduced = self.config.head_size != self.config.vocab_size
        kept = dict(tables) if reduced else {}
        return SavedDrafter("kangaroo", self.config, draft_params, kept, ("head",) if reduced else (), info)

    def _exit(self, target: Decoder, batch: Batch) -> jax.Array:
        """The input of layer E: from the store where it has it, else by a pass of the layers before it."""
        stored = batch.taps.get(str(self.config.exit_layer))
        if stored is not None:
            return jnp.asarray(stored).astype(target.config.dtype)
        return target.full(batch.tokens, batch.positions, batch.segments, stop=self.config.exit_layer).hidden
