"""What the objectives of Medusa and Hydra share: K heads, each with a label further ahead.

Head i at position t has token t + 2 + i as its label, or the target's law at t + 1 + i. Masks and labels move
together: a position counts for head i when tokens t + 1 to t + 2 + i all belong to the answer of one document, which
is where a decoding loop that is at t would use the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models.eagle import ahead
from specjax.models.medusa import HeadsConfig
from specjax.training.data import Batch
from specjax.training.objectives.base import Loss, each_alike, masked_sum, over_positions
from specjax.training.objectives.distill import law
from specjax.training.objectives.lm import labels


def head_masks(batch: Batch, heads: int) -> jax.Array:
    """`[B, T, K]` bool: positions at which each head has a label."""
    predicts = jnp.asarray(batch.predicts)
    mask, masks = predicts, []
    for i in range(heads):
        mask = mask & ahead(predicts, i + 1)
        masks.append(mask)
    return jnp.stack(masks, axis=-1)


def each_ahead(x_bt: jax.Array, heads: int) -> jax.Array:
    """`[B, T, K, ...]`: what lies 1, 2, ... K positions later."""
    return jnp.stack([ahead(x_bt, i + 1) for i in range(heads)], axis=2)


def label_rank(log_q: jax.Array, index: jax.Array) -> jax.Array:
    """Place `[...]` int32 of an entry among all, 0 for the likeliest; of equals the lower index comes first."""
    own = jnp.take_along_axis(log_q, index[..., None], axis=-1)
    lower = jax.lax.broadcasted_iota(jnp.int32, log_q.shape, log_q.ndim - 1) < index[..., None]
    return jnp.sum((log_q > own) | ((log_q == own) & lower), axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class HeadsLoss:
    """A weighted mean over heads of their own mean cross-entropies, with labels and with the target's law.

    Attributes:
        decay: head i weighs decay^i.
        teacher: share of the cross-entropy with the target's law (over the draft vocabulary, with its true mass); the
            rest is that with the label, which tokens outside the draft vocabulary do without.
        ranks: at how many ranks to count labels, for the calibration of trees.
        chunk: positions at a time.
    """

    decay: float = 0.8
    teacher: float = 0.0
    ranks: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay}; expected a number in (0, 1]")
        if not 0 <= self.teacher <= 1:
            raise ValueError(f"teacher={self.teacher}; expected a share in [0, 1]")
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks}; expected at least 1")

    def counts(self, batch: Batch, vocab: jax.Array, heads: int) -> jax.Array:
        """Positions `[K]` float32 that carry loss, by head; what is outside the draft vocabulary has no label."""
        mask, inside = head_masks(batch, heads), each_ahead(labels(batch, vocab)[1], heads)
        return jnp.sum((1 - self.teacher) * (mask & inside) + self.teacher * mask, axis=(0, 1), dtype=jnp.float32)

    def __call__(
        self,
        x_btkd: jax.Array,
        batch: Batch,
        vocab: jax.Array,
        head_dv: jax.Array,
        cap: float,
        counts: jax.Array | None = None,
    ) -> Loss:
        """The loss of a batch; every chunk of positions does one vocabulary product for all heads.

        Args:
            x_btkd: what each head gives to the vocabulary product.
            batch: with the target's log-sum-exps where there is a teacher.
            vocab: int32 `[Vd]` target ids of the draft vocabulary, sorted.
            head_dv: the frozen vocabulary product.
            cap: tanh cap on logits, 0 for none.
            counts: `[K]` of the whole batch that this one is a piece of (`counts`); None where it is all of it.

        Returns:
            Its weight is the sum of the heads' weights over their positions; over the pieces of a batch sums and
            weights add up to the mean over heads of their own means (`each_alike`). Metrics: `match_<i>` and
            `rank_<i>_<r>`, how often the label is head i's first choice, or has rank r; `accepted`, how many heads in a
            row are right, from a position on: what a chain would have accepted there.
        """
        heads = x_btkd.shape[2]
        index, inside = labels(batch, vocab)
        mask = head_masks(batch, heads)
        extras = {"mask": mask, "index": each_ahead(index, heads), "inside": each_ahead(inside, heads)}
        if self.teacher:
            if batch.normed is None or batch.lse is None:
                raise ValueError("a teacher needs the target's log-sum-exps: give it a hidden-state store, not text")
            extras["normed"] = each_ahead(jnp.asarray(batch.normed), heads)
            extras["lse"] = each_ahead(jnp.asarray(batch.lse), heads)
        weights = self.decay ** jnp.arange(heads, dtype=jnp.float32)
        own = self.counts(batch, vocab, heads)
        factors = each_alike(weights, own if counts is None else counts)

        def part(x_ckd: jax.Array, of: dict[str, jax.Array], _: jax.Array) -> tuple[jax.Array, Any]:
            logits = jnp.dot(x_ckd, head_dv, preferred_element_type=jnp.float32)
            log_q = jax.nn.log_softmax(cap * jnp.tanh(logits / cap) if cap else logits, axis=-1)
            known = of["mask"] & of["inside"]
            nll = -jnp.take_along_axis(log_q, of["index"][..., None], axis=-1)[..., 0]
            loss = (1 - self.teacher) * jnp.where(known, nll, 0.0)
            if self.teacher:
                log_p = _law(of["normed"], of["lse"], head_dv, cap, of["mask"])
                loss -= self.teacher * jnp.sum(jnp.exp(log_p) * log_q, axis=-1)
            rank = jnp.where(known, label_rank(log_q, of["index"]), self.ranks)
            accepted = jnp.cumprod(rank == 0, axis=-1).sum(dtype=jnp.float32)
            found = jnp.sum(jax.nn.one_hot(rank, self.ranks), axis=0)
            return masked_sum(loss * factors, of["mask"]), (found, accepted)

        loss, (found, accepted) = over_positions(part, x_btkd, extras, mask[..., 0], self.chunk)
        totals = jnp.sum(mask, axis=(0, 1), dtype=jnp.float32)
        metrics = {"accepted": (accepted, totals[0])}
        for i in range(heads):
            metrics[f"match_{i}"] = (found[i, 0], totals[i])
            metrics |= {f"rank_{i}_{r}": (found[i, r], totals[i]) for r in range(1, self.ranks)}
        return Loss(loss, jnp.sum(weights * own), metrics)


def _law(normed: jax.Array, lse: jax.Array, head_dv: jax.Array, cap: float, known: jax.Array) -> jax.Array:
    """The target's law `[C, K, Vd]` at each head's label."""
    flat = law(normed.reshape(-1, normed.shape[-1]), lse.reshape(-1), head_dv, cap, known.reshape(-1))
    return flat.reshape(*normed.shape[:-1], -1)


def hidden_states(batch: Batch) -> jax.Array:
    """The target's last hidden states `[B, T, d]` in float32.

    Raises:
        ValueError: the batch has none.
    """
    if batch.normed is None:
        raise ValueError("heads read the target's hidden states: give them a hidden-state store, not text")
    return jnp.asarray(batch.normed).astype(jnp.float32)


def exported(
    method: str,
    config: HeadsConfig,
    ranks: int,
    shares: tuple[str, ...],
    params: Any,
    tables: Mapping[str, Any],
    info: Mapping[str, Any],
) -> SavedDrafter:
    """Trained heads as they are saved, with `tables["accuracy"]` where the greedy held-out set was measured."""
    table = accuracy(info.get("held_out", {}), config.num_heads, ranks)
    if table is not None:
        config, tables = dataclasses.replace(config, ranks=ranks), {**tables, "accuracy": table}
    return SavedDrafter(method, config, params, tables, shares, info)


def accuracy(held_out: Mapping[str, float], heads: int, ranks: int) -> jax.Array | None:
    """Float32 `[K, R]`: how often the label has rank r at head i on held-out greedy text; None where unknown."""
    keys = [[f"greedy/match_{i}", *(f"greedy/rank_{i}_{r}" for r in range(1, ranks))] for i in range(heads)]
    if any(key not in held_out for row in keys for key in row):
        return None
    return jnp.asarray([[held_out[key] for key in row] for row in keys], jnp.float32)
