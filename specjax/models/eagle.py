"""EAGLE's networks: one decoder layer over pairs of a token and the target's feature one position before it.

From token t+1 and feature t the layer makes feature t+1, from which a head reads the law of token t+2. Its own feature
stands in for the target's where the target has not been yet: it drafts token after token from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import MASKED, View, cached_attention, causal_mask
from specjax.models.cache import KVCache, write
from specjax.models.config import ModelConfig, RopeConfig
from specjax.models.decoder import Attention, Decoder, GatedMLP, RMSNorm, Tap, merge, split
from specjax.models.linear import Embedding, Linear, linear
from specjax.models.remat import recomputed

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The network of EAGLE-1 and EAGLE-2 (Li et al. 2024, 2401.15077 section 3, 2406.16858).

    Attributes:
        layer: shapes of its one layer; `head_size` is the draft vocabulary.
        bias: of the projection of token and feature.
    """

    layer: ModelConfig
    bias: bool = True

    def __post_init__(self) -> None:
        _check_layer(self.layer)

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
        """The feature is what the target gives to its head: its last hidden state after the final norm.

        The published Llama heads were trained on it, and the target's head fits the draft's feature because of it.
        """
        return ("normed",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The network of EAGLE-3 (Li et al. 2025, 2503.01840 section 3) and the norms that EAGLE-3.1 adds.

    Attributes:
        layer: shapes of its one layer; `head_size` is the draft vocabulary.
        taps: target layers whose inputs are fused.
        target_hidden_size: their width.
        norm_before_fc: one norm over all taps side by side, before they are fused.
        fc_norm: a norm over each tap, before they are fused.
        norm_before_residual: the residual stream starts from the normed feature.
        norm_output: the feature handed on is the one after the last norm.
    """

    layer: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        _check_layer(self.layer)
        if not self.taps or min(self.taps) < 0:
            raise ValueError(f"taps={self.taps}: expected target layers from 0 on, such as (2, n // 2, n - 3)")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.layer.vocab_size

    @property
    def head_size(self) -> int:
        """Vd."""
        return self.layer.head_size


FeatureConfig = EagleConfig | Eagle3Config


def _check_layer(layer: ModelConfig) -> None:
    if layer.num_layers != 1:
        raise ValueError(f"the draft has num_layers={layer.num_layers}; EAGLE's network has 1")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high layer whose inputs EAGLE-3 fuses in an n-layer target: 2, n // 2, n - 3."""
    if num_layers < 6:
        raise ValueError(f"a target of {num_layers} layers is too shallow for taps 2, n // 2, n - 3; choose `taps`")
    return 2, num_layers // 2, num_layers - 3


def draft_layer(target: ModelConfig, *, intermediate_size: int, head_size: int) -> ModelConfig:
    """A single full-attention layer in the target's shape, with its own MLP width and draft vocabulary."""
    last = target.with_layers((target.num_layers - 1,))
    return dataclasses.replace(
        last, intermediate_size=intermediate_size, head_size=head_size, windows=(None,), tie_embeddings=False
    )


def plain_layer(layer: ModelConfig) -> ModelConfig:
    """The same shapes without what sets a family apart from Llama: the layer that servers build for every draft.

    Norms of queries and keys, biases, caps, scales and norm offsets go; the activation is SiLU, the position signal
    rotary.
    """
    return dataclasses.replace(
        layer,
        family="llama",
        query_scale=layer.head_dim**-0.5,
        ropes=tuple(rope or RopeConfig() for rope in layer.ropes),
        norm_offset=0.0,
        activation="silu",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        post_norms=False,
        embed_scale=1.0,
        attention_softcap=0.0,
        final_softcap=0.0,
    )


class FeatureLayer(nnx.Module):
    """What EAGLE's networks have in common: embedding, head, and the passes over a cache and over whole texts.

    `embed` and `lm_head` may be the target's own (see `assemble`).
    """

    def __init__(self, layer: ModelConfig, inputs: int, *, rngs: nnx.Rngs):
        self.layer = layer
        self.embed = Embedding(layer.vocab_size, layer.hidden_size, dtype=layer.dtype, rngs=rngs)
        self.attn = Attention(layer, inputs, rngs=rngs)
        self.mlp_norm = self._norm(layer.hidden_size)
        self.mlp = GatedMLP(layer, rngs=rngs)
        self.lm_head = Linear(layer.hidden_size, layer.head_size, dtype=layer.dtype, rngs=rngs)

    def fuse(self, taps: Mapping[Any, jax.Array]) -> jax.Array:
        """The feature `[B, T, d]` of each position, from the target's taps."""
        raise NotImplementedError

    def mix(
        self, embeds: jax.Array, features: jax.Array, positions_bt: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """The layer itself, `[B, T, d]` twice: the next feature, and what the head reads."""
        raise NotImplementedError

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`[..., d]` to float32 logits `[..., Vd]`."""
        return self.logits_by(hidden, self.lm_head.kernel[...])

    def logits_by(self, hidden: jax.Array, kernel: jax.Array) -> jax.Array:
        """`logits` with a head that is given."""
        out = linear(hidden, kernel).astype(jnp.float32)
        cap = self.layer.final_softcap
        return cap * jnp.tanh(out / cap) if cap else out

    def cached(
        self, tokens_bt: jax.Array, features_btd: jax.Array, cache: KVCache, view: View
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """One pass over new pairs, written behind `view.prefix` in the draft's own cache.

        Pair t (feature t, token t+1) has slot and position t.

        Returns:
            The next features `[B, T, d]`, what the head reads `[B, T, d]`, and the cache.
        """
        written = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            written.append(write(cache.layers[0], k, v, view.start))
            return cached_attention(q, written[0], view, None, self.layer.attention_softcap)

        features, hidden = self.mix(self._embed(tokens_bt), features_btd, view.positions, attend)
        return features, hidden, dataclasses.replace(cache, layers=tuple(written))

    def unrolled(
        self, tokens_bt: jax.Array, features_btd: jax.Array, positions_bt: jax.Array, segments_bt: jax.Array, steps: int
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Drafts from every position at once, along the text itself (EAGLE-3's training-time test).

        Step 0 reads the target's features and sees the earlier ones of its document. Step k reads its own output of
        step k - 1 and the text's token k further on. It sees what decoding would see after k drafted tokens: the
        target's pairs up to its own position t, then the drafted pairs t+1 .. t+k, which are the entries that earlier
        steps made *at t*. Each step is `recomputed` where that is asked for.

        Args:
            tokens_bt: the text.
            features_btd: of the target.
            positions_bt: restarting at 0 in each document.
            segments_bt: document numbers.
            steps: K.

        Returns:
            For each step the features `[B, T, d]` and what the head reads `[B, T, d]`: at index t of step k, about the
            token t + 2 + k. Undefined where that lies beyond the document.
        """
        mask = causal_mask(positions_bt, segments_bt, None)

        def one(tokens_bt: jax.Array, features_btd: jax.Array, at_bt: jax.Array, keys: Any, values: Any) -> Any:
            own: list[tuple[jax.Array, jax.Array]] = []

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                own.append((k, v))
                return _unrolled_attention(q, [*keys, k], [*values, v], mask, self.layer.attention_softcap)

            features, hidden = self.mix(self._embed(tokens_bt), features_btd, at_bt, attend)
            return features, hidden, *own[0]

        made: list[jax.Array] = []
        read: list[jax.Array] = []
        keys: list[jax.Array] = []
        values: list[jax.Array] = []
        for step in range(steps):
            inputs = ahead(tokens_bt, step + 1), features_btd, positions_bt + step
            features_btd, *rest = recomputed(one)(*inputs, keys, values)
            made.append(features_btd)
            for kept, new in zip((read, keys, values), rest, strict=True):
                kept.append(new)
        return made, read

    def _embed(self, tokens_bt: jax.Array) -> jax.Array:
        x = self.embed(tokens_bt)
        return x * jnp.asarray(self.layer.embed_scale, x.dtype)

    def _attend(self, x: jax.Array, positions_bt: jax.Array, attend: Attend) -> jax.Array:
        return self.attn(x, positions_bt, self.layer.ropes[0], attend)

    def _norm(self, width: int) -> RMSNorm:
        c = self.layer
        return RMSNorm(width, eps=c.norm_eps, offset=c.norm_offset, dtype=c.dtype)


class Eagle(FeatureLayer):
    """EAGLE-1: fc(cat[token, feature]) into a layer without an input norm; its output is the next feature."""

    def __init__(self, config: EagleConfig, *, rngs: nnx.Rngs):
        layer = config.layer
        super().__init__(layer, layer.hidden_size, rngs=rngs)
        self.fc = Linear(2 * layer.hidden_size, layer.hidden_size, bias=config.bias, dtype=layer.dtype, rngs=rngs)

    def fuse(self, taps: Mapping[Any, jax.Array]) -> jax.Array:
        """The target's own feature, unchanged."""
        return taps["normed"]

    def mix(
        self, embeds: jax.Array, features: jax.Array, positions_bt: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """See `FeatureLayer.mix`; the head reads the feature itself."""
        x = self.fc(jnp.concatenate([embeds, features], axis=-1))
        x = x + self._attend(x, positions_bt, attend)
        x = x + self.mlp(self.mlp_norm(x))
        return x, x


class Eagle3(FeatureLayer):
    """EAGLE-3: attention reads token and fused feature side by side; the feature is free, not the target's."""

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs):
        c, layer = config, config.layer
        width = layer.hidden_size
        super().__init__(layer, 2 * width, rngs=rngs)
        self.taps, self.norm_before_residual, self.norm_output = c.taps, c.norm_before_residual, c.norm_output
        fused = len(c.taps) * c.target_hidden_size
        self.input_norm = self._norm(fused) if c.norm_before_fc else None
        self.fc_norm = nnx.List([self._norm(c.target_hidden_size) for _ in c.taps]) if c.fc_norm else None
        self.fc = Linear(fused, width, dtype=layer.dtype, rngs=rngs)
        self.embed_norm, self.hidden_norm = self._norm(width), self._norm(width)
        self.norm = self._norm(width)

    def fuse(self, taps: Mapping[Any, jax.Array]) -> jax.Array:
        """fc(cat[low, mid, high])."""
        parts = [taps[tap] for tap in self.taps]
        if self.input_norm is not None:
            parts = jnp.split(self.input_norm(jnp.concatenate(parts, axis=-1)), len(parts), axis=-1)
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(jnp.concatenate(parts, axis=-1))

    def mix(
        self, embeds: jax.Array, features: jax.Array, positions_bt: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """See `FeatureLayer.mix`; the head reads the normed feature."""
        normed = self.hidden_norm(features)
        x = normed if self.norm_before_residual else features
        x = x + self._attend(jnp.concatenate([self.embed_norm(embeds), normed], axis=-1), positions_bt, attend)
        x = x + self.mlp(self.mlp_norm(x))
        hidden = self.norm(x)
        return hidden if self.norm_output else x, hidden


def _unrolled_attention(
    q_btnh: jax.Array, keys: list[jax.Array], values: list[jax.Array], mask_bts: jax.Array, softcap: float
) -> jax.Array:
    """Attention of the newest step: to step 0 under the mask, and to each later step at the same index only.

    Args:
        q_btnh: scaled, rotated queries of the newest step.
        keys: `[B, T, K, H]` of every step.
        values: like `keys`.
        mask_bts: True where index t sees step 0's s.
        softcap: tanh cap on the scores, 0 for none.
    """
    batch, length, heads, width = q_btnh.shape
    groups = keys[0].shape[2]
    q = q_btnh.reshape(batch, length, groups, heads // groups, width)

    def capped(scores: jax.Array) -> jax.Array:
        return softcap * jnp.tanh(scores / softcap) if softcap else scores

    base = jnp.einsum("btkgh,bskh->bkgts", q, keys[0], preferred_element_type=jnp.float32)
    scores = [jnp.where(mask_bts[:, None, None], capped(base), MASKED)]
    for k in keys[1:]:
        same = jnp.einsum("btkgh,btkh->bkgt", q, k, preferred_element_type=jnp.float32)
        scores.append(capped(same)[..., None])
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :length], values[0])
    for i, v in enumerate(values[1:]):
        out = out + jnp.einsum("bkgt,btkh->btkgh", weights[..., length + i], v)
    return out.reshape(q_btnh.shape)


def ahead(x_bt: jax.Array, steps: int) -> jax.Array:
    """`[B, T, ...]` whose index t holds what stood at t + steps; zeros behind the end."""
    moved = x_bt[:, steps:]
    return jnp.pad(moved, ((0, 0), (0, x_bt.shape[1] - moved.shape[1]), *(((0, 0),) * (x_bt.ndim - 2))))


@functools.lru_cache(maxsize=16)
def feature_graph(config: FeatureConfig) -> tuple[nnx.GraphDef[FeatureLayer], Any]:
    """The static graph of a network and its parameter tree as `ShapeDtypeStruct`s, `embed` and `lm_head` included."""
    return split(nnx.eval_shape(lambda: _make(config, jax.random.key(0))))


def init_feature_layer(config: FeatureConfig, key: jax.Array) -> Any:
    """Random parameters without `embed` and `lm_head`."""
    params = split(_make(config, key))[1]
    return {name: group for name, group in params.items() if name not in ("embed", "lm_head")}


def _make(config: FeatureConfig, key: jax.Array) -> FeatureLayer:
    rngs = nnx.Rngs(params=key)
    return Eagle(config, rngs=rngs) if isinstance(config, EagleConfig) else Eagle3(config, rngs=rngs)


def assemble(config: FeatureConfig, params: Any, target: Decoder, vocab: jax.Array | None = None) -> FeatureLayer:
    """The network around its parameters. Embedding and head that it lacks are the target's.

    Args:
        config: of the network.
        params: `embed` and `lm_head` may be absent.
        target: what it drafts for.
        vocab: `[Vd]` target ids of the draft vocabulary, None for the whole one; the rows of a borrowed head. Inside a
            loop give `lm_head` in `params`: this gathers the rows anew.
    """
    borrowed: dict[str, Any] = {}
    if "embed" not in params:
        borrowed["embed"] = split(target.embed)[1]
    if "lm_head" not in params:
        borrowed["lm_head"] = {"kernel": head_rows(target, vocab)}
    return merge(feature_graph(config)[0], {**params, **borrowed})


def head_rows(target: Decoder, vocab: jax.Array | None) -> jax.Array:
    """The kernel of the target's head for these target ids, in the layout that the target has."""
    if target.lm_head is not None:
        kernel = target.lm_head.kernel[...]
        return kernel if vocab is None else kernel[:, vocab]
    table = target.embed.embedding[...]
    if table.ndim == 3:
        return table if vocab is None else table[:, vocab]
    return (table if vocab is None else table[vocab]).T
