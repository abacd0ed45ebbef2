"""EAGLE-3's objective (Li et al. 2025, 2503.01840 section 3.2): training-time test.

The network drafts K tokens from every position along the text: its first step reads the target's fused features, each
later one its own output, as in decoding. Only the law counts: there is no regression, so features are free to be what
drafting needs. The target's law is restricted to the draft vocabulary *with its true mass* (the published trainers
renormalise it and drop positions whose likeliest token lies outside): what lies outside can never be accepted, so a
position weighs as much as it can yield.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder
from specjax.models.eagle import Eagle3Config, head_rows, init_feature_layer
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.rollout import Step, check_store, features_of, rollout_loss, training_network


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest:
    """Sum over steps k of `decay`^k times the cross-entropy of step k.

    Attributes:
        config: the network.
        steps: K.
        decay: of a step's weight.
        own_head: the head is the draft's own and trained, as published; otherwise it stays the target's.
    """

    config: Eagle3Config
    steps: int = 7
    decay: float = 0.8
    own_head: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}; expected 1 or more steps of training-time test")

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Random, but where the head expects the target's own stream.

        The highest tap passes the fusion as it is (where widths agree), and the last norm is the target's. A head of
        its own starts as the target's.
        """
        config = self.config
        params = init_feature_layer(config, key)
        if config.layer.hidden_size == config.target_hidden_size:
            width, dtype = config.target_hidden_size, config.layer.dtype
            params["fc"]["kernel"] = params["fc"]["kernel"].at[-width:].set(jnp.eye(width, dtype=dtype))
            norm = target.final_norm
            params["norm"]["weight"] = norm.weight[...] + jnp.asarray(norm.offset - config.layer.norm_offset, dtype)
        if self.own_head:
            params["lm_head"] = {"kernel": jnp.array(head_rows(target, tables["vocab"]))}
        return params

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class and `rollout_loss`; the loss is normalised by the positions of the first step."""
        del key
        check_store(batch, self.config.taps)
        net = training_network(self.config, draft_params, target, tables["vocab"])
        features = features_of(net, batch, self.config.taps)
        _, hidden = net.unrolled(batch.tokens, features, batch.positions, batch.segments, self.steps)
        weights = tuple(self.decay**k for k in range(self.steps))
        own = self.own_head
        return rollout_loss(net, hidden, batch, tables["vocab"], target, _cross_entropy, weights, trained_head=own)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        shares = ("embed",) if self.own_head else ("embed", "head")
        return SavedDrafter("eagle3", self.config, draft_params, tables, shares, info)


def _cross_entropy(step: Step) -> jax.Array:
    return step.cross_entropy
