"""Pretraining with sequential multi-token modules (DeepSeek-V3, 2412.19437, section 2.2).

L = L_main + lambda / D sum_k L_k: module k at position t predicts token t + 1 + k from the hidden state of depth k - 1
and the embedding of token t + k. Target, embedding, vocabulary product and modules are trained together, and every
depth's gradient reaches all that it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder, ModelConfig, graph, init_decoder, merge
from specjax.models.mtp import Mtp, MtpConfig, init_mtp, mtp_config, mtp_graph
from specjax.training.data import Batch
from specjax.training.objectives.base import Later, Loss, over_positions_with
from specjax.training.objectives.heads import ahead
from specjax.training.objectives.mtp_pretrain import check_length, labels_ahead


@dataclasses.dataclass(frozen=True)
class SequentialPretraining:
    """The next token's cross-entropy and, weighted, the mean of the modules'; trains the target from scratch.

    Trainable parameters are `target`, a whole decoder, and `heads`, the modules; the trainer's own target only lends
    its shapes.

    Attributes:
        target: the model's config.
        heads: n, how many tokens are predicted: the next one, and D = n - 1 by modules.
        weights: lambda before and from `switch` on; 0.3 and 0.1 in the paper.
        switch: the step at which lambda changes.
        chunk: positions whose logits exist at a time.
    """

    target: ModelConfig
    heads: int = 2
    weights: tuple[float, ...] = (0.3, 0.1)
    switch: int = 0
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.heads < 2:
            raise ValueError(f"heads={self.heads} with kind='sequential': no module is left; expected at least 2")
        if len(self.weights) != 2 or not all(w > 0 for w in self.weights):
            raise ValueError(f"weights={self.weights}; expected two numbers above 0, before and after the switch")
        if self.switch < 0:
            raise ValueError(f"switch={self.switch}; expected a step, 0 or more")

    @property
    def extra(self) -> MtpConfig:
        """The modules, as a drafter's network."""
        return mtp_config(self.target, depth=self.heads - 1, kind="sequential")

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Everything random."""
        del target, tables
        return {"target": init_decoder(self.target, key), **init_mtp(self.extra, jax.random.fold_in(key, 1))}

    def counts(self, tables: Any, batch: Batch) -> jax.Array:
        """See `Counted`."""
        del tables
        return jnp.sum(labels_ahead(batch, self.heads)[1], axis=(1, 2), dtype=jnp.float32)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class; `tables["step"]` says when. Without a key the loss is the next token's alone.

        Metrics by head: `loss_<i>`, and `match_<i>`, how often its first choice is the token; 1 is the target itself.

        Raises:
            ValueError: rows too short for the furthest module.
        """
        del target
        check_length(self.heads, batch)
        own, extra = draft_params["target"], self.extra
        trunk: Decoder = merge(graph(self.target)[0], own)
        net: Mtp = merge(mtp_graph(extra)[0], {"heads": draft_params["heads"]})
        tap = extra.taps[0]
        hidden = trunk.full(batch.tokens, batch.positions, batch.segments, taps=extra.taps).taps[tap]
        read = [hidden]
        for k in range(1, self.heads):
            embedded = trunk.embed_tokens(ahead(jnp.asarray(batch.tokens), k))
            hidden = net.full(k, hidden, embedded, batch.positions, batch.segments)
            read.append(net.normed(k, hidden, trunk))

        labels, masks = labels_ahead(batch, self.heads)
        found = [self._cross_entropy(own, *each) for each in zip(read, labels, masks, strict=True)]
        counts = self.counts(tables, batch)
        whole = jnp.maximum(tables.get("counts", counts), 1.0)
        total = found[0][0]
        if key is not None:
            early, late = self.weights
            weight = jnp.where(tables["step"] < self.switch, early, late) / (self.heads - 1)
            # The step divides by the next token's positions; each module is a mean over its own.
            total += sum(weight * loss * whole[0] / n for (loss, _), n in zip(found[1:], whole[1:], strict=True))
        metrics = {f"loss_{i + 1}": (loss, counts[i]) for i, (loss, _) in enumerate(found)}
        metrics |= {f"match_{i + 1}": (hits, counts[i]) for i, (_, hits) in enumerate(found)}
        return Loss(total, counts[0], metrics)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """The modules; the target is saved apart, from `draft_params["target"]`."""
        del tables
        return SavedDrafter("mtp", self.extra, {"heads": draft_params["heads"]}, {}, (), info)

    def _cross_entropy(
        self, own: Any, x_btd: jax.Array, label_bt: jax.Array, mask_bt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Sums of the cross-entropy and of hits, by the target's own vocabulary product, which learns from it."""
        shared = {name: group for name, group in own.items() if name in ("embed", "lm_head")}
        fixed = jax.lax.stop_gradient(own)

        def part(
            x_cd: jax.Array, label_c: jax.Array, mask_c: jax.Array, shared: Any, later: Later
        ) -> tuple[jax.Array, jax.Array]:
            del later
            decoder: Decoder = merge(graph(self.target)[0], {**fixed, **shared})
            log_p = jax.nn.log_softmax(decoder.logits(x_cd), axis=-1)
            nll = -jnp.take_along_axis(log_p, label_c[:, None], axis=-1)[:, 0]
            hits = jnp.argmax(log_p, axis=-1) == label_c
            return jnp.sum(jnp.where(mask_c, nll, 0.0)), jnp.sum(mask_c & hits, dtype=jnp.float32)

        return over_positions_with(shared, part, x_btd, label_bt, mask_bt, self.chunk)
