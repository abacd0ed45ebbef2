"""Bytes a device holds in training or decoding, from shapes alone: what must fit before anything is compiled.

Parameters, optimizer and caches are exact, under the shardings that a run uses. Temporaries are estimated from the
largest arrays that are alive at once; `experiments.compile_for` has the compiler's own count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from specjax.models.config import ModelConfig
from specjax.models.remat import check_remat
from specjax.parallel.mesh import AXES

LOGITS_CHUNK = 256  # Positions whose draft logits exist at a time, see `over_positions`.
LSE_CHUNK = 1024  # Positions whose target logits exist at a time in online training.


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes a device.

    Attributes:
        weights: of the target.
        drafter: parameters of the draft, tables included.
        optimizer: moments, and whatever else training keeps.
        cache: keys and values of the target and of the draft.
        temporaries: estimated.
    """

    weights: int
    drafter: int
    optimizer: int
    cache: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.drafter + self.optimizer + self.cache + self.temporaries


def abstract_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    """A mesh of these sizes without devices: enough to say where arrays would lie."""
    return AbstractMesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """What one device holds of a tree of (abstract) arrays."""

    def leaf(x: Any, at: Any) -> int:
        return math.prod(at.shard_shape(tuple(x.shape))) * np.dtype(x.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(leaf, tree, shardings)))


def decoding_temporaries(config: ModelConfig, sizes: Mapping[str, int], *, rows: int, width: int, slots: int) -> int:
    """The largest arrays of a target pass over `width` tokens of each row.

    Args:
        config: of the target.
        sizes: of the mesh axes.
        rows: B.
        width: N + 1, or a prefill chunk.
        slots: of the cache.
    """
    here = rows / (sizes["data"] * sizes["fsdp"])
    tensor, item = sizes["tensor"], np.dtype(config.dtype).itemsize
    scores = 2 * 4 * config.num_heads / tensor * width * slots  # and their softmax, float32
    mlp = 3 * item * config.intermediate_size / tensor * width
    stream = 4 * item * config.hidden_size * width
    logits = 3 * 4 * config.head_size / tensor * width  # raw, processed, a law
    return round(here * (max(scores, mlp) + stream + logits)) + gathered(config, sizes)


def training_temporaries(
    target: ModelConfig,
    layer: ModelConfig,
    sizes: Mapping[str, int],
    *,
    rows: int,
    length: int,
    steps: int,
    taps: int,
    gradients: int,
    remat: str = "none",
) -> int:
    """The largest arrays of an update of a one-layer draft unrolled over `steps`, the target running in the step.

    Args:
        target: frozen, run forward only: one layer's arrays are alive.
        layer: of the draft, whose arrays are kept for the backward pass, all steps of them as far as `remat` says.
        sizes: of the mesh axes.
        rows: of the part of a batch that is in memory, over all devices.
        length: T.
        steps: of training-time test.
        taps: target layers that are kept.
        gradients: bytes of the draft's gradients and updates on a device.
        remat: see `TrainerConfig`.

    Raises:
        ValueError: an unknown `remat`.
    """
    check_remat(remat)
    here = rows / (sizes["data"] * sizes["fsdp"]) * length
    tensor, item = sizes["tensor"], np.dtype(target.dtype).itemsize
    forward = 2 * 4 * target.num_heads / tensor * length + 3 * item * target.intermediate_size / tensor
    kept = (taps + 2) * item * target.hidden_size
    scores, softmax = 4 * layer.num_heads / tensor * length, item * layer.num_heads / tensor * length
    products = item * (3 * layer.intermediate_size / tensor + 8 * layer.hidden_size)
    one_step = scores + softmax + products
    # Of every step but the one whose backward pass runs: its inputs, and what the policy keeps.
    inputs = item * (layer.hidden_size + 2 * layer.num_kv_heads * layer.head_dim / tensor)
    others = {
        "none": one_step,
        "full": inputs,
        "dots": inputs + scores + products,
        "dots_no_batch": inputs + products,
    }[remat]
    logits = 4 * (LSE_CHUNK * target.head_size + 3 * LOGITS_CHUNK * layer.head_size) / tensor
    alive = max(forward, one_step + (steps - 1) * others) + kept
    return round(here * alive + logits) + gradients + gathered(target, sizes)


def gathered(config: ModelConfig, sizes: Mapping[str, int]) -> int:
    """Weights that are put together from their shards for a product: one layer, the next on its way."""
    if sizes["fsdp"] == 1:
        return 0
    item = np.dtype(config.dtype).itemsize
    layer = config.hidden_size * (
        3 * config.intermediate_size + config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    )
    return round(item * max(2 * layer, config.head_size * config.hidden_size) / sizes["tensor"])
