"""What every objective returns and takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder
from specjax.parallel.own_rows import Anywhere, on_own_rows
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
# A number of positions -> what other arrays hold so many positions later, [C, ...]; anything beyond the last row.
Later = Callable[[int], Any]
# The same with trained weights as a fourth argument, and what lies at other positions as a fifth.
WeightedChunkLoss = Callable[[jax.Array, Any, jax.Array, Any, Later], tuple[jax.Array, Any]]


def over_positions(fn: ChunkLoss, x_btd: jax.Array, extras: Any, mask_bt: jax.Array, chunk: int = 256) -> Any:
    """Sums a loss over the positions of a mask, a chunk at a time, skipping chunks without any.

    Logits over a vocabulary are the largest arrays of training. Here they exist for one chunk at a time: the gradient
    with respect to the hidden states is taken together with the value, so nothing is kept for the backward pass, and
    positions without loss (prompts, padding) cost nothing. Where a mesh splits the rows, every device goes through its
    own, and a chunk is skipped where it is empty on all of them. What `fn` closes over gets no gradient.

    Args:
        fn: loss of a chunk, a sum over the positions of its mask.
        x_btd: hidden states that the gradient goes to.
        extras: arrays `[B, T, ...]` that `fn` needs beside them.
        mask_bt: positions that carry loss.
        chunk: positions at a time, on each device.

    Returns:
        The sums that `fn` returns, differentiable in `x_btd` as far as the first is.
    """
    return over_positions_with((), lambda x, rest, mask, *_: fn(x, rest, mask), x_btd, extras, mask_bt, chunk)


def over_positions_with(
    weights: Any,
    fn: WeightedChunkLoss,
    x_btd: jax.Array,
    extras: Any,
    mask_bt: jax.Array,
    chunk: int = 256,
    later: Any = (),
) -> Any:
    """`over_positions` with weights that are trained too, such as a head of the draft's own.

    Args:
        weights: tree of arrays; their gradient is added up over the chunks.
        fn: as in `over_positions`, with the weights and `Later` as its last arguments.
        x_btd: as there.
        extras: as there.
        mask_bt: as there.
        chunk: as there.
        later: arrays `[B, T, ...]` that `fn` reads at positions after its own.

    Returns:
        As there, differentiable in `weights` as well.
    """
    fixed, x, extras, later = jax.lax.stop_gradient((weights, x_btd, extras, later))
    own = functools.partial(_own_positions, fn, fixed, chunk)
    ((loss, metrics), slopes), gradient = on_own_rows(own, x, extras, mask_bt, later)
    # Adds zero to the value, and the gradients that were computed with it to the derivative.
    loss += jnp.sum(gradient * (x_btd - x))
    for slope, now, then in zip(*map(jax.tree.leaves, (slopes, weights, fixed)), strict=True):
        loss += jnp.sum(slope * (now - then))
    return loss, metrics


def _own_positions(
    fn: WeightedChunkLoss,
    weights: Any,
    chunk: int,
    anywhere: Anywhere,
    x_btd: jax.Array,
    extras: Any,
    mask_bt: jax.Array,
    later: Any,
) -> tuple[Any, jax.Array]:
    """The sums of one device's rows with the gradient for the weights, and the gradient for `x_btd`."""
    mask = mask_bt.reshape(-1)
    # The positions that count come first, so that they fill few chunks.
    order = jnp.argsort(~mask, stable=True)
    size = -(-len(mask) // chunk) * chunk

    def flat(a: jax.Array) -> jax.Array:
        return a.reshape(len(mask), *a.shape[2:])

    def cut(a: jax.Array) -> jax.Array:
        a = jnp.pad(flat(a)[order], ((0, size - len(mask)), *(((0, 0),) * (a.ndim - 2))))
        return a.reshape(size // chunk, chunk, *a.shape[1:])

    place = cut(jnp.arange(len(mask)).reshape(mask_bt.shape))
    parts = cut(x_btd), jax.tree.map(cut, extras), cut(mask_bt), place
    elsewhere = jax.tree.map(flat, later)

    def graded(x: jax.Array, rest: Any, mask: jax.Array, place: jax.Array) -> Any:
        def look(count: int) -> Any:
            return jax.tree.map(lambda a: a[place + count], elsewhere)

        both = jax.value_and_grad(lambda x, w: fn(x, rest, mask, w, look), argnums=(0, 1), has_aux=True)
        values, (gradient, slopes) = both(x, weights)
        # Added up over many chunks: in float32.
        return values, (gradient, jax.tree.map(lambda x: x.astype(jnp.float32), slopes))

    shapes = jax.eval_shape(graded, *_first(parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(sums: Any, part: Any) -> tuple[Any, jax.Array]:
        some, here = part
        values, (gradient, slopes) = jax.lax.cond(some, lambda: graded(*here), lambda: zeros)
        return jax.tree.map(jnp.add, sums, (values, slopes)), gradient

    some = anywhere(jnp.any(parts[2], axis=1))
    sums, gradient = jax.lax.scan(body, (zeros[0], zeros[1][1]), (some, parts))
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(mask)))
    return sums, gradient.reshape(size, *gradient.shape[2:])[back].reshape(x_btd.shape)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[0], tree)


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the positions of a mask; what lies elsewhere may be anything, infinities included."""
    return jnp.sum(jnp.where(mask, values, 0.0))
