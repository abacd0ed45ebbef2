"""The chain that a part of the target's own layers drafts: shared by early exit, layer skipping and Kangaroo."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import chain
from specjax.decoding.widths import fitting, stop_widths
from specjax.models import Decoder, View, causal_view

# part(tokens [B, 1], caches, view) -> (hidden [B, 1, d] that verification may resume from, what the head reads
# [B, 1, d], caches)
Part = Callable[[jax.Array, Any, View], tuple[jax.Array, jax.Array, Any]]
# head(what it reads [B, 1, d]) -> float32 logits [B, 1, Vd]
Head = Callable[[jax.Array], jax.Array]


@flax.struct.dataclass
class _Carry:
    """Pass i feeds token i (the root is token 0) and draws token i + 1, which is node i."""

    step: jax.Array
    token: jax.Array  # [B] in target ids
    alive: jax.Array  # [B] no node was given up yet
    caches: Any
    picks: jax.Array  # [B, N] in the head's ids
    valid: jax.Array  # [B, N]
    laws: jax.Array  # [B, N, Vd], or [B, 0, Vd] when greedy
    hidden: jax.Array  # [B, N + 1, d]


def draft_chain(
    part: Part,
    head: Head,
    target: Decoder,
    caches: Any,
    context: Context,
    keys: Keys,
    *,
    num_nodes: int,
    min_confidence: float,
    max_entropy: float,
    last_pass: bool,
    head_size: int,
    vocab: jax.Array | None = None,
) -> tuple[Draft, jax.Array, Any]:
    """Drafts token by token into the target cache's scratch slots, the root at slot `length - 1`.

    A node whose law is not `sure` is left out, and all behind it: that depends on the law and on earlier tokens alone,
    so verification stays exact. The passes end when every row has stopped, and the target's pass is as narrow as what
    they left allows.

    Args:
        part: the layers that draft.
        head: of the draft.
        target: gives shapes.
        caches: of the target, and what else `part` keeps.
        context: what is committed.
        keys: of this step.
        num_nodes: N.
        min_confidence: see `sure`; 0 sets no bound.
        max_entropy: see `sure`; infinity sets no bound.
        last_pass: also run the last node through `part`, without the head.
        head_size: Vd, logits that the head gives.
        vocab: int32 `[Vd]` target ids of a reduced draft vocabulary.

    Returns:
        The chain; the hidden states of `part` at root and nodes `[B, N + 1, d]` (zero where no pass was made); the
        caches.
    """
    config, greedy = target.config, context.sampling.greedy
    batch, passes = context.tokens.shape[0], num_nodes + last_pass

    def draw(read_b1d: jax.Array, slot: jax.Array, picks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        so_far = jnp.broadcast_to(jnp.arange(num_nodes) < slot, (batch, 1, num_nodes))
        logits = context.process(head(read_b1d), picks, so_far, vocab)[:, 0]
        goes_on = sure(logits, min_confidence, max_entropy)
        if greedy:
            return jnp.argmax(logits, -1).astype(jnp.int32), goes_on, jnp.zeros((batch, 0), jnp.float32)
        law = log_law(logits, context.sampling)
        return keys.sample(DRAFT, slot, law), goes_on, law

    def nothing(read_b1d: jax.Array, slot: jax.Array, picks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        del read_b1d, slot, picks
        return (
            jnp.zeros((batch,), jnp.int32),
            jnp.ones((batch,), bool),
            jnp.zeros((batch, 0 if greedy else head_size), jnp.float32),
        )

    def body(c: _Carry) -> _Carry:
        hidden, read, caches = part(c.token[:, None], c.caches, causal_view(context.length - 1 + c.step, 1))
        pick, goes_on, law = jax.lax.cond(c.step < num_nodes, draw, nothing, read, c.step, c.picks)
        alive = c.alive & goes_on
        put = jnp.where(c.step < num_nodes, c.step, num_nodes)  # an index that is dropped in the pass without a head
        return _Carry(
            step=c.step + 1,
            token=pick if vocab is None else vocab[pick],
            alive=alive,
            caches=caches,
            picks=c.picks.at[:, put].set(pick, mode="drop"),
            valid=c.valid.at[:, put].set(alive, mode="drop"),
            laws=c.laws if greedy else c.laws.at[:, put].set(law, mode="drop"),
            hidden=c.hidden.at[:, c.step].set(hidden[:, 0], mode="drop"),
        )

    init = _Carry(
        step=jnp.zeros((), jnp.int32),
        token=context.last(1)[:, 0],
        alive=jnp.ones((batch,), bool),
        caches=caches,
        picks=jnp.zeros((batch, num_nodes), jnp.int32),
        valid=jnp.zeros((batch, num_nodes), bool),
        laws=jnp.zeros((batch, 0 if greedy else num_nodes, head_size), jnp.float32),
        hidden=jnp.zeros((batch, num_nodes + 1, config.hidden_size), config.dtype),
    )
    done = jax.lax.while_loop(lambda c: (c.step < passes) & jnp.any(c.alive), body, init)
    tokens = done.picks if vocab is None else vocab[done.picks]
    draft = chain(tokens, laws=None if greedy else done.laws, vocab=vocab)
    # Without a last pass verification starts anew, and may be plain.
    sizes = stop_widths(num_nodes, plain=not last_pass)
    widths = fitting(done.valid, sizes) if stops_early(min_confidence, max_entropy) else None
    return dataclasses.replace(draft, valid=done.valid, widths=widths), done.hidden, done.caches


def sure(logits: jax.Array, min_confidence: float, max_entropy: float) -> jax.Array:
    """Whether a law of logits `[..., Vd]`, at temperature 1, is sure enough to go on drafting: `[...]` bool.

    Entropy is what AdaEDL (Agrawal et al. 2024) stops by: its bound on acceptance, 1 - sqrt(gamma H), falls as entropy
    grows, so that a least bound is a greatest entropy.

    Args:
        logits: processed, not warped.
        min_confidence: least probability of the likeliest token; 0 sets no bound.
        max_entropy: greatest entropy in nats; infinity sets no bound.
    """
    found = jnp.ones(logits.shape[:-1], bool)
    if min_confidence:
        found &= confidence_of(logits) >= min_confidence
    if max_entropy < math.inf:
        found &= entropy_of(logits) <= max_entropy
    return found


def confidence_of(logits: jax.Array) -> jax.Array:
    """Probability of the likeliest token `[...]`, at temperature 1, of logits `[..., Vd]`."""
    return jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))


def entropy_of(logits: jax.Array) -> jax.Array:
    """Entropy `[...]` in nats, at temperature 1, of logits `[..., Vd]`."""
    log_p = jax.nn.log_softmax(logits, -1)
    p = jnp.exp(log_p)
    return -jnp.sum(jnp.where(p > 0, p * log_p, 0.0), -1)  # suppressed tokens have log-probability -inf


def stops_early(min_confidence: float, max_entropy: float) -> bool:
    """Whether a chain with these settings may end before its last node."""
    return bool(min_confidence) or max_entropy < math.inf


def check_chain(num_nodes: int, min_confidence: float, max_entropy: float) -> None:
    """Checks the settings of a chain.

    Raises:
        ValueError: no node, a confidence that is no probability, or an entropy that no law has.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes}; the target's own layers draft at least 1 token")
    check_stop(min_confidence, max_entropy)


def check_stop(min_confidence: float, max_entropy: float) -> None:
    """Checks the confidence and the entropy at which drafting stops.

    Raises:
        ValueError: the one is no probability, or the other none that a law has.
    """
    if not 0 <= min_confidence < 1:
        raise ValueError(f"min_confidence={min_confidence}; expected a probability in [0, 1), 0 to draft every node")
    if not max_entropy > 0:
        raise ValueError(f"max_entropy={max_entropy}; expected nats above 0, infinity to draft every node")
