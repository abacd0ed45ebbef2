"""Multi-token prediction: transformer layers beside the target that predict tokens further ahead.

Position t of the target predicts token t + 1; depth k = 1, 2, ... predicts token t + 1 + k.

`independent` heads (Gloeckle et al. 2024, 2404.19737, section 2): depth k is one transformer layer on the trunk's
output at t, followed by the target's own final norm and head. The trunk is all of the target but its last layer, which
is the head of depth 0.

`sequential` modules (DeepSeek-V3, 2412.19437, section 2.2): h_k(t) = Block_k(W_k [RMS(h_{k-1}(t)); RMS(E(x_{t+k}))]),
with h_0 the target's hidden state; each has a norm of its own before the target's head. With one module for all depths
it is FastMTP's head (2509.18362).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import View, cached_attention, causal_mask, full_attention
from specjax.models.cache import KVCache, init_cache, write
from specjax.models.config import ModelConfig
from specjax.models.decoder import Decoder, DecoderLayer, RMSNorm, Tap, split
from specjax.models.linear import Linear
from specjax.models.remat import recomputed

KINDS = ("independent", "sequential")
FEEDBACK = ("hidden", "normed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """Shapes of the layers of one target.

    Attributes:
        layer: each of them, one transformer layer of the target's width; `head_size` is the draft vocabulary.
        depth: D, how many tokens beyond the next one are predicted.
        kind: `independent` heads, or `sequential` modules.
        shared: one module serves all depths (sequential only).
        feature: the target's activation that depth 1 reads: the input of its last layer for independent heads, else
            `normed` or `final`.
        feedback: what a sequential module hands to the next depth: its `hidden` state (DeepSeek-V3), or what its own
            norm makes of it (`normed`; MiMo and Qwen3-Next as they are served).
    """

    layer: ModelConfig
    depth: int
    kind: Literal["independent", "sequential"] = "independent"
    shared: bool = False
    feature: int | str = "normed"
    feedback: Literal["hidden", "normed"] = "hidden"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; expected {' or '.join(KINDS)}")
        if self.layer.num_layers != 1:
            raise ValueError(f"a depth has num_layers={self.layer.num_layers}; multi-token prediction takes 1")
        if self.depth < 1:
            raise ValueError(f"depth={self.depth}; expected at least 1 token beyond the next one")
        if self.feedback not in FEEDBACK:
            raise ValueError(f"feedback={self.feedback!r}; expected {' or '.join(FEEDBACK)}")
        if self.feedback == "normed" and self.kind == "independent":
            raise ValueError("feedback='normed' with independent heads: no depth reads another; expected 'hidden'")
        if self.shared and self.kind == "independent":
            raise ValueError("shared=True with independent heads: all of them would predict the same token")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.layer.vocab_size

    @property
    def head_size(self) -> int:
        """Vd."""
        return self.layer.head_size

    @property
    def num_modules(self) -> int:
        """How many there are to train."""
        return 1 if self.shared else self.depth

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What depth 1 reads."""
        return (self.feature,)


def mtp_config(
    target: ModelConfig,
    *,
    depth: int,
    kind: Literal["independent", "sequential"],
    shared: bool = False,
    feature: int | str | None = None,
    draft_vocab: int = 0,
    feedback: Literal["hidden", "normed"] = "hidden",
) -> MtpConfig:
    """Layers like the target's last one, at the place that the kind asks for.

    Args:
        target: its config.
        depth: D.
        kind: see `MtpConfig`.
        shared: see `MtpConfig`.
        feature: None for the trunk's output (independent) or `normed` (sequential).
        draft_vocab: Vd, 0 for the target's whole vocabulary.
        feedback: see `MtpConfig`.
    """
    last = target.with_layers((target.num_layers - 1,))
    reduced: dict[str, Any] = {"head_size": draft_vocab, "tie_embeddings": False} if draft_vocab else {}
    place = target.num_layers - 1 if kind == "independent" else "normed"
    return MtpConfig(
        layer=dataclasses.replace(last, **reduced),
        depth=depth,
        kind=kind,
        shared=shared,
        feature=place if feature is None else feature,
        feedback=feedback,
    )


