"""The decoder-only transformer that targets and drafts are: Llama, Qwen, Mistral, SmolLM, Gemma by config.

Modules hold no state. They are split once into a static graph and a plain parameter tree (`split`), and merged
again inside a trace (`merge`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import View, cached_attention, causal_mask, full_attention, rotate
from specjax.models.cache import KVCache, LayerCache, write
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.linear import Embedding, Linear
from specjax.models.remat import recomputed
from specjax.parallel import spread_rows

Tap = int | str
# attend(layer index, q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> [B,T,N,H]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
# One layer's (x [B,T,d], positions [B,T]) -> [B,T,d].
OneLayer = Callable[[jax.Array, jax.Array], jax.Array]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@flax.struct.dataclass
class Activations:
    """What a pass leaves behind.

    Attributes:
        hidden: `[B, T, d]` output of the last layer run, before the final norm.
        taps: `{tap: [B, T, d]}`. Tap i is the *input* of layer i (so n is the last layer's output when all n
            layers ran); `final` is the last output before the final norm, `normed` the same after it.
    """

    hidden: jax.Array
    taps: dict[Tap, jax.Array]


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32; `weight` `[d]`, to which `offset` is added."""

    def __init__(self, width: int, *, eps: float, offset: float, dtype: str):
        self.eps, self.offset = eps, offset
        self.weight = nnx.Param(jnp.full((width,), 1.0 - offset, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis `[..., d]`."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return (x32 * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention; the mixing itself is the caller's `attend`."""

    def __init__(self, config: ModelConfig, inputs: int, *, rngs: nnx.Rngs):
        c = config
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.heads, self.kv_heads, self.head_dim, self.scale = (
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.query_scale,
        )
        self.q = Linear(inputs, q_out, bias=c.qkv_bias, dtype=c.dtype, rngs=rngs)
        self.k = Linear(inputs, kv_out, bias=c.qkv_bias, dtype=c.dtype, rngs=rngs)
        self.v = Linear(inputs, kv_out, bias=c.qkv_bias, dtype=c.dtype, rngs=rngs)
        self.o = Linear(q_out, c.hidden_size, bias=c.output_bias, dtype=c.dtype, rngs=rngs)
        self.q_norm = _norm(c, c.head_dim) if c.qk_norm else None
        self.k_norm = _norm(c, c.head_dim) if c.qk_norm else None

    def __call__(
        self, x: jax.Array, positions_bt: jax.Array, rope: RopeConfig | None, attend: Callable[..., jax.Array]
    ) -> jax.Array:
        """`[B, T, in]` to `[B, T, d]`; `attend(q, k, v)` mixes rotated heads."""
        lead = x.shape[:-1]
        q = self.q(x).reshape(*lead, self.heads, self.head_dim)
        k = self.k(x).reshape(*lead, self.kv_heads, self.head_dim)
        v = self.v(x).reshape(*lead, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, positions_bt, rope), rotate(k, positions_bt, rope)
        mixed = attend(q * jnp.asarray(self.scale, q.dtype), k, v)
        return self.o(mixed.reshape(*lead, self.heads * self.head_dim))


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        self.activation = c.activation
        self.gate = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=c.dtype, rngs=rngs)
        self.up = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, dtype=c.dtype, rngs=rngs)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., d]` to `[..., d]`."""
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals; Gemma adds norms on both outputs."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attn_norm = _norm(config, config.hidden_size)
        self.attn = Attention(config, config.hidden_size, rngs=rngs)
        self.mlp_norm = _norm(config, config.hidden_size)
        self.mlp = GatedMLP(config, rngs=rngs)
        self.attn_post_norm = _norm(config, config.hidden_size) if config.post_norms else None
        self.mlp_post_norm = _norm(config, config.hidden_size) if config.post_norms else None

    def __call__(
        self, x: jax.Array, positions_bt: jax.Array, rope: RopeConfig | None, attend: Callable[..., jax.Array]
    ) -> jax.Array:
        """`[B, T, d]` to `[B, T, d]`: both sublayers."""
        return self.transform(self.mix(x, positions_bt, rope, attend))

    def mix(
        self, x: jax.Array, positions_bt: jax.Array, rope: RopeConfig | None, attend: Callable[..., jax.Array]
    ) -> jax.Array:
        """The attention sublayer with its residual, `[B, T, d]` to `[B, T, d]`."""
        y = self.attn(self.attn_norm(x), positions_bt, rope, attend)
        return x + (y if self.attn_post_norm is None else self.attn_post_norm(y))

    def transform(self, x: jax.Array) -> jax.Array:
        """The MLP sublayer with its residual, `[B, T, d]` to `[B, T, d]`."""
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = _norm(config, config.hidden_size)
        untied = not config.tie_embeddings
        self.lm_head = Linear(config.hidden_size, config.head_size, dtype=config.dtype, rngs=rngs) if untied else None

    def embed_tokens(self, tokens_bt: jax.Array) -> jax.Array:
        """`[B, T]` ids to `[B, T, d]`, scaled as the family asks."""
        x = self.embed(tokens_bt)
        return x * jnp.asarray(self.config.embed_scale, x.dtype)

    def logits(self, normed: jax.Array) -> jax.Array:
        """`[..., d]` after the final norm to float32 logits `[..., head_size]`."""
        out = self.embed.attend(normed) if self.lm_head is None else self.lm_head(normed)
        out = out.astype(jnp.float32)
        cap = self.config.final_softcap
        return cap * jnp.tanh(out / cap) if cap else out

    def cached(
        self,
        inputs: jax.Array,
        cache: KVCache,
        view: View,
        *,
        start: int = 0,
        stop: int | None = None,
        skip: Collection[int] = (),
        skip_attention: Collection[int] = (),
        skip_mlp: Collection[int] = (),
        taps: tuple[Tap, ...] = (),
    ) -> tuple[Activations, KVCache]:
        """One pass over new tokens: their keys and values are written behind `view.prefix` and attended to.

        Args:
            inputs: token ids `[B, T]`, or hidden states `[B, T, d]` that enter layer `start`.
            cache: its `length` is neither read nor moved; committing is the caller's.
            view: what each token sees; also gives positions and slots.
            start: first layer to run.
            stop: layer before which to stop (all by default).
            skip: layers left out (their cache slots are left as they are).
            skip_attention: layers of which the attention is left out; so are their cache slots.
            skip_mlp: layers of which the MLP is left out.
            taps: which activations to return.
        """
        layers = list(cache.layers)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            layers[i] = write(layers[i], k, v, view.start)
            return cached_attention(q, layers[i], view, self.config.windows[i], self.config.attention_softcap)

        out = self._run(inputs, view.positions, attend, start, stop, (*skip, *skip_attention), (*skip, *skip_mlp), taps)
        return out, dataclasses.replace(cache, layers=tuple(layers))

    def full(
        self,
        inputs: jax.Array,
        positions_bt: jax.Array,
        segments_bt: jax.Array,
        *,
        start: int = 0,
        stop: int | None = None,
        skip: Collection[int] = (),
        skip_attention: Collection[int] = (),
        skip_mlp: Collection[int] = (),
        taps: tuple[Tap, ...] = (),
    ) -> Activations:
        """A pass over whole sequences without a cache, for training; layers are `recomputed` where that is asked for.

        Args:
            inputs: token ids `[B, T]` or hidden states `[B, T, d]`.
            positions_bt: int32, restarting at 0 in each document.
            segments_bt: int32 document number; tokens see their own document only.
            start: as in `cached`.
            stop: as in `cached`.
            skip: as in `cached`.
            skip_attention: as in `cached`.
            skip_mlp: as in `cached`.
            taps: as in `cached`.
        """
        masks = {w: causal_mask(positions_bt, segments_bt, w) for w in set(self.config.windows)}

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return full_attention(q, k, v, masks[self.config.windows[i]], self.config.attention_softcap)

        no_attention, no_mlp = (*skip, *skip_attention), (*skip, *skip_mlp)
        return self._run(inputs, positions_bt, attend, start, stop, no_attention, no_mlp, taps, recomputed)

    def _run(
        self,
        inputs: jax.Array,
        positions_bt: jax.Array,
        attend: Attend,
        start: int,
        stop: int | None,
        no_attention: Collection[int],
        no_mlp: Collection[int],
        taps: tuple[Tap, ...],
        around: Callable[[OneLayer], OneLayer] = lambda layer: layer,
    ) -> Activations:
        depth = self.config.num_layers
        stop = depth if stop is None else stop
        if not 0 <= start <= stop <= depth:
            raise ValueError(f"layers {start}..{stop} do not lie within the model's 0..{depth}")
        # Held row by row between layers: XLA then gathers split weights rather than activations.
        x = spread_rows(self.embed_tokens(inputs) if inputs.ndim == 2 else inputs)
        kept: dict[Tap, jax.Array] = {}
        for i in range(start, stop):
            if i in taps:
                kept[i] = x
            if i not in no_attention or i not in no_mlp:
                layer = self._layer(i, attend, attention=i not in no_attention, mlp=i not in no_mlp)
                x = spread_rows(around(layer)(x, positions_bt))
        if stop in taps:
            kept[stop] = x
        if "final" in taps:
            kept["final"] = x
        if "normed" in taps:
            kept["normed"] = self.final_norm(x)
        return Activations(hidden=x, taps=kept)

    def _layer(self, i: int, attend: Attend, *, attention: bool, mlp: bool) -> OneLayer:
        """Layer i, or one sublayer of it."""

        def run(x: jax.Array, positions_bt: jax.Array) -> jax.Array:
            if attention:
                x = self.layers[i].mix(x, positions_bt, self.config.ropes[i], functools.partial(attend, i))
            return self.layers[i].transform(x) if mlp else x

        return run


def _norm(config: ModelConfig, width: int) -> RMSNorm:
    return RMSNorm(width, eps=config.norm_eps, offset=config.norm_offset, dtype=config.dtype)


def graph(config: ModelConfig) -> tuple[nnx.GraphDef[Decoder], Any]:
    """The static graph of a decoder and its parameter tree as `ShapeDtypeStruct`s, without allocating."""
    graphdef, shapes = _graph(config)
    return graphdef, jax.tree.map(lambda x: x, shapes)  # a tree of the caller's own


@functools.lru_cache(maxsize=64)
def _graph(config: ModelConfig) -> tuple[nnx.GraphDef[Decoder], Any]:
    # Kept: a drafter asks for its network's graph whenever a loop around it is traced.
    rngs: Any = _OneKey()
    return split(nnx.eval_shape(lambda: Decoder(config, rngs=rngs)))


class _OneKey:
    """Stands in for `nnx.Rngs` where only shapes matter: counting keys inside a trace grows quadratically."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


def init_decoder(config: ModelConfig, key: jax.Array) -> Any:
    """Random parameters (a plain nested dict) for `config`."""
    return split(Decoder(config, rngs=nnx.Rngs(params=key)))[1]


def split(module: nnx.Module) -> tuple[nnx.GraphDef[Any], Any]:
    """A module's hashable static graph and its parameters as a plain nested dict."""
    graphdef, state = nnx.split(module)
    return graphdef, nnx.to_pure_dict(state)


def merge(graphdef: nnx.GraphDef[Any], params: Any) -> Any:
    """The module again, around the given parameters. Call it inside the trace, outside loop bodies."""
    return nnx.merge(graphdef, params)


__all__ = [
    "Activations",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "GatedMLP",
    "LayerCache",
    "RMSNorm",
    "Tap",
    "graph",
    "init_decoder",
    "merge",
    "split",
]
