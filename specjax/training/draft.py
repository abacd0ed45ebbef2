"""The student of the distillation objectives: a small decoder cut out of the target.

It borrows the target's embedding, and as its output head the rows of the target's head that belong to its reduced
vocabulary. Both stay frozen and are never stored; only layers and final norm are trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, ModelConfig, graph, merge, split
from specjax.training.data import Batch


@dataclasses.dataclass(frozen=True)
class Student:
    """Which part of the target the draft starts from.

    Attributes:
        target: the target's config.
        layers: target layers that its layers are copies of, in order.
        intermediate_size: MLP width; below the target's, the neurons with the largest weights are kept.
        draft_vocab: rows of the reduced head.
    """

    target: ModelConfig
    layers: tuple[int, ...]
    intermediate_size: int
    draft_vocab: int

    def __post_init__(self) -> None:
        depth, width = self.target.num_layers, self.target.intermediate_size
        outside = [i for i in self.layers if not 0 <= i < depth]
        if outside or not self.layers:
            raise ValueError(f"layers={self.layers}: expected one or more of the target's layers 0 to {depth - 1}")
        if not 0 < self.intermediate_size <= width:
            raise ValueError(f"intermediate_size={self.intermediate_size}: expected 1 to the target's {width}")
        if not 0 < self.draft_vocab <= self.target.vocab_size:
            raise ValueError(f"draft_vocab={self.draft_vocab}: expected 1 to the target's {self.target.vocab_size}")

    @property
    def config(self) -> ModelConfig:
        """The draft's own config: untied, reduced head."""
        cut = self.target.with_layers(self.layers)
        return dataclasses.replace(
            cut, intermediate_size=self.intermediate_size, head_size=self.draft_vocab, tie_embeddings=False
        )

    def init(self, target: Decoder) -> Any:
        """Trainable parameters copied from the target: layers (renumbered from 0) and final norm."""
        params = split(target)[1]
        layers = {i: self._narrow(params["layers"][source]) for i, source in enumerate(self.layers)}
        return jax.tree.map(jnp.array, {"layers": layers, "final_norm": params["final_norm"]})

    def _narrow(self, layer: Any) -> Any:
        """A layer with the MLP neurons of largest |gate| |up| |down|."""
        if self.intermediate_size == self.target.intermediate_size:
            return layer
        mlp = layer["mlp"]
        size = jnp.linalg.norm(mlp["gate"]["kernel"], axis=0) * jnp.linalg.norm(mlp["up"]["kernel"], axis=0)
        size = size * jnp.linalg.norm(mlp["down"]["kernel"], axis=1)
        kept = jnp.sort(jnp.argsort(-size)[: self.intermediate_size])

        def take(name: str, part: Any) -> Any:
            if name == "down":
                return {**part, "kernel": part["kernel"][kept]}
            return {leaf: value[..., kept] for leaf, value in part.items()}

        return {**layer, "mlp": {name: take(name, part) for name, part in mlp.items()}}

    def network(self, params: Any, target: Decoder, vocab: jax.Array) -> Decoder:
        """The draft, with the borrowed embedding and head rows; gradients stop at both."""
        frozen = split(target)[1]
        borrowed = {
            "embed": frozen["embed"],
            "lm_head": {"kernel": target_head(self.target, frozen, vocab)},
        }
        return merge(graph(self.config)[0], {**params, **jax.lax.stop_gradient(borrowed)})

    def hidden(self, params: Any, target: Decoder, vocab: jax.Array, batch: Batch) -> tuple[Decoder, jax.Array]:
        """The draft, and its final hidden states `[B, T, d]` on packed rows, after the last norm."""
        network = self.network(params, target, vocab)
        out = network.full(batch.tokens, batch.positions, batch.segments, taps=("normed",))
        return network, out.taps["normed"]

    def export(self, params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """The student as a drafter of method `draft_model`."""
        return SavedDrafter("draft_model", self.config, params, tables, shares=("embed", "head"), info=info)
