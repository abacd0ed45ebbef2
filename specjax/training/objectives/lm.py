"""Cross-entropy on text that the target wrote (sequence-level distillation, Kim & Rush 2016).

On text drawn at temperature 1 it is an unbiased estimate of the forward Kullback-Leibler divergence, without a pass
of the target; on greedy text it favours the target's first choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter
from specjax.models import Decoder
from specjax.training.data import Batch
from specjax.training.draft import Student
from specjax.training.objectives.base import Loss, masked_sum, over_positions


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The next token of the answer is the label; tokens outside the draft vocabulary carry no loss.

    Attributes:
        student: the draft.
    """

    student: Student

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """A copy of the chosen target layers; no randomness."""
        del key, tables
        return self.student.init(target)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See the class. `match` is agreement of the first choice with the text, over all its tokens."""
        del key
        network, hidden = self.student.hidden(draft_params, target, tables["vocab"], batch)

        def chunk(x_cd: jax.Array, following: tuple[jax.Array, jax.Array], mask: jax.Array) -> tuple[jax.Array, Any]:
            log_q = jax.nn.log_softmax(network.logits(x_cd), axis=-1)
            index, inside = following
            nll = -jnp.take_along_axis(log_q, index[:, None], axis=-1)[:, 0]
            return masked_sum(nll, mask & inside), masked_sum(first_choice(log_q, following), mask)

        following = labels(batch, tables["vocab"])
        mask = batch.predicts
        loss, hits = over_positions(chunk, hidden, following, mask)
        return Loss(
            sum=loss,
            weight=jnp.sum(mask & following[1], dtype=jnp.float32),
            metrics={"match": (hits, jnp.sum(mask, dtype=jnp.float32))},
        )

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        return self.student.export(draft_params, tables, info)


def labels(batch: Batch, vocab: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index `[B, T]` of each position's next token in the sorted draft vocabulary, and whether it is in it."""
    following = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
    index = jnp.clip(jnp.searchsorted(vocab, following), 0, len(vocab) - 1)
    return index, vocab[index] == following


def first_choice(log_q: jax.Array, following: tuple[jax.Array, jax.Array]) -> jax.Array:
    """1 where the draft's first choice is the next token of the text.

    On greedy text this is what a decoding loop accepts at draft position 1.
    """
    index, inside = following
    return ((jnp.argmax(log_q, axis=-1) == index) & inside).astype(jnp.float32)
