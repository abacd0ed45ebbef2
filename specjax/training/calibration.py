"""How often the tokens to come have which rank at heads that were trained elsewhere, for calibrated trees.

Heads that are trained here get their table from the held-out greedy text of the run; heads of other projects have none.
It is counted here on a hidden-state store of the target's own greedy text, teacher forced as in training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder, Target, merge
from specjax.models.medusa import HeadsConfig, HydraHeads, MedusaHeads, heads_graph
from specjax.training.data import Batch
from specjax.training.objectives.heads import each_ahead, head_masks, hidden_states, label_rank
from specjax.training.objectives.hydra import teacher_forced
from specjax.training.objectives.lm import labels

CHUNK = 64  # positions whose logits over the vocabulary exist at a time


def calibrate(drafter: SavedDrafter, target: Target, batches: Iterable[Batch], ranks: int = 4) -> SavedDrafter:
    """Medusa's or Hydra's heads with `tables["accuracy"]`, from which `tree="calibrated"` builds trees.

    Args:
        drafter: of method `medusa` or `hydra`; a table that it has is replaced.
        target: that it drafts for.
        batches: rows of a hidden-state store of greedy text.
        ranks: columns R of the table `[K, R]`.

    Raises:
        ValueError: other drafters, no ranks, or a text without a position for every head.
    """
    if drafter.method not in ("medusa", "hydra"):
        raise ValueError(f"method {drafter.method!r} has no table by head and rank; expected medusa or hydra")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}; expected at least 1")
    config: HeadsConfig = drafter.config
    vocab = jnp.asarray(drafter.tables.get("vocab", np.arange(config.vocab_size)), jnp.int32)
    counts, totals = np.zeros((config.num_heads, ranks)), np.zeros(config.num_heads)
    for batch in batches:
        found = _counts(target.graph, config, ranks, target.params, drafter.params, vocab, batch)
        counts, totals = counts + np.asarray(found[0]), totals + np.asarray(found[1])
    if not totals.all():
        raise ValueError(
            f"head {int(np.argmin(totals))} has no position in this text: give it answers of more than "
            f"{config.num_heads + 1} tokens"
        )
    table = jnp.asarray(counts / totals[:, None], jnp.float32)
    return dataclasses.replace(
        drafter,
        config=dataclasses.replace(config, ranks=ranks),
        tables={**drafter.tables, "accuracy": table},
        info={**drafter.info, "calibration_positions": int(totals[0])},
    )


@functools.partial(jax.jit, static_argnames=("graph", "config", "ranks"))
def _counts(
    graph: Any, config: HeadsConfig, ranks: int, target_params: Any, params: Any, vocab: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """How often the label has each rank `[K, R]`, and positions `[K]`, of a batch."""
    target: Decoder = merge(graph, target_params)
    network: MedusaHeads | HydraHeads = merge(heads_graph(config)[0], params)
    if isinstance(network, HydraHeads):
        x_btkd = teacher_forced(network, batch, target)
    else:
        x_btkd = network(hidden_states(batch))
    heads = x_btkd.shape[2]
    index, inside = (each_ahead(x, heads) for x in labels(batch, vocab))
    mask = head_masks(batch, heads)

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, *x.shape[2:])
        padded = jnp.pad(flat, ((0, -len(flat) % CHUNK), *(((0, 0),) * (flat.ndim - 1))))
        return padded.reshape(-1, CHUNK, *flat.shape[1:])

    def chunk(parts: tuple[jax.Array, ...]) -> jax.Array:
        x_ckd, index_ck, known_ck = parts
        if isinstance(network, HydraHeads):
            logits = jnp.stack([network.logits(i, x_ckd[:, i]) for i in range(heads)], axis=1)
        else:
            logits = network.logits(x_ckd)
        # A label outside the draft vocabulary has no rank.
        rank = jnp.where(known_ck, label_rank(logits, index_ck), ranks)
        return jnp.sum(jax.nn.one_hot(rank, ranks), axis=0)

    counts = jax.lax.map(chunk, (cut(x_btkd), cut(index), cut(mask & inside))).sum(0)
    return counts, jnp.sum(mask, axis=(0, 1), dtype=jnp.float32)
