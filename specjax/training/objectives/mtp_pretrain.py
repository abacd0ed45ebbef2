"""Multi-token pretraining: n independent heads on a shared trunk (Gloeckle et al. 2024, 2404.19737, section 2).

Head 1 is the target's own last layer; the others are layers like it on the same input. All share the final norm and
the vocabulary product. Head i at position t predicts token t + i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder, ModelConfig, graph, init_decoder, merge
from specjax.models.mtp import MtpConfig, init_mtp, mtp_config
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss, each_alike, masked_sum
from specjax.training.objectives.heads import ahead

# One head on the trunk's output: (z [B,T,d], the head's own parameters, what heads share, its arrays) -> (sum, counts).
HeadLoss = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class MultiTokenPretraining:
    """The mean of the heads' cross-entropies; trains the target from scratch, and the heads with it.

    Trainable parameters are `target`, a whole decoder, and `heads`, those beyond the next token; the trainer's own
    target only lends its shapes.

    Attributes:
        target: the model's config.
        heads: n; 1 is next-token prediction alone.
        decay: head i weighs decay^(i - 1); the paper has 1.
    """

    target: ModelConfig
    heads: int = 1
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"heads={self.heads}; expected at least 1, the next token's")
        if self.heads > 1 and self.target.num_layers < 2:
            raise ValueError(
                f"num_layers={self.target.num_layers}: {self.heads} heads need a trunk below the last layer"
            )
        if not self.decay > 0:
            raise ValueError(f"decay={self.decay}: further heads would have no weight; expected a number above 0")

    @property
    def extra(self) -> MtpConfig | None:
        """The heads beyond the next token, as a drafter's network; None where there are none."""
        if self.heads == 1:
            return None
        return mtp_config(self.target, depth=self.heads - 1, kind="independent")

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Everything random."""
        del target, tables
        params = {"target": init_decoder(self.target, key)}
        if self.extra is None:
            return params
        return {**params, **init_mtp(self.extra, jax.random.fold_in(key, 1))}

    def counts(self, tables: Any, batch: Batch) -> jax.Array:
        """See `Counted`."""
        del tables
        return jnp.sum(labels_ahead(batch, self.heads)[1], axis=(1, 2), dtype=jnp.float32)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class. Metrics by head: `loss_<i>`, and `match_<i>`, how often its first choice is the token.

        Raises:
            ValueError: rows too short for the furthest head.
        """
        del target, key
        check_length(self.heads, batch)
        own, last = draft_params["target"], self.target.num_layers - 1
        trunk = merge(graph(self.target)[0], own)
        z = trunk.full(batch.tokens, batch.positions, batch.segments, stop=last).hidden
        layers = [own["layers"][last], *(head["layer"] for _, head in sorted(draft_params.get("heads", {}).items()))]
        shared = {name: group for name, group in own.items() if name != "layers"}
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        labels, masks = labels_ahead(batch, self.heads)
        weights = self.decay ** jnp.arange(self.heads, dtype=jnp.float32)
        counts = self.counts(tables, batch)
        factors = each_alike(weights, tables.get("counts", counts))

        def head(z: jax.Array, layer: Any, shared: Any, of: Any) -> tuple[jax.Array, Any]:
            label, mask, weight = of
            decoder = merge(graph(self.target.with_layers((last,)))[0], {**shared, "layers": {0: layer}})
            out = decoder.full(z, batch.positions, batch.segments, taps=("normed",))
            log_p = jax.nn.log_softmax(decoder.logits(out.taps["normed"]), axis=-1)
            nll = -jnp.take_along_axis(log_p, label[..., None], axis=-1)[..., 0]
            loss, hits = masked_sum(nll, mask), masked_sum(jnp.argmax(log_p, axis=-1) == label, mask)
            return weight * loss, (loss, hits)

        loss, (losses, hits) = over_heads(head, z, stacked, shared, (labels, masks, factors))
        metrics = {f"loss_{i + 1}": (losses[i], counts[i]) for i in range(self.heads)}
        metrics |= {f"match_{i + 1}": (hits[i], counts[i]) for i in range(self.heads)}
        return Loss(loss, jnp.sum(weights * counts), metrics)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """The heads beyond the next token; the target is saved apart, from `draft_params["target"]`.

        Raises:
            ValueError: there are none.
        """
        del tables
        if self.extra is None:
            raise ValueError("heads=1: nothing predicts further than the next token, so there is no drafter to save")
        return SavedDrafter("mtp", self.extra, {"heads": draft_params["heads"]}, {}, (), info)


