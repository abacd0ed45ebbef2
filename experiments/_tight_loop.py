"""Greedy decoding written out by hand for one row: what the loop's own overhead is held against.

No batch, no budget, no end of text, no statistics, no sampling, no trees: a while loop over passes of one token, or of
one and a chain that prompt lookup proposes, each layer's keys and values in two buffers of fixed length. Weights go
through the same seam (`specjax.models.linear`), so that it is loops that are compared, not layouts.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafting import PromptLookup
from specjax.models import Decoder, ModelConfig, merge
from specjax.models.attention import rope_frequencies

Caches = tuple[tuple[jax.Array, jax.Array], ...]


@dataclasses.dataclass(frozen=True)
class AsTree(PromptLookup):
    """Prompt lookup's chain without the word that it is one: the loop takes it for a tree like any other."""

    def propose(self, *args: Any) -> Any:
        """See `Drafter.propose`."""
        draft, state, cache = super().propose(*args)
        return dataclasses.replace(draft, is_chain=False), state, cache


def check_supported(config: ModelConfig) -> None:
    """Checks that a model needs nothing that is not written out here.

    Raises:
        ValueError: it does; names it.
    """
    extras = {
        "sliding windows": any(w is not None for w in config.windows),
        "layers without rotary embedding": any(r is None for r in config.ropes),
        "rotary embeddings that differ by layer": len(set(config.ropes)) > 1,
        "norms of queries and keys": config.qk_norm,
        "norms behind attention and MLP": config.post_norms,
        "caps on scores or logits": bool(config.attention_softcap or config.final_softcap),
        "scaled embeddings": config.embed_scale != 1.0,
        "an activation other than silu": config.activation != "silu",
    }
    found = [name for name, there in extras.items() if there]
    if found:
        raise ValueError(f"the hand-written loop does not cover {', '.join(found)}; set --config.pairs=0 to skip it")


@partial(jax.jit, static_argnames=("graph", "precision", "lookup"), donate_argnames=("caches",))
def tight_loop(
    graph: nnx.GraphDef[Decoder],
    precision: str,
    params: Any,
    caches: Caches,
    tokens_l: jax.Array,
    length: jax.Array,
    count: jax.Array,
    lookup: PromptLookup | None = None,
) -> tuple[Caches, jax.Array]:
    """Continues one text by `count` tokens; the last pass may add tokens beyond them.

    Args:
        graph: a Llama's (see `check_supported`).
        precision: of matrix products.
        params: its parameters, in any layout.
        caches: keys and values `[S, K, H]` of each layer; slots below `length - 1` are filled.
        tokens_l: `[L]` int32; `tokens[length - 1]` is the last one, not yet fed. Both buffers have room for one pass
            beyond the end.
        length: int32.
        count: int32.
        lookup: what proposes the chain; None for plain decoding.

    Returns:
        Caches, and the tokens with the new ones in place.
    """
    with jax.default_matmul_precision(precision):
        target = merge(graph, params)
        config: ModelConfig = target.config
        rope, slots = config.ropes[0], caches[0][0].shape[0]
        assert rope is not None
        angles = jnp.arange(slots, dtype=jnp.float32)[:, None] * rope_frequencies(rope, config.head_dim)
        cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor

        def rotate(x_tnh: jax.Array, at_t: jax.Array) -> jax.Array:
            a, b = jnp.split(x_tnh, 2, axis=-1)
            c, s = cos[at_t][:, None], sin[at_t][:, None]
            return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)

        def drafted(tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
            if lookup is None:
                return jnp.zeros((0,), jnp.int32), jnp.zeros((0,), bool)
            chain, proposed = lookup.look_up(tokens[None], length[None], config.vocab_size)
            return chain[0], proposed[0]

        def body(carry: tuple[jax.Array, Caches, jax.Array]) -> tuple[jax.Array, Caches, jax.Array]:
            length, caches, tokens = carry
            chain, proposed = drafted(tokens, length)
            fed = jnp.concatenate([tokens[length - 1][None], chain])
            at, new = length - 1 + jnp.arange(fed.shape[0]), []
            seen = jnp.arange(slots) <= at[:, None]
            x = target.embed(fed)
            for layer, (k_skh, v_skh) in zip(target.layers, caches, strict=True):
                y = layer.attn_norm(x)
                q = rotate(layer.attn.q(y).reshape(-1, config.num_heads, config.head_dim), at) * config.query_scale
                k = rotate(layer.attn.k(y).reshape(-1, config.num_kv_heads, config.head_dim), at)
                v = layer.attn.v(y).reshape(-1, config.num_kv_heads, config.head_dim)
                k_skh = jax.lax.dynamic_update_slice(k_skh, k, (length - 1, 0, 0))
                v_skh = jax.lax.dynamic_update_slice(v_skh, v, (length - 1, 0, 0))
                new.append((k_skh, v_skh))
                grouped = q.reshape(-1, config.num_kv_heads, config.group, config.head_dim)
                scores = jnp.einsum("tkgh,skh->tkgs", grouped, k_skh)
                law = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30))
                x = x + layer.attn.o(jnp.einsum("tkgs,skh->tkgh", law, v_skh).reshape(x.shape[0], -1))
                y = layer.mlp_norm(x)
                x = x + layer.mlp.down(jax.nn.silu(layer.mlp.gate(y)) * layer.mlp.up(y))
            best = jnp.argmax(target.logits(target.final_norm(x)), axis=-1).astype(jnp.int32)
            kept = jnp.cumprod(proposed & (chain == best[:-1])).sum()
            return length + 1 + kept, tuple(new), jax.lax.dynamic_update_slice(tokens, best, (length,))

        end = length + count
        _, caches, tokens_l = jax.lax.while_loop(lambda c: c[0] < end, body, (length, caches, tokens_l))
        return caches, tokens_l
