"""The chain that a part of the target's own layers drafts: shared by early exit and layer skipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from specjax.decoding import Context, Draft, Keys
from specjax.decoding.sampling import DRAFT, log_law
from specjax.decoding.tree import chain
from specjax.models import Decoder, KVCache, View, causal_view

# part(tokens [B, 1], cache, view) -> (hidden [B, 1, d] before the final norm, cache)
Part = Callable[[jax.Array, KVCache, View], tuple[jax.Array, KVCache]]


@flax.struct.dataclass
class _Carry:
    """Pass i feeds token i (the root is token 0) and draws token i + 1, which is node i."""

    step: jax.Array
    token: jax.Array  # [B]
    alive: jax.Array  # [B] no node was given up yet
    cache: KVCache
    tokens: jax.Array  # [B, N]
    valid: jax.Array  # [B, N]
    laws: jax.Array  # [B, N, V], or [B, 0, V] when greedy
    hidden: jax.Array  # [B, N + 1, d]


def draft_chain(
    part: Part,
    target: Decoder,
    cache: KVCache,
    context: Context,
    keys: Keys,
    *,
    num_nodes: int,
    min_confidence: float,
    last_pass: bool,
) -> tuple[Draft, jax.Array, KVCache]:
    """Drafts token by token into the target cache's scratch slots, the root at slot `length - 1`.

    A node whose law gives its likeliest token less than `min_confidence` is left out, and all behind it: that depends
    on the law and on earlier tokens alone, so verification stays exact. The passes end when every row has stopped.

    Args:
        part: the layers that draft.
        target: gives final norm and head.
        cache: of the target.
        context: what is committed.
        keys: of this step.
        num_nodes: N.
        min_confidence: see above; 0 drafts all nodes.
        last_pass: also run the last node through `part`, without the head.

    Returns:
        The chain; the outputs of `part` at root and nodes `[B, N + 1, d]` (zero where no pass was made); the cache.
    """
    config, greedy = target.config, context.sampling.greedy
    batch, passes = context.tokens.shape[0], num_nodes + last_pass

    def draw(hidden_b1d: jax.Array, slot: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        so_far = jnp.broadcast_to(jnp.arange(num_nodes) < slot, (batch, 1, num_nodes))
        logits = context.process(target.logits(target.final_norm(hidden_b1d)), tokens, so_far)[:, 0]
        confidence = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, -1))
        if greedy:
            return jnp.argmax(logits, -1).astype(jnp.int32), confidence, jnp.zeros((batch, 0), jnp.float32)
        law = log_law(logits, context.sampling)
        return keys.sample(DRAFT, slot, law), confidence, law

    def nothing(hidden_b1d: jax.Array, slot: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        del hidden_b1d, slot, tokens
        return (
            jnp.zeros((batch,), jnp.int32),
            jnp.zeros((batch,), jnp.float32),
            jnp.zeros((batch, 0 if greedy else config.head_size), jnp.float32),
        )

    def body(c: _Carry) -> _Carry:
        hidden, cache = part(c.token[:, None], c.cache, causal_view(context.length - 1 + c.step, 1))
        token, confidence, law = jax.lax.cond(c.step < num_nodes, draw, nothing, hidden, c.step, c.tokens)
        alive = c.alive & (confidence >= min_confidence)
        put = jnp.where(c.step < num_nodes, c.step, num_nodes)  # an index that is dropped in the pass without a head
        return _Carry(
            step=c.step + 1,
            token=token,
            alive=alive,
            cache=cache,
            tokens=c.tokens.at[:, put].set(token, mode="drop"),
            valid=c.valid.at[:, put].set(alive, mode="drop"),
            laws=c.laws if greedy else c.laws.at[:, put].set(law, mode="drop"),
            hidden=c.hidden.at[:, c.step].set(hidden[:, 0], mode="drop"),
        )

    init = _Carry(
        step=jnp.zeros((), jnp.int32),
        token=context.last(1)[:, 0],
        alive=jnp.ones((batch,), bool),
        cache=cache,
        tokens=jnp.zeros((batch, num_nodes), jnp.int32),
        valid=jnp.zeros((batch, num_nodes), bool),
        laws=jnp.zeros((batch, 0 if greedy else num_nodes, config.head_size), jnp.float32),
        hidden=jnp.zeros((batch, num_nodes + 1, config.hidden_size), config.dtype),
    )
    done = jax.lax.while_loop(lambda c: (c.step < passes) & jnp.any(c.alive), body, init)
    draft = chain(done.tokens, laws=None if greedy else done.laws)
    return dataclasses.replace(draft, valid=done.valid), done.hidden, done.cache


def check_chain(num_nodes: int, min_confidence: float) -> None:
    """Checks the settings of a chain.

    Raises:
        ValueError: no node, or a confidence that is no probability.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes}; the target's own layers draft at least 1 token")
    if not 0 <= min_confidence < 1:
        raise ValueError(f"min_confidence={min_confidence}; expected a probability in [0, 1), 0 to draft every node")
