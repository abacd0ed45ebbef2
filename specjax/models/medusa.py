"""Heads beside the target's own: Medusa (Cai et al. 2024) and Hydra (Ankner et al. 2024).

Head i at position t predicts token t + 2 + i from the target's last hidden state after its final norm: the target's
own head already predicts token t + 1. A head is a few residual blocks and a vocabulary product. The product is the
target's own, with the rows of a reduced draft vocabulary (`lm_head`, borrowed by reference), or, as published, a matrix
for each head (`heads/<i>/lm_head`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import View, cached_attention, causal_mask, full_attention
from specjax.models.cache import KVCache, LayerCache, write
from specjax.models.config import ModelConfig
from specjax.models.decoder import DecoderLayer, RMSNorm, split
from specjax.models.linear import Linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shapes of the Medusa heads of one target.

    Attributes:
        hidden_size: width d of the target.
        vocab_size: rows V of the target's vocabulary.
        head_size: rows Vd of the vocabulary product.
        num_heads: K.
        num_layers: residual blocks a head.
        own_head: every head has a vocabulary matrix of its own.
        bias: the residual blocks have one.
        final_softcap: tanh cap on logits, the target's where its head is shared; 0 for none.
        ranks: columns of `tables["accuracy"]`; 0 where the heads are not calibrated.
        dtype: of the parameters.
    """

    hidden_size: int
    vocab_size: int
    head_size: int
    num_heads: int = 4
    num_layers: int = 1
    own_head: bool = False
    bias: bool = True
    final_softcap: float = 0.0
    ranks: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """Shapes of the Hydra heads of one target.

    Attributes:
        hidden_size: as in `MedusaConfig`, and so all that have the same name.
        vocab_size: see there.
        head_size: see there.
        num_heads: see there.
        num_layers: see there; the first block reads hidden state and embeddings, the others are Medusa's.
        own_head: see there; a head of its own has a bias.
        embed_rank: the embeddings are first mapped to this width, by one matrix for all heads; 0 takes them whole, as
            published.
        residual: what the first block adds to: `linear`, a linear map of all that it reads, as published; `hidden`, the
            hidden state, which costs no parameters.
        prefix: Hydra++: a layer that first runs over the hidden states, its shapes those of a model of one layer; or
            None.
        final_softcap: see there.
        ranks: see there.
        dtype: see there.
    """

    hidden_size: int
    vocab_size: int
    head_size: int
    num_heads: int = 4
    num_layers: int = 1
    own_head: bool = False
    embed_rank: int = 0
    residual: str = "linear"
    prefix: ModelConfig | None = None
    final_softcap: float = 0.0
    ranks: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_heads(self)
        if self.residual not in ("linear", "hidden"):
            raise ValueError(f"residual={self.residual!r}; expected 'linear' or 'hidden'")
        if self.embed_rank < 0:
            raise ValueError(f"embed_rank={self.embed_rank}; expected a width, or 0 for whole embeddings")
        if self.prefix is not None and (self.prefix.num_layers, self.prefix.hidden_size) != (1, self.hidden_size):
            found = f"{self.prefix.num_layers} layers of width {self.prefix.hidden_size}"
            raise ValueError(f"prefix has {found}; expected 1 layer of width {self.hidden_size}")

    @property
    def embed_width(self) -> int:
        """Width of an embedding as the heads read it."""
        return self.embed_rank or self.hidden_size


HeadsConfig = MedusaConfig | HydraConfig


def check_heads(config: HeadsConfig) -> None:
    """Checks what both configs share.

    Raises:
        ValueError: a size below 1, or a draft vocabulary above the target's.
    """
    for name in ("num_heads", "num_layers"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}; expected at least 1")
    if not 0 < config.head_size <= config.vocab_size:
        raise ValueError(f"head_size={config.head_size}: expected 1 to the target's {config.vocab_size}")


