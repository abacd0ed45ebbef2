"""What every objective returns and takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

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
        """The loss of a batch of packed rows, traced under jit; without a key (held-out rows) nothing is random.

        With a key, `tables["step"]` is the count of updates made, for what follows a schedule.
        """

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """The trained drafter as it is saved; `info` says how it came to be."""


@runtime_checkable
class Counted(Protocol):
    """An objective of several parts, such as heads, each normalised by its own positions.

    What a part's weight is divided by must be that of the whole batch, also where gradients are accumulated over
    pieces of it: the step takes `counts` before it cuts, and hands them on as `tables["counts"]`.
    """

    def counts(self, tables: Any, batch: Batch) -> jax.Array:
        """Positions `[n]` float32 of a batch that carry loss, by part."""


def each_alike(weights_n: jax.Array, counts_n: jax.Array) -> jax.Array:
    """Factors `[n]` float32 on the parts' sums, by which a mean over all positions is one over the parts' own means.

    With sums S and f = `each_alike(w, c)`: sum(f S) / sum(w c) = sum(w S / c) / sum(w), over the parts with positions.
    """
    there = jnp.where(counts_n > 0, weights_n, 0.0)
    pooled = jnp.sum(there * counts_n) / jnp.maximum(jnp.sum(there), jnp.finfo(jnp.float32).tiny)
    return there * pooled / jnp.where(counts_n > 0, counts_n, 1.0)


# One chunk of positions: hidden states [C, d], whatever else fn needs [C, ...], mask [C] -> loss sum, metric sums.
ChunkLoss = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
# The same with trained weights as a fourth argument.
WeightedChunkLoss = Callable[[jax.Array, Any, jax.Array, Any], tuple[jax.Array, Any]]


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
    return over_positions_with((), lambda x, rest, mask, _: fn(x, rest, mask), x_btd, extras, mask_bt, chunk)


def over_positions_with(
    weights: Any, fn: WeightedChunkLoss, x_btd: jax.Array, extras: Any, mask_bt: jax.Array, chunk: int = 256
) -> Any:
    """`over_positions` with weights that are trained too, such as a head of the draft's own.

    Args:
        weights: tree of arrays; their gradient is added up over the chunks.
        fn: as in `over_positions`, with the weights as its last argument.
        x_btd: as there.
        extras: as there.
        mask_bt: as there.
        chunk: as there.

    Returns:
        As there, differentiable in `weights` as well.
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

    def graded(*arguments: Any) -> tuple[Any, tuple[jax.Array, Any]]:
        values, (gradient, slopes) = jax.value_and_grad(fn, argnums=(0, 3), has_aux=True)(*arguments)
        # Added up over many chunks: in float32.
        return values, (gradient, jax.tree.map(lambda x: x.astype(jnp.float32), slopes))

    fixed, stopped = jax.lax.stop_gradient((weights, (x, rest)))
    shapes = jax.eval_shape(graded, x[0], _first(rest), masks[0], fixed)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(sums: Any, part: tuple[jax.Array, Any, jax.Array]) -> tuple[Any, jax.Array]:
        values, (gradient, slopes) = jax.lax.cond(jnp.any(part[2]), lambda: graded(*part, fixed), lambda: zeros)
        return jax.tree.map(jnp.add, sums, (values, slopes)), gradient

    ((loss, metrics), slopes), gradient = jax.lax.scan(body, (zeros[0], zeros[1][1]), (*stopped, masks))
    # Adds zero to the value, and the gradients that were computed with it to the derivative.
    loss += jnp.sum(gradient * (x - stopped[0]))
    for slope, now, then in zip(*map(jax.tree.leaves, (slopes, weights, fixed)), strict=True):
        loss += jnp.sum(slope * (now - then))
    return loss, metrics


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[0], tree)


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the positions of a mask; what lies elsewhere may be anything, infinities included."""
    return jnp.sum(jnp.where(mask, values, 0.0))
