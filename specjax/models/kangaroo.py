"""Kangaroo's adapter: what makes the target's first layers a draft model (Liu et al. 2024, 2404.18911, section 3.1).

One attention layer with a norm before it, its residual, a norm behind; no MLP. It reads the hidden states that enter
layer E of the target, has a KV cache of its own, and ends in the target's head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import View, cached_attention, causal_mask, full_attention
from specjax.models.cache import KVCache, write
from specjax.models.config import ModelConfig, check_exit_layer
from specjax.models.decoder import Attention, Decoder, RMSNorm, Tap, split
from specjax.models.linear import Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class KangarooConfig:
    """Shapes of the adapter of one target.

    Attributes:
        layer: its attention, one layer of the target's shapes; `head_size` is the draft vocabulary.
        exit_layer: E, how many of the target's layers run before it.
    """

    layer: ModelConfig
    exit_layer: int

    def __post_init__(self) -> None:
        if self.layer.num_layers != 1:
            raise ValueError(f"the adapter has num_layers={self.layer.num_layers}; Kangaroo takes 1")
        if self.exit_layer < 1:
            raise ValueError(f"exit_layer={self.exit_layer}; expected at least 1 of the target's layers to draft")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.layer.vocab_size

    @property
    def head_size(self) -> int:
        """Vd."""
        return self.layer.head_size

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the adapter reads: the input of layer E."""
        return (self.exit_layer,)


def kangaroo_config(target: ModelConfig, exit_layer: int, draft_vocab: int = 0) -> KangarooConfig:
    """An adapter with the attention shapes of the target's layer E.

    Args:
        target: its config.
        exit_layer: E.
        draft_vocab: Vd, 0 for the target's whole vocabulary.

    Raises:
        ValueError: E leaves no layer to draft, or none to verify.
    """
    check_exit_layer(exit_layer, target.num_layers)
    reduced: dict[str, Any] = {"head_size": draft_vocab, "tie_embeddings": False} if draft_vocab else {}
    layer = dataclasses.replace(target.with_layers((exit_layer,)), **reduced)
    return KangarooConfig(layer=layer, exit_layer=exit_layer)


class Adapter(nnx.Module):
    """The network. The head is the target's; its rows of a reduced draft vocabulary are `lm_head`, by reference."""

    def __init__(self, config: KangarooConfig, *, rngs: nnx.Rngs):
        c = config.layer
        norm = functools.partial(RMSNorm, c.hidden_size, eps=c.norm_eps, offset=c.norm_offset, dtype=c.dtype)
        self.config = config
        self.attn_norm = norm()
        self.attn = Attention(c, c.hidden_size, rngs=rngs)
        self.norm = norm()
        reduced = c.head_size != c.vocab_size
        self.lm_head = Linear(c.hidden_size, c.head_size, dtype=c.dtype, rngs=rngs) if reduced else None

    def cached(self, hidden: jax.Array, cache: KVCache, view: View) -> tuple[jax.Array, KVCache]:
        """One pass over new positions.

        Args:
            hidden: `[B, T, d]` inputs of the target's layer E.
            cache: of one layer.
            view: what each position sees.

        Returns:
            What the head reads `[B, T, d]`, after the last norm; the cache.
        """
        c, layer = self.config.layer, cache.layers[0]

        def attend(q: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            nonlocal layer
            layer = write(layer, key, value, view.start)
            return cached_attention(q, layer, view, c.windows[0], c.attention_softcap)

        out = self._run(hidden, view.positions, attend)
        return out, dataclasses.replace(cache, layers=(layer,))

    def full(self, hidden: jax.Array, positions_bt: jax.Array, segments_bt: jax.Array) -> jax.Array:
        """The same over whole rows of documents, for training; arguments as in `cached` and `Decoder.full`."""
        c = self.config.layer
        mask = causal_mask(positions_bt, segments_bt, c.windows[0])

        def attend(q: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return full_attention(q, key, value, mask, c.attention_softcap)

        return self._run(hidden, positions_bt, attend)

    def logits(self, normed: jax.Array, target: Decoder) -> jax.Array:
        """`[..., d]` to float32 `[..., Vd]`."""
        if self.lm_head is None:
            return target.logits(normed)
        out = self.lm_head(normed).astype(jnp.float32)
        cap = self.config.layer.final_softcap
        return cap * jnp.tanh(out / cap) if cap else out

    def _run(self, hidden: jax.Array, positions_bt: jax.Array, attend: Any) -> jax.Array:
        mixed = self.attn(self.attn_norm(hidden), positions_bt, self.config.layer.ropes[0], attend)
        return self.norm(hidden + mixed)


@functools.cache
def kangaroo_graph(config: KangarooConfig) -> tuple[nnx.GraphDef[Adapter], Any]:
    """The static graph and the abstract parameters."""
    return split(nnx.eval_shape(lambda: Adapter(config, rngs=nnx.Rngs(params=0))))


def init_adapter(config: KangarooConfig, target_params: Any) -> Any:
    """Parameters to start from: the attention that comes next in the target, and its last norm.

    Args:
        config: of the adapter.
        target_params: the target's, in the plain layout.

    Returns:
        Without the borrowed head rows.
    """
    layer = target_params["layers"][config.exit_layer]
    own = {"attn_norm": layer["attn_norm"], "attn": layer["attn"], "norm": target_params["final_norm"]}
    return jax.tree.map(jnp.array, own)


def with_head(config: KangarooConfig, params: Any, head_dv: jax.Array) -> Any:
    """The parameters with the head rows of a reduced draft vocabulary."""
    return params if config.head_size == config.vocab_size else {**params, "lm_head": {"kernel": head_dv}}