class ResidualBlock(nnx.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int, *, bias: bool, dtype: str, rngs: nnx.Rngs):
        self.linear = Linear(width, width, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., d]` to `[..., d]`."""
        return x + jax.nn.silu(self.linear(x))


class GroundedBlock(nnx.Module):
    """R c + SiLU(W c + b), with c the hidden state followed by the embeddings, or h + SiLU(W c + b)."""

    def __init__(self, config: HydraConfig, embeddings: int, *, rngs: nnx.Rngs):
        width = config.hidden_size + embeddings * config.embed_width
        linear = functools.partial(Linear, width, config.hidden_size, bias=True, dtype=config.dtype, rngs=rngs)
        self.width = config.hidden_size
        self.linear = linear()
        self.residual = linear() if config.residual == "linear" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., d + embeddings * width]` to `[..., d]`."""
        kept = x[..., : self.width] if self.residual is None else self.residual(x)
        return kept + jax.nn.silu(self.linear(x))


class MedusaHead(nnx.Module):
    """One head: residual blocks, and its vocabulary matrix if it has one."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs):
        c = config
        self.blocks = nnx.List(
            [ResidualBlock(c.hidden_size, bias=c.bias, dtype=c.dtype, rngs=rngs) for _ in range(c.num_layers)]
        )
        self.lm_head = _own_head(c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., d]` to `[..., d]`."""
        for block in self.blocks:
            x = block(x)
        return x


class MedusaHeads(nnx.Module):
    """K heads that do not see each other."""

    def __init__(self, config: MedusaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.heads = nnx.List([MedusaHead(config, rngs=rngs) for _ in range(config.num_heads)])
        self.lm_head = _shared_head(config, rngs)

    def __call__(self, hidden: jax.Array, count: int | None = None) -> jax.Array:
        """`[..., d]` to `[..., K, d]`, what the first `count` heads (all by default) give to the vocabulary product."""
        return jnp.stack([head(hidden) for head in self.heads[:count]], axis=-2)

    def logits(self, x: jax.Array) -> jax.Array:
        """`[..., K, d]` to float32 `[..., K, Vd]`."""
        if self.lm_head is not None:
            return capped(self.lm_head(x), self.config.final_softcap)
        each = [_product(head.lm_head, x[..., i, :]) for i, head in enumerate(self.heads[: x.shape[-2]])]
        return capped(jnp.stack(each, axis=-2), self.config.final_softcap)


class PrefixLayer(nnx.Module):
    """Hydra++'s own view of the text: one decoder layer and norm over the target's hidden states."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.layer = DecoderLayer(c, rngs=rngs)
        self.norm = RMSNorm(c.hidden_size, eps=c.norm_eps, offset=c.norm_offset, dtype=c.dtype)

    def full(self, hidden_btd: jax.Array, positions_bt: jax.Array, segments_bt: jax.Array) -> jax.Array:
        """`[B, T, d]` over whole documents, for training."""
        mask = causal_mask(positions_bt, segments_bt, self.config.windows[0])

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return full_attention(q, k, v, mask, self.config.attention_softcap)

        return self.norm(self.layer(hidden_btd, positions_bt, self.config.ropes[0], attend))

    def cached(self, hidden_btd: jax.Array, cache: KVCache, view: View) -> tuple[jax.Array, KVCache]:
        """`[B, T, d]` over new positions, written to the layer's own cache."""
        written: list[LayerCache] = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            written.append(write(cache.layers[0], k, v, view.start))
            return cached_attention(q, written[0], view, self.config.windows[0], self.config.attention_softcap)

        out = self.norm(self.layer(hidden_btd, view.positions, self.config.ropes[0], attend))
        return out, dataclasses.replace(cache, layers=tuple(written))


class HydraHead(nnx.Module):
    """One head: a block that reads hidden state and embeddings, then residual blocks."""

    def __init__(self, config: HydraConfig, index: int, *, rngs: nnx.Rngs):
        c = config
        self.grounded = GroundedBlock(c, index + 1, rngs=rngs)
        self.blocks = nnx.List(
            [ResidualBlock(c.hidden_size, bias=True, dtype=c.dtype, rngs=rngs) for _ in range(c.num_layers - 1)]
        )
        self.lm_head = _own_head(c, bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., d + (i + 1) * width]` to `[..., d]`."""
        x = self.grounded(x)
        for block in self.blocks:
            x = block(x)
        return x


class HydraHeads(nnx.Module):
    """K heads in sequence: head i also reads the embeddings of tokens t + 1 to t + 1 + i."""

    def __init__(self, config: HydraConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.prefix = PrefixLayer(c.prefix, rngs=rngs) if c.prefix is not None else None
        self.embed_in = Linear(c.hidden_size, c.embed_rank, dtype=c.dtype, rngs=rngs) if c.embed_rank else None
        self.heads = nnx.List([HydraHead(c, i, rngs=rngs) for i in range(c.num_heads)])
        self.lm_head = _shared_head(c, rngs)

    def read(self, embeddings: jax.Array) -> jax.Array:
        """Token embeddings `[..., d]` as the heads take them `[..., width]`."""
        return embeddings if self.embed_in is None else self.embed_in(embeddings)

    def __call__(self, index: int, x: jax.Array) -> jax.Array:
        """Head `index`: hidden state and embeddings side by side to `[..., d]`."""
        return self.heads[index](x)

    def logits(self, index: int, x: jax.Array) -> jax.Array:
        """`[..., d]` of head `index` to float32 `[..., Vd]`."""
        head = self.heads[index].lm_head if self.lm_head is None else self.lm_head
        return capped(_product(head, x), self.config.final_softcap)


@functools.cache
def heads_graph(config: HeadsConfig) -> tuple[nnx.GraphDef[Any], Any]:
    """The static graph of the heads and their parameter tree as `ShapeDtypeStruct`s, without allocating."""
    module = MedusaHeads if isinstance(config, MedusaConfig) else HydraHeads
    return split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))  # type: ignore[arg-type]


def init_heads(config: HeadsConfig, key: jax.Array) -> Any:
    """Parameters to start training from, vocabulary matrices not among them: the heads say what the target says.

    The residual blocks are zero, so that hidden states pass unchanged; only the map of the embeddings is random, and
    the inner matrices of a prefix layer, which adds nothing to what passes but is normed.
    """
    abstract = heads_graph(config)[1]
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _without_vocabulary(abstract))
    if isinstance(config, HydraConfig):
        if config.prefix is not None:
            prefix = split(PrefixLayer(config.prefix, rngs=nnx.Rngs(params=key)))[1]
            for part in (prefix["layer"]["attn"]["o"], prefix["layer"]["mlp"]["down"]):
                part["kernel"] = jnp.zeros_like(part["kernel"])
            params["prefix"] = prefix
        if config.embed_rank:
            kernel = params["embed_in"]["kernel"]
            drawn = jax.random.normal(key, kernel.shape) * config.hidden_size**-0.5
            params["embed_in"]["kernel"] = drawn.astype(kernel.dtype)
        if config.residual == "linear":
            for head in params["heads"].values():
                inputs, outputs = head["grounded"]["residual"]["kernel"].shape
                head["grounded"]["residual"]["kernel"] = jnp.eye(inputs, outputs, dtype=config.dtype)
    return params


def _without_vocabulary(params: Any) -> Any:
    heads = {i: {name: part for name, part in head.items() if name != "lm_head"} for i, head in params["heads"].items()}
    return {name: part for name, part in params.items() if name not in ("lm_head", "heads")} | {"heads": heads}


def _own_head(config: HeadsConfig, *, bias: bool, rngs: nnx.Rngs) -> Linear | None:
    if not config.own_head:
        return None
    return Linear(config.hidden_size, config.head_size, bias=bias, dtype=config.dtype, rngs=rngs)


def _shared_head(config: HeadsConfig, rngs: nnx.Rngs) -> Linear | None:
    if config.own_head:
        return None
    return Linear(config.hidden_size, config.head_size, dtype=config.dtype, rngs=rngs)


def _product(head: Linear | None, x: jax.Array) -> jax.Array:
    assert head is not None, "heads have a vocabulary matrix, or share one"
    return head(x)


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """Float32 logits under a tanh cap, 0 for none."""
    logits = logits.astype(jnp.float32)
    return cap * jnp.tanh(logits / cap) if cap else logits
