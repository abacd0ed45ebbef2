"""Multi-token prediction on a frozen target (FastMTP; the layers of `specjax.models.mtp`).

Depth k at position t learns token t + 1 + k, with the true tokens t + 1 ... t + k in front of it where modules read
them. Labels, tokens and masks shift together and never into another document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, merge, split
from specjax.models.mtp import Mtp, MtpConfig, copy_last_layer, init_mtp, mtp_graph
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.heads import HeadsLoss, ahead


@dataclasses.dataclass(frozen=True)
class MultiTokenHeads:
    """Cross-entropy of every depth, see `HeadsLoss`; embedding, head and target stay frozen.

    Attributes:
        config: the layers.
        criterion: weights of depths (FastMTP decays by 0.6) and of the target's law.
    """

    config: MtpConfig
    criterion: HeadsLoss = HeadsLoss(decay=0.6)

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Copies of the target's last layer."""
        del tables
        return copy_last_layer(self.config, init_mtp(self.config, key), split(target)[1])

    def counts(self, tables: Any, batch: Batch) -> jax.Array:
        """See `Counted`."""
        return self.criterion.counts(batch, tables["vocab"], self.config.depth)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See `HeadsLoss`."""
        del key
        if batch.tokens.shape[1] <= self.config.depth + 1:
            raise ValueError(
                f"depth={self.config.depth} predicts up to {self.config.depth + 1} tokens ahead, but rows have "
                f"{batch.tokens.shape[1]}; expected longer rows, or less depth"
            )
        vocab = tables["vocab"]
        head = jax.lax.stop_gradient(target_head(target.config, split(target)[1], vocab))
        net: Mtp = merge(mtp_graph(self.config)[0], with_head(self.config, draft_params, head))
        depths = []
        hidden = feature = jax.lax.stop_gradient(self._feature(target, batch))
        for k in range(1, self.config.depth + 1):
            embedded = None
            if self.config.kind == "sequential":
                embedded = jax.lax.stop_gradient(target.embed_tokens(ahead(jnp.asarray(batch.tokens), k)))
            before = feature if embedded is None else hidden
            hidden = net.full(k, before, embedded, batch.positions, batch.segments)
            depths.append(net.normed(k, hidden, target))
        cap, counts = target.config.final_softcap, tables.get("counts")
        return self.criterion(jnp.stack(depths, axis=2), batch, vocab, head, cap, counts)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        reduced = self.config.head_size != self.config.vocab_size
        kept = dict(tables) if reduced else {}
        return SavedDrafter("mtp", self.config, draft_params, kept, ("head",) if reduced else (), info)

    def _feature(self, target: Decoder, batch: Batch) -> jax.Array:
        """From the store where it has it, else by a pass of the target."""
        stored = batch.normed if self.config.feature == "normed" else batch.taps.get(str(self.config.feature))
        if stored is not None:
            return jnp.asarray(stored).astype(target.config.dtype)
        stop = self.config.feature if isinstance(self.config.feature, int) else None
        taps = self.config.taps
        return target.full(batch.tokens, batch.positions, batch.segments, stop=stop, taps=taps).taps[taps[0]]


def with_head(config: MtpConfig, params: Any, head_dv: jax.Array) -> Any:
    """The parameters with the head rows of a reduced draft vocabulary."""
    return params if config.head_size == config.vocab_size else {**params, "lm_head": {"kernel": head_dv}}
