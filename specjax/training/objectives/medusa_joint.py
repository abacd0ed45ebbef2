"""Medusa-2: heads and target trained together (Cai et al. 2024, 2401.10774, section 2.2.2).

The result is a new target, and heads for it: decoding with them is lossless with respect to that target, not the old
one. First the heads are trained alone (their warm-up), so that what they do not know yet does not spoil the target;
then both, the heads at a higher learning rate, which the optimizer's `rates` give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, ModelConfig, graph, merge, split
from specjax.models.eagle import ahead
from specjax.models.medusa import MedusaConfig, MedusaHeads, heads_graph, init_heads
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss, masked_sum
from specjax.training.objectives.heads import HeadsLoss, exported


@dataclasses.dataclass(frozen=True)
class MedusaJoint:
    """L_LM + weight * sum over heads of decay^i L_i, each a mean over the positions that predict a next token.

    Trainable parameters are `target`, a whole decoder that begins as the trainer's own target, and `heads`. The
    vocabulary product is the target's, for all heads; it learns from the next token alone.

    Attributes:
        target: the model's config.
        config: of the heads, over the whole vocabulary.
        criterion: of the heads; it has no teacher, since the target's law changes.
        weight: lambda_0 of the heads' loss.
        warmup: updates before the target is trained too.
        anchor: share of the next token's loss that is the cross-entropy with the law of the target as it was, in place
            of the text's token (the paper's self-distillation, section 2.3.2).
    """

    target: ModelConfig
    config: MedusaConfig
    criterion: HeadsLoss = HeadsLoss()
    weight: float = 0.2
    warmup: int = 0
    anchor: float = 0.0

    def __post_init__(self) -> None:
        if self.config.own_head or self.config.head_size != self.target.vocab_size:
            raise ValueError(
                f"heads of {self.config.head_size} tokens, own_head={self.config.own_head}: joint training shares the "
                f"target's whole product of {self.target.vocab_size}"
            )
        if self.criterion.teacher:
            raise ValueError(f"teacher={self.criterion.teacher}: the target's law changes as it is trained; expected 0")
        if self.weight < 0 or self.warmup < 0 or not 0 <= self.anchor <= 1:
            raise ValueError(
                f"weight={self.weight}, warmup={self.warmup}, anchor={self.anchor}; expected 0 or more, and a share in "
                "[0, 1]"
            )

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """A copy of the target, and heads that say what it says."""
        del tables
        return {"target": jax.tree.map(jnp.array, split(target)[1]), **init_heads(self.config, key)}

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class; `tables["step"]` says when.

        Without a key the loss is the next token's alone, exp of which is the perplexity. Metrics: `match`, how often
        the target's first choice is the token; those of the heads (`HeadsLoss`).
        """
        own, vocab = draft_params["target"], jnp.arange(self.target.vocab_size, dtype=jnp.int32)
        network = merge(graph(self.target)[0], own)
        normed = network.full(batch.tokens, batch.positions, batch.segments, taps=("normed",)).taps["normed"]
        joint = jnp.asarray(True) if key is None else tables["step"] >= self.warmup
        predicts, count = jnp.asarray(batch.predicts), jnp.sum(batch.predicts, dtype=jnp.float32)
        log_p = jax.nn.log_softmax(network.logits(normed).astype(jnp.float32), axis=-1)
        label = ahead(jnp.asarray(batch.tokens), 1)
        nll = -jnp.take_along_axis(log_p, label[..., None], axis=-1)[..., 0]
        matches = masked_sum(jnp.argmax(log_p, axis=-1) == label, predicts)

        head = jax.lax.stop_gradient(target_head(self.target, own, vocab))
        # What a head reads leads back to the target only once that is trained.
        read = jnp.where(joint, normed, jax.lax.stop_gradient(normed)).astype(jnp.float32)
        params = {"heads": draft_params["heads"], "lm_head": {"kernel": head}}
        heads: MedusaHeads = merge(heads_graph(self.config)[0], params)
        # Sums: all of them are divided by the positions of the next token.
        sums = jnp.ones((self.config.num_heads,), jnp.float32)
        found = self.criterion(heads(read), batch, vocab, head, self.config.final_softcap, sums)
        metrics = {**found.metrics, "match": (matches, count), "loss_next": (masked_sum(nll, predicts), count)}
        if key is None:
            return Loss(masked_sum(nll, predicts), count, metrics)
        if self.anchor:
            soft = -jnp.sum(jnp.exp(_law(target, batch)) * log_p, axis=-1)
            nll = (1 - self.anchor) * nll + self.anchor * soft
        return Loss(jnp.where(joint, masked_sum(nll, predicts), 0.0) + self.weight * found.sum, count, metrics)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """The heads, for the target in `draft_params["target"]`, which is saved apart."""
        del tables
        vocab = {"vocab": jnp.arange(self.target.vocab_size, dtype=jnp.int32)}
        heads = {"heads": draft_params["heads"]}
        return exported("medusa", self.config, self.criterion.ranks, ("head",), heads, vocab, info)


def _law(target: Decoder, batch: Batch) -> jax.Array:
    """Log-probabilities `[B, T, V]` of the target as it was."""
    out = target.full(batch.tokens, batch.positions, batch.segments, taps=("normed",))
    return jax.lax.stop_gradient(jax.nn.log_softmax(target.logits(out.taps["normed"]).astype(jnp.float32), axis=-1))
