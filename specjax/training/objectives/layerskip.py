"""LayerSkip training (Elhoushi et al. 2024, 2404.16710, section 4.1): a target whose early layers can be read.

Layers are dropped a row at a time, later ones more often, and the output of every layer is trained through the one
final norm and head. Afterwards `early_exit` drafts from it without anything added.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder, ModelConfig, graph, merge, split
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss, masked_sum
from specjax.training.objectives.heads import ahead
from specjax.training.objectives.mtp_pretrain import over_heads

RAMPS = ("constant", "exponential")
CURRICULA = ("all", "rotational", "gradual")
FRACTION = 0.5  # of the steps, after which the gradual curriculum has every exit on


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is dropped and which exits count, as functions of the step.

    Attributes:
        layers: L, at least 2.
        steps: T.
        dropout: p_max, the last layer's dropout once the ramp is up.
        ramp: dropout over time: `constant` (continued training), `exponential` (from scratch).
        exit_scale: e_scale, weight of early exits against the last layer's; 0 trains the last layer alone.
        curriculum: `rotational`: one in `every` layers, another one each step; `gradual`: from the last layer down, all
            on after half the steps; `all`. The last layer always counts.
        every: R of the rotational curriculum.

    Raises:
        ValueError: a value is out of range.
    """

    layers: int
    steps: int
    dropout: float = 0.1
    ramp: str = "exponential"
    exit_scale: float = 0.2
    curriculum: str = "rotational"
    every: int = 1

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise ValueError(f"layers={self.layers}: a model of one layer has no early exit; expected at least 2")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}; expected a probability in [0, 1)")
        if self.exit_scale < 0:
            raise ValueError(f"exit_scale={self.exit_scale}; expected 0 or more")
        if self.ramp not in RAMPS:
            raise ValueError(f"ramp={self.ramp!r}; expected {' or '.join(RAMPS)}")
        if self.curriculum not in CURRICULA:
            raise ValueError(f"curriculum={self.curriculum!r}; expected {', '.join(CURRICULA)}")
        if not 1 <= self.every <= self.layers:
            raise ValueError(f"every={self.every}; expected 1 to the {self.layers} layers")

    def rates(self, step: jax.Array) -> jax.Array:
        """Dropout `[L]` of each layer: p_max D(l) S(t), D(l) = 2^(l / (L - 1)) - 1, S(t) likewise in t and T, or 1."""
        depth = jnp.exp2(jnp.arange(self.layers) / (self.layers - 1)) - 1
        time = jnp.exp2(jnp.minimum(step / max(self.steps - 1, 1), 1.0)) - 1 if self.ramp == "exponential" else 1.0
        return self.dropout * depth * time

    def weights(self, step: jax.Array) -> jax.Array:
        """Weight `[L]` of the loss behind each layer; they sum to 1.

        e(l) = e_scale (0 + ... + l) before the last layer, L - 1 + e_scale (0 + ... + L - 2) at it, where the
        curriculum has them on, over their sum. The exit behind the first layer is never trained for itself.
        """
        layer = np.arange(self.layers)
        scale = self.exit_scale * np.cumsum(layer).astype(np.float32)
        scale[-1] = self.layers - 1 + self.exit_scale * layer[:-1].sum()
        scaled = jnp.where(self.enabled(step), scale, 0.0)
        return scaled / jnp.sum(scaled)

    def enabled(self, step: jax.Array) -> jax.Array:
        """Bool `[L]`: which exits count."""
        layer, last = jnp.arange(self.layers), jnp.arange(self.layers) == self.layers - 1
        if self.curriculum == "all":
            return jnp.ones((self.layers,), bool)
        if self.curriculum == "rotational":
            return ((layer - step) % self.every == 0) | last
        return (step >= FRACTION * self.steps * (self.layers - layer) / self.layers) | last


