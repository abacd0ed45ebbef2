"""Distillation of the target's law into a draft (DistillSpec, Zhou et al. 2024), from stored hidden states.

The target's law comes from the store: `normed @ head rows - log-sum-exp` gives p over the draft vocabulary *with its
true mass*, not renormalised: sum p <= 1, and what lies outside the draft vocabulary can never be accepted. Every
divergence is taken over the draft vocabulary between that p and q, so a position where the target leaves the
vocabulary weighs less; the forward Kullback-Leibler gradient there is (sum p) q - p.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints.drafters import SavedDrafter, target_head
from specjax.models import Decoder, split
from specjax.training.data import Batch
from specjax.training.draft import Student
from specjax.training.objectives.base import Loss, masked_sum, over_positions
from specjax.training.objectives.lm import first_choice, labels

# A divergence maps log p, log q `[..., Vd]` to `[...]`; exp(log p) sums to at most 1.
Divergence = Callable[[jax.Array, jax.Array], jax.Array]


def forward_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """sum p (log p - log q)."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """sum q (log q - log p)."""
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)


def jensen_shannon(log_p: jax.Array, log_q: jax.Array, beta: float = 0.5) -> jax.Array:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q."""
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def total_variation(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """1 - sum min(p, q): the probability that speculative sampling rejects."""
    return 1.0 - overlap(log_p, log_q)


def neg_log_overlap(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """-log alpha with alpha = sum min(p, q) (the LK loss): steep where little is accepted."""
    return -jnp.log(jnp.maximum(overlap(log_p, log_q), 1e-6))


def overlap(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """alpha = sum min(p, q) `[...]`: the acceptance rate of a draft token drawn from q."""
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
    "lk": neg_log_overlap,
}


@dataclasses.dataclass(frozen=True)
class Distill:
    """A divergence between the target's law and the draft's, at each token of the answers.

    Attributes:
        student: the draft.
        divergence: a key of `DIVERGENCES`.
        beta: of `jsd`: the target's weight in the mixture. The others have none.
    """

    student: Student
    divergence: str = "forward_kl"
    beta: float = 0.5

    def __post_init__(self) -> None:
        divergence_of(self.divergence, self.beta)

    def init(self, key: jax.Array, target: Decoder, tables: Any) -> Any:
        """A copy of the chosen target layers; no randomness."""
        del key, tables
        return self.student.init(target)

    def loss(self, draft_params: Any, tables: Any, target: Decoder, batch: Batch, key: jax.Array | None) -> Loss:
        """See `divergence_loss`."""
        del key
        network, hidden = self.student.hidden(draft_params, target, tables["vocab"], batch)
        divergence = divergence_of(self.divergence, self.beta)
        return divergence_loss(divergence, hidden, network.logits, tables["vocab"], target, batch)

    def export(self, draft_params: Any, tables: Any, info: Mapping[str, Any]) -> SavedDrafter:
        """See `Objective.export`."""
        return self.student.export(draft_params, tables, info)


def divergence_of(name: str, beta: float = 0.5) -> Divergence:
    """A divergence by name.

    Args:
        name: a key of `DIVERGENCES`.
        beta: of `jsd`.

    Raises:
        ValueError: there is no such divergence, or beta is out of range.
    """
    if name not in DIVERGENCES:
        raise ValueError(f"divergence {name!r} is unknown; expected {', '.join(DIVERGENCES)}")
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta}; expected a number between 0 and 1, the target's weight in the mixture of jsd")
    return functools.partial(jensen_shannon, beta=beta) if name == "jsd" else DIVERGENCES[name]


def divergence_loss(
    divergence: Divergence,
    hidden_btd: jax.Array,
    logits: Callable[[jax.Array], jax.Array],
    vocab: jax.Array,
    target: Decoder,
    batch: Batch,
) -> Loss:
    """A divergence between the target's stored law and a draft's at each token of the answers.

    Args:
        divergence: of the two laws over the draft vocabulary.
        hidden_btd: what the draft's head reads.
        logits: the head, `[C, d]` to `[C, Vd]`; what it closes over gets no gradient.
        vocab: int32 `[Vd]` target ids of the draft vocabulary, sorted.
        target: gives the head rows that its law is read with.
        batch: with the target's final hidden states and log-sum-exps.

    Returns:
        With the metrics `alpha` (sum min(p, q)), `mass` (sum p), `match` (first choice is the text's).

    Raises:
        ValueError: the batch has no hidden states.
    """
    if batch.normed is None or batch.lse is None:
        raise ValueError("distillation needs the target's hidden states: give it a hidden-state store, not text")
    mask, cap = batch.predicts, target.config.final_softcap
    head = jax.lax.stop_gradient(target_head(target.config, split(target)[1], vocab))

    def chunk(x_cd: jax.Array, extras: Any, mask: jax.Array) -> tuple[jax.Array, Any]:
        normed, lse, following = extras
        log_p = law(normed, lse, head, cap, mask)
        log_q = jax.nn.log_softmax(logits(x_cd), axis=-1)
        sums = overlap(log_p, log_q), jnp.sum(jnp.exp(log_p), axis=-1), first_choice(log_q, following)
        return masked_sum(divergence(log_p, log_q), mask), [masked_sum(value, mask) for value in sums]

    extras = (batch.normed, batch.lse, labels(batch, vocab))
    loss, sums = over_positions(chunk, hidden_btd, extras, mask)
    weight = jnp.sum(mask, dtype=jnp.float32)
    names = ("alpha", "mass", "match")
    return Loss(loss, weight, {name: (value, weight) for name, value in zip(names, sums, strict=True)})


def law(normed_nd: jax.Array, lse_n: jax.Array, head_dv: jax.Array, cap: float, known_n: jax.Array) -> jax.Array:
    """Float32 `[n, Vd]`: the target's log-probabilities of the draft vocabulary, from its stored hidden states.

    Where no log-sum-exp is known the value is a placeholder that keeps exp() finite.
    """
    logits = jnp.dot(normed_nd.astype(jnp.float32), head_dv, preferred_element_type=jnp.float32)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    return jnp.where(known_n[:, None], logits - lse_n[:, None], -jnp.log(float(head_dv.shape[1])))