def check_length(heads: int, batch: Batch) -> None:
    """Raises ValueError where no token of a row is as far ahead as the furthest head predicts."""
    length = batch.tokens.shape[1]
    if length <= heads:
        raise ValueError(
            f"heads={heads} predict up to {heads} tokens ahead, but rows have {length}; expected longer rows, or fewer "
            "heads"
        )


def labels_ahead(batch: Batch, heads: int) -> tuple[jax.Array, jax.Array]:
    """Tokens `[n, B, T]` that are 1 ... n positions ahead, and where all up to them belong to the same document."""
    tokens, predicts = jnp.asarray(batch.tokens), jnp.asarray(batch.predicts)
    mask, labels, masks = predicts, [], []
    for i in range(heads):
        mask = mask & ahead(predicts, i) if i else predicts
        labels.append(ahead(tokens, i + 1))
        masks.append(mask)
    return jnp.stack(labels), jnp.stack(masks)


def over_heads(fn: HeadLoss, z: jax.Array, heads: Any, shared: Any, extras: Any) -> tuple[jax.Array, Any]:
    """Sums a loss over heads, one head at a time, forward and backward (section 2, "Memory-efficient implementation").

    Where a gradient is asked for, each head's is taken with its value and added up, so that the logits and activations
    of one head exist at a time, whatever the number of heads. Else there is none: held-out rows cost a forward pass.

    Args:
        fn: loss of one head, and counts that get no gradient.
        z: the trunk's output.
        heads: parameters of all heads, stacked `[n, ...]`.
        shared: parameters that all heads use.
        extras: arrays `[n, ...]`, one a head.

    Returns:
        The sum, differentiable in `z`, `heads` and `shared`, and the counts `[n, ...]`.
    """
    graded = jax.value_and_grad(fn, argnums=(0, 1, 2), has_aux=True)

    @jax.custom_vjp
    def total(z: jax.Array, heads: Any, shared: Any) -> tuple[jax.Array, Any]:
        def body(so_far: jax.Array, part: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            loss, counts = fn(z, part[0], shared, part[1])
            return so_far + loss, counts

        return jax.lax.scan(body, jnp.zeros(()), (heads, extras))

    def forward(z: jax.Array, heads: Any, shared: Any) -> tuple[tuple[jax.Array, Any], Any]:
        def body(carry: Any, part: tuple[Any, Any]) -> tuple[Any, Any]:
            so_far, to_z, to_shared = carry
            (loss, counts), (dz, dhead, dshared) = graded(z, part[0], shared, part[1])
            return (so_far + loss, to_z + dz, jax.tree.map(jnp.add, to_shared, dshared)), (dhead, counts)

        init = (jnp.zeros(()), jnp.zeros_like(z), jax.tree.map(jnp.zeros_like, shared))
        (loss, to_z, to_shared), (to_heads, counts) = jax.lax.scan(body, init, (heads, extras))
        return (loss, counts), (to_z, to_heads, to_shared)

    def backward(slopes: Any, cotangents: tuple[jax.Array, Any]) -> Any:
        return jax.tree.map(lambda slope: (cotangents[0] * slope).astype(slope.dtype), slopes)

    total.defvjp(forward, backward)
    return total(z, heads, shared)
