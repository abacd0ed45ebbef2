"""EAGLE-1's objective (Li et al. 2024, 2401.15077 section 3.2): predict the target's next feature, and its law.

Feature t and token t+1 go in; what comes out is held against feature t+1 (smooth L1, mean over its width) and, through
the target's frozen head, against the target's law of token t+2 (cross-entropy). Features carry uniform noise in
training, so that the draft learns to live with its own errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder
from specjax.models.eagle import EagleConfig, init_feature_layer
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss
from specjax.training.objectives.rollout import Step, check_store, features_of, rollout_loss, training_network

NOISE_LENGTH = 512  # Tokens of the document whose noise is as wide as it says.


@dataclasses.dataclass(frozen=True)
class EagleRegression:
    """Feature regression and soft cross-entropy.

    Attributes:
        config: the network.
        feature_weight: of the smooth L1 loss.
        law_weight: of the cross-entropy against the target's law, restricted to the draft vocabulary with its true
            mass (`Step.cross_entropy`).
        noise: width of the uniform noise on the features of a document of 512 tokens in training, see `feature_noise`.
    """

    config: EagleConfig
    feature_weight: float = 1.0
    law_weight: float = 0.1
    noise: float = 0.2

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Random, but for the projection, which starts as the feature itself plus a random view of the token."""
        del target, tables
        params = init_feature_layer(self.config, key)
        width = self.config.layer.hidden_size
        params["fc"]["kernel"] = params["fc"]["kernel"].at[width:].set(jnp.eye(width, dtype=self.config.layer.dtype))
        return params

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class and `rollout_loss`, of one step."""
        check_store(batch, self.config.taps)
        net = training_network(self.config, draft_params, target, tables["vocab"])
        features = features_of(net, batch, self.config.taps)
        if self.noise and key is not None:
            features += feature_noise(key, features, batch.segments, self.noise)
        _, hidden = net.unrolled(batch.tokens, features, batch.positions, batch.segments, 1)

        def step_loss(step: Step) -> jax.Array:
            regression = jnp.mean(smooth_l1(step.hidden.astype(jnp.float32) - step.normed), axis=-1)
            return self.feature_weight * regression + self.law_weight * step.cross_entropy

        return rollout_loss(net, hidden, batch, tables["vocab"], target, step_loss, (1.0,))

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        return SavedDrafter("eagle", self.config, draft_params, tables, ("embed", "head"), info)


def feature_noise(key: jax.Array, features_btd: jax.Array, segments_bt: jax.Array, width: float) -> jax.Array:
    """Uniform noise `[B, T, d]` around 0, `width * 512 / n` wide in a document of n tokens.

    The paper names the width alone; its authors' code scales it so. Their rows hold one document each.
    """
    segments = jnp.asarray(segments_bt)
    lengths_bt = jnp.sum(segments[:, :, None] == segments[:, None, :], axis=-1)
    widths = (width * NOISE_LENGTH / lengths_bt).astype(features_btd.dtype)
    return widths[..., None] * jax.random.uniform(key, features_btd.shape, features_btd.dtype, -0.5, 0.5)


def smooth_l1(x: jax.Array) -> jax.Array:
    """x^2 / 2 where |x| < 1, else |x| - 1/2."""
    size = jnp.abs(x)
    return jnp.where(size < 1, 0.5 * x * x, size - 0.5)
