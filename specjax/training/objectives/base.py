"""What every objective returns and takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder
from specjax.training.data import Batch


@flax.struct.dataclass
class Loss:
    """A loss that has not been normalised yet, so that parts of a batch can be added up.

    Attributes:
        sum: float32 scalar, over all positions that carry loss.
        weight: float32 scalar, number of such positions.
        metrics: by name, a numerator and a denominator, both float32 scalars.
    """

    sum: jax.Array
    weight: jax.Array
    metrics: dict[str, tuple[jax.Array, jax.Array]]

    @property
    def mean(self) -> jax.Array:
        """Loss a valid position; 0 where there is none."""
        return self.sum / jnp.maximum(self.weight, 1.0)


class Objective(Protocol):
    """A training objective: hashable statics, no arrays."""

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """Parameters to start from: a plain tree of float arrays, nothing frozen in it."""

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """The loss of a batch of packed rows, traced under jit; without a key (held-out rows) nothing is random."""

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """The trained drafter as it is saved; `info` says how it came to be."""


# One chunk of positions: hidden states [C, d], whatever else fn needs [C, ...], mask [C] -> loss sum, metric sums.
ChunkLoss = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]


def over_positions(fn: ChunkLoss, x_btd: jax.Array, extras: Any, mask_bt: jax.Array, chunk: int = 256) -> Any:
    """Sums a loss over the positions of a mask, a chunk at a time, skipping chunks without any.

    Logits over a vocabulary are the largest arrays of training. Here they exist for one chunk at a time: the gradient
    with respect to the hidden states is taken together with the value, so nothing is kept for the backward pass, and
    positions without loss (prompts, padding) cost nothing. What `fn` closes over gets no gradient.

    Args:
        fn: loss of a chunk, a sum over the positions of its mask.
        x_btd: hidden states that the gradient goes to.
        extras: arrays `[B, T, ...]` that `fn` needs beside them.
        mask_bt: positions that carry loss.
        chunk: positions at a time.

    Returns:
        The sums that `fn` returns, differentiable in `x_btd` as far as the first is.
    """
    mask = mask_bt.reshape(-1)
    # The positions that count come first, so that they fill few chunks.
    order = jnp.argsort(~mask, stable=True)
    size = -(-len(mask) // chunk) * chunk

    def cut(a: jax.Array) -> jax.Array:
        a = a.reshape(len(mask), *a.shape[2:])[order]
        a = jnp.pad(a, ((0, size - len(mask)), *(((0, 0),) * (a.ndim - 1))))
        return a.reshape(size // chunk, chunk, *a.shape[1:])

    x, rest, masks = cut(x_btd), jax.tree.map(cut, extras), cut(mask_bt)
    graded = jax.value_and_grad(fn, has_aux=True)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(graded, x[0], _first(rest), masks[0]))

    def body(sums: Any, part: tuple[jax.Array, Any, jax.Array]) -> tuple[Any, jax.Array]:
        values, gradient = jax.lax.cond(jnp.any(part[2]), lambda: graded(*part), lambda: zeros)
        return jax.tree.map(jnp.add, sums, values), gradient

    stopped = jax.lax.stop_gradient((x, rest))
    (loss, metrics), gradient = jax.lax.scan(body, zeros[0], (*stopped, masks))
    # Adds zero to the value, and the gradient that was computed with it to the derivative.
    return loss + jnp.sum(gradient * (x - stopped[0])), metrics


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[0], tree)


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the positions of a mask; what lies elsewhere may be anything, infinities included."""
    return jnp.sum(jnp.where(mask, values, 0.0))