@dataclasses.dataclass(frozen=True)
class LayerSkipPretraining:
    """The weighted sum of the exits' cross-entropies, each over the tokens of the text.

    Trainable parameters are `target`, a whole decoder that begins as the trainer's own target: random, or a pretrained
    one to be trained further.

    Attributes:
        target: the model's config.
        schedule: see `Schedule`.
    """

    target: ModelConfig
    schedule: Schedule

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """A copy of the target."""
        del key, tables
        return {"target": jax.tree.map(jnp.array, split(target)[1])}

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class; `tables["step"]` says when.

        Without a key nothing is dropped, and the loss is the last layer's alone, exp of which is the perplexity.
        Metrics by exit are taken then: `loss_exit_<l>` and `match_exit_<l>`, how often the first choice behind l layers
        is the token, and `match_exits`, the mean over all exits. Always: `match`, that of the last layer.
        """
        del target
        own, static = draft_params["target"], graph(self.target)[0]
        label, mask = ahead(jnp.asarray(batch.tokens), 1), jnp.asarray(batch.predicts)
        count, layers = jnp.sum(mask, dtype=jnp.float32), self.target.num_layers
        kept = None
        if key is not None:
            rates = self.schedule.rates(tables["step"])
            kept = ~jax.random.bernoulli(key, rates[:, None], (layers, batch.tokens.shape[0]))
        outputs = layer_outputs(merge(static, own), batch, kept)
        shared = {name: group for name, group in own.items() if name != "layers"}
        fixed = jax.lax.stop_gradient(own)

        def exit_counts(hidden: jax.Array, shared: Any) -> tuple[jax.Array, jax.Array]:
            decoder = merge(static, {**fixed, **shared})
            log_p = jax.nn.log_softmax(decoder.logits(decoder.final_norm(hidden)), axis=-1)
            nll = -jnp.take_along_axis(log_p, label[..., None], axis=-1)[..., 0]
            return masked_sum(nll, mask), masked_sum(jnp.argmax(log_p, axis=-1) == label, mask)

        if key is None:
            losses, hits = jax.lax.map(lambda hidden: exit_counts(hidden, shared), outputs)
            metrics = {f"loss_exit_{i + 1}": (losses[i], count) for i in range(layers)}
            metrics |= {f"match_exit_{i + 1}": (hits[i], count) for i in range(layers)}
            metrics["match_exits"] = (jnp.mean(hits.astype(jnp.float32)), count)
            return Loss(losses[-1], count, {**metrics, "match": (hits[-1], count)})

        def exit_loss(_: jax.Array, hidden: jax.Array, shared: Any, weight: jax.Array) -> tuple[jax.Array, Any]:
            # Exits that are off cost nothing.
            none = (jnp.zeros(()), jnp.zeros(()))
            loss, hits = jax.lax.cond(weight > 0, lambda: exit_counts(hidden, shared), lambda: none)
            return weight * loss, (loss, hits)

        weights = self.schedule.weights(tables["step"])
        loss, (losses, hits) = over_heads(exit_loss, jnp.zeros(()), outputs, shared, weights)
        return Loss(loss, count, {"loss_last": (losses[-1], count), "match": (hits[-1], count)})

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """There is none: the target is saved, from `draft_params["target"]`, and drafter `early_exit` reads it.

        Raises:
            ValueError: always.
        """
        raise ValueError("LayerSkip trains the target, no drafter: save the target, and draft with 'early_exit'")


def layer_outputs(network: Decoder, batch: Batch, kept_lb: jax.Array | None) -> jax.Array:
    """What each layer leaves behind, `[L, B, T, d]`, where rows skip the layers that are dropped for them.

    Args:
        network: the decoder.
        batch: packed rows.
        kept_lb: bool `[L, B]`, or None to run every layer on every row.
    """
    x, outputs = network.embed_tokens(jnp.asarray(batch.tokens)), []
    one = functools.partial(network.full, positions_bt=batch.positions, segments_bt=batch.segments)
    for i in range(network.config.num_layers):
        y = one(x, start=i, stop=i + 1).hidden
        x = y if kept_lb is None else jnp.where(kept_lb[i][:, None, None], y, x)
        outputs.append(x)
    return jnp.stack(outputs)