class MtpModule(nnx.Module):
    """One depth: a transformer layer and, in a sequential one, what joins hidden state and token before it."""

    def __init__(self, config: MtpConfig, *, rngs: nnx.Rngs):
        c = config.layer
        sequential = config.kind == "sequential"
        norm = functools.partial(RMSNorm, c.hidden_size, eps=c.norm_eps, offset=c.norm_offset, dtype=c.dtype)
        self.hidden_norm = norm() if sequential else None
        self.token_norm = norm() if sequential else None
        self.proj = Linear(2 * c.hidden_size, c.hidden_size, dtype=c.dtype, rngs=rngs) if sequential else None
        self.layer = DecoderLayer(c, rngs=rngs)
        self.norm = norm() if sequential else None

    def join(self, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
        """`[..., d]` of a hidden state and a token embedding each."""
        assert self.hidden_norm is not None and self.token_norm is not None and self.proj is not None
        return self.proj(jnp.concatenate([self.hidden_norm(hidden), self.token_norm(embedded)], axis=-1))


class Mtp(nnx.Module):
    """All depths. The head is the target's; its rows of a reduced draft vocabulary are `lm_head`, by reference."""

    def __init__(self, config: MtpConfig, *, rngs: nnx.Rngs):
        c = config.layer
        self.config = config
        self.heads = nnx.List([MtpModule(config, rngs=rngs) for _ in range(config.num_modules)])
        reduced = c.head_size != c.vocab_size
        self.lm_head = Linear(c.hidden_size, c.head_size, dtype=c.dtype, rngs=rngs) if reduced else None

    def module(self, k: int) -> MtpModule:
        """That of depth k = 1..D."""
        return self.heads[0 if self.config.shared else k - 1]

    def cached(
        self, k: int, hidden: jax.Array, embedded: jax.Array | None, cache: KVCache, view: View
    ) -> tuple[jax.Array, KVCache]:
        """Depth k over new positions.

        Args:
            k: 1..D.
            hidden: `[B, T, d]` of depth k - 1, or the feature where heads are independent.
            embedded: `[B, T, d]` token t + k at each position t (sequential only).
            cache: one layer a depth.
            view: what each position sees.

        Returns:
            What depth k + 1 reads (`MtpConfig.feedback`), and the cache.
        """
        layers, c = list(cache.layers), self.config.layer

        def attend(q: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            layers[k - 1] = write(layers[k - 1], key, value, view.start)
            return cached_attention(q, layers[k - 1], view, c.windows[0], c.attention_softcap)

        out = self._run(k, hidden, embedded, view.positions, attend)
        return out, dataclasses.replace(cache, layers=tuple(layers))

    def full(
        self,
        k: int,
        hidden: jax.Array,
        embedded: jax.Array | None,
        positions_bt: jax.Array,
        segments_bt: jax.Array,
    ) -> jax.Array:
        """Depth k over whole rows of documents, for training; arguments and `recomputed` as in `Decoder.full`."""
        c = self.config.layer
        mask = causal_mask(positions_bt, segments_bt, c.windows[0])

        def attend(q: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return full_attention(q, key, value, mask, c.attention_softcap)

        def depth(hidden: jax.Array, embedded: jax.Array | None, positions_bt: jax.Array) -> jax.Array:
            return self._run(k, hidden, embedded, positions_bt, attend)

        return recomputed(depth)(hidden, embedded, positions_bt)

    def normed(self, k: int, hidden: jax.Array, target: Decoder) -> jax.Array:
        """What the head reads at depth k, from what depth k + 1 reads."""
        own = self.module(k).norm
        if self.config.feedback == "normed":
            return hidden
        return target.final_norm(hidden) if own is None else own(hidden)

    def logits(self, normed: jax.Array, target: Decoder) -> jax.Array:
        """`[..., d]` to float32 `[..., Vd]`."""
        if self.lm_head is None:
            return target.logits(normed)
        out = self.lm_head(normed).astype(jnp.float32)
        cap = self.config.layer.final_softcap
        return cap * jnp.tanh(out / cap) if cap else out

    def _run(self, k: int, hidden: jax.Array, embedded: jax.Array | None, positions_bt: jax.Array, attend: Any) -> Any:
        module = self.module(k)
        x = hidden if embedded is None else module.join(hidden, embedded)
        out = module.layer(x, positions_bt, self.config.layer.ropes[0], attend)
        if self.config.feedback != "normed":
            return out
        assert module.norm is not None  # independent heads feed nothing back
        return module.norm(out)


@functools.cache
def mtp_graph(config: MtpConfig) -> tuple[nnx.GraphDef[Mtp], Any]:
    """The static graph and the abstract parameters."""
    return split(nnx.eval_shape(lambda: Mtp(config, rngs=nnx.Rngs(params=0))))


def init_mtp(config: MtpConfig, key: jax.Array) -> Any:
    """Random parameters, without the borrowed head rows."""
    params = split(Mtp(config, rngs=nnx.Rngs(params=key)))[1]
    return {"heads": params["heads"]}


def copy_last_layer(config: MtpConfig, params: Any, target_params: Any) -> Any:
    """Every transformer layer a copy of the target's last; joints pass the hidden state on and add the token's share.

    Args:
        config: of the layers, which have the target's shapes.
        params: random ones, `init_mtp`.
        target_params: the target's, in the plain layout.
    """
    layers = target_params["layers"]
    width = config.layer.hidden_size
    heads = {}
    for k, head in params["heads"].items():
        own = {**head, "layer": jax.tree.map(jnp.array, layers[max(layers)])}
        if config.kind == "sequential":
            kernel = head["proj"]["kernel"].at[:width].set(jnp.eye(width, dtype=config.layer.dtype))
            own |= {"proj": {"kernel": kernel}, "norm": jax.tree.map(jnp.array, target_params["final_norm"])}
        heads[k] = own
    return {**params, "heads": heads}


def init_mtp_cache(config: MtpConfig, depth: int, batch: int, capacity: int) -> KVCache:
    """An empty cache of one layer for each of the first `depth` depths."""
    return init_cache(config.layer.with_layers((0,) * depth), batch, capacity)
