"""What EAGLE's objectives share: which positions carry loss at which step, and what the target answers there.

Step k of a draft from position t reads token t+1+k and predicts token t+2+k. Tokens, target and mask move together:
step k is held against the target's law at position t+1+k, where that token is of the same document and its successor
is part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.models import Decoder
from specjax.models.eagle import FeatureConfig, FeatureLayer, ahead, assemble, head_rows
from specjax.training.data import Batch
from specjax.training.objectives.base import Later, Loss, masked_sum, over_positions_with
from specjax.training.objectives.distill import law, overlap
from specjax.training.objectives.lm import first_choice, labels


@flax.struct.dataclass
class Step:
    """One step at some positions: what the draft made and what the target answered.

    Attributes:
        hidden: `[C, d]` what the draft's head read.
        log_q: `[C, Vd]` the draft's log-probabilities.
        normed: `[C, d]` the target's final hidden state after its last norm.
        log_p: `[C, Vd]` its log-probabilities of the draft vocabulary, with their true mass: not renormalised.
    """

    hidden: jax.Array
    log_q: jax.Array
    normed: jax.Array
    log_p: jax.Array

    @property
    def cross_entropy(self) -> jax.Array:
        """`[C]`: -sum p log q over the draft vocabulary; a position weighs as much as p has mass there."""
        return -jnp.sum(jnp.exp(self.log_p) * self.log_q, axis=-1)


StepLoss = Callable[[Step], jax.Array]  # -> [C]


def check_store(batch: Batch, taps: Sequence[int | str]) -> None:
    """Raises a ValueError that says what the batch lacks, where it does."""
    if batch.normed is None or batch.lse is None:
        raise ValueError("EAGLE needs the target's hidden states: give it a hidden-state store, not text")
    missing = [str(tap) for tap in taps if tap != "normed" and str(tap) not in batch.taps]
    if missing:
        raise ValueError(
            f"the hidden-state store lacks the taps {', '.join(missing)} (it has {', '.join(batch.taps) or 'none'}): "
            "make one with experiments.hidden_states and these in config.store.taps"
        )


def drafted(batch: Batch, steps: int) -> jax.Array:
    """`[B, T, K]` bool: step k from position t carries loss."""
    own, predicts = jnp.asarray(batch.segments), jnp.asarray(batch.predicts)
    carry = [ahead(predicts, k) & (ahead(own, k) == own) & (own > 0) for k in range(1, steps + 1)]
    return jnp.stack(carry, axis=-1)


def training_network(config: FeatureConfig, params: Any, target: Decoder, vocab: jax.Array) -> FeatureLayer:
    """The network in training. What it borrows of the target stays frozen."""
    frozen = jax.lax.stop_gradient({"embed": {"embedding": target.embed.embedding[...]}})
    head = jax.lax.stop_gradient({"lm_head": {"kernel": head_rows(target, vocab)}})
    return assemble(config, {**frozen, **head, **params}, target)


def rollout_loss(
    net: FeatureLayer,
    hidden: Sequence[jax.Array],
    batch: Batch,
    vocab: jax.Array,
    target: Decoder,
    step_loss: StepLoss,
    weights: Sequence[float],
    *,
    trained_head: bool = False,
) -> Loss:
    """Holds every step against the target, a chunk of positions at a time.

    Args:
        net: whose head reads the hidden states.
        hidden: for each step what its head reads `[B, T, d]`.
        batch: with `normed` and `lse`.
        vocab: `[Vd]` sorted target ids.
        target: for its head.
        step_loss: of the positions of a step.
        weights: of each step's loss.
        trained_head: the head gets gradient; a frozen one costs no product for it.

    Returns:
        The weighted sum over all steps, and as weight the positions of the first. Metrics: `mass` (sum p) of the
        first step; `alpha` (sum min(p, q)) and `match` (the draft's first choice is the text's token) of the first,
        `alpha_k` (EAGLE's n-alpha) and `match_k` of later steps; `accepted`, how many tokens a greedy chain of all
        steps keeps where the text is the target's own greedy choice.
    """
    assert batch.normed is not None and batch.lse is not None
    carries = drafted(batch, len(hidden))
    head = jax.lax.stop_gradient(head_rows(target, vocab))
    answers = (jnp.asarray(batch.normed), jnp.asarray(batch.lse), *labels(batch, vocab))

    kernel = net.lm_head.kernel[...]
    trained: Any = kernel if trained_head else None
    frozen: Any = jax.lax.stop_gradient(kernel)

    def chunk(x_ckd: jax.Array, carries_ck: jax.Array, _: Any, own: Any, later: Later) -> tuple[jax.Array, Any]:
        loss = jnp.zeros(())
        hits: list[jax.Array] = []
        alphas: list[jax.Array] = []
        mass = jnp.zeros(())
        for k, weight in enumerate(weights):
            known = carries_ck[:, k]
            normed, lse, *following = later(1 + k)
            log_p = law(normed, lse, head, target.config.final_softcap, known)
            log_q = jax.nn.log_softmax(net.logits_by(x_ckd[:, k], frozen if own is None else own), axis=-1)
            lost = step_loss(Step(x_ckd[:, k], log_q, normed.astype(jnp.float32), log_p))
            loss += weight * masked_sum(lost, known)
            hits.append(jnp.where(known, first_choice(log_q, (following[0], following[1])), 0.0))
            alphas.append(masked_sum(overlap(log_p, log_q), known))
            if k == 0:
                mass = masked_sum(jnp.sum(jnp.exp(log_p), axis=-1), known)
        first = carries_ck[:, 0]
        hits_ck = jnp.stack(hits, axis=-1)
        sums = {"mass": mass}
        sums["accepted"] = masked_sum(jnp.sum(jnp.cumprod(hits_ck, axis=-1), axis=-1), first)
        return loss, (sums, hits_ck.sum(0), jnp.stack(alphas))

    inputs = jnp.stack(hidden, axis=2), carries, carries.any(-1)
    loss, (sums, hits_k, alphas_k) = over_positions_with(trained, chunk, *inputs, later=answers)
    counts_k = carries.sum((0, 1)).astype(jnp.float32)
    metrics = {name: (value, counts_k[0]) for name, value in sums.items()}
    for k in range(len(hidden)):
        for name, values_k in (("match", hits_k), ("alpha", alphas_k)):
            metrics[name if k == 0 else f"{name}_{k}"] = (values_k[k], counts_k[k])
    return Loss(loss, counts_k[0], metrics)


def features_of(net: FeatureLayer, batch: Batch, taps: Sequence[int | str]) -> jax.Array:
    """The target's features `[B, T, d]` as the network takes them in."""
    stored: Mapping[str, Any] = {**batch.taps, "normed": batch.normed}
    return net.fuse({tap: jnp.asarray(stored[str(tap)]).astype(net.layer.dtype) for tap in taps})
