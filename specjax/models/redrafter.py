"""ReDrafter's network (Cheng et al. 2024, 2403.09919, section 3.1): a recurrent state beside the target's hidden one.

Drafting from a position, the state is s_0 = 0 and s_i = SiLU(W E(x_i) + U s_{i-1} + b), where x_1 is the token behind
the position and E the target's embedding. The token behind x_i is predicted by residual blocks over (h, s_i) and a
vocabulary product, h being the target's last hidden state after its final norm. One network serves every depth.

The product is a matrix of the network's own, as published, or the target's head rows of a reduced draft vocabulary
(`lm_head`, borrowed by reference) behind a linear map down to the target's width (`out`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.decoder import split
from specjax.models.linear import Linear
from specjax.models.medusa import ResidualBlock, capped


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedrafterConfig:
    """Shapes of the network for one target.

    Attributes:
        hidden_size: width d of the target.
        vocab_size: rows V of the target's vocabulary.
        head_size: rows Vd of the vocabulary product.
        exit_dim: width of the residual blocks; 2 d takes (h, s) as it is, another width maps it first.
        num_layers: residual blocks.
        recurrent: False leaves the matrices W and U out, so that the state is a sum of embeddings.
        own_head: a vocabulary matrix `[exit_dim, Vd]` of its own.
        final_softcap: tanh cap on logits, the target's where its head is shared; 0 for none.
        dtype: of the parameters.

    Raises:
        ValueError: a size below 1, or a draft vocabulary above the target's.
    """

    hidden_size: int
    vocab_size: int
    head_size: int
    exit_dim: int
    num_layers: int = 2
    recurrent: bool = True
    own_head: bool = False
    final_softcap: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "exit_dim", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected at least 1")
        if not 0 < self.head_size <= self.vocab_size:
            raise ValueError(f"head_size={self.head_size}: expected 1 to the target's {self.vocab_size}")


class Redrafter(nnx.Module):
    """One step of the recurrence, and what is read out of it. Holds no state."""

    def __init__(self, config: RedrafterConfig, *, rngs: nnx.Rngs):
        c = config
        linear = functools.partial(Linear, dtype=c.dtype, rngs=rngs)
        self.config = c
        self.rnn_w = linear(c.hidden_size, c.hidden_size) if c.recurrent else None
        self.rnn_u = linear(c.hidden_size, c.hidden_size, bias=True) if c.recurrent else None
        self.input_proj = linear(2 * c.hidden_size, c.exit_dim, bias=True) if c.exit_dim != 2 * c.hidden_size else None
        self.blocks = nnx.List(
            [ResidualBlock(c.exit_dim, bias=True, dtype=c.dtype, rngs=rngs) for _ in range(c.num_layers)]
        )
        self.out = None if c.own_head else linear(c.exit_dim, c.hidden_size)
        self.lm_head = linear(c.exit_dim if c.own_head else c.hidden_size, c.head_size)

    def advance(self, state: jax.Array, embedding: jax.Array) -> jax.Array:
        """The state `[..., d]` after one more token, whose embedding is `[..., d]`."""
        if self.rnn_w is None or self.rnn_u is None:
            return embedding + state
        return jax.nn.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def __call__(self, hidden: jax.Array, state: jax.Array) -> jax.Array:
        """The target's hidden state and the recurrent one, `[..., d]` each, to what the vocabulary product reads."""
        x = jnp.concatenate([hidden, state], axis=-1)
        x = x if self.input_proj is None else self.input_proj(x)
        for block in self.blocks:
            x = block(x)
        return x if self.out is None else self.out(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """What `__call__` gives to float32 `[..., Vd]`."""
        return capped(self.lm_head(x), self.config.final_softcap)


@functools.cache
def redrafter_graph(config: RedrafterConfig) -> tuple[nnx.GraphDef[Redrafter], Any]:
    """The static graph and the parameter tree as `ShapeDtypeStruct`s, `lm_head` included, without allocating."""
    return split(nnx.eval_shape(lambda: Redrafter(config, rngs=nnx.Rngs(0))))


def init_redrafter(config: RedrafterConfig, key: jax.Array) -> Any:
    """Parameters to start training from, without `lm_head`: the network says what the target says.

    The residual blocks are zero and what leads around them passes the hidden state; only the recurrence is random.
    """
    params = split(Redrafter(config, rngs=nnx.Rngs(params=key)))[1]
    params = {name: group for name, group in params.items() if name != "lm_head"}
    params["blocks"] = jax.tree.map(jnp.zeros_like, params["blocks"])
    for name in ("input_proj", "out"):
        if name in params:
            inputs, outputs = params[name]["kernel"].shape
            params[name]["kernel"] = jnp.eye(inputs, outputs, dtype=config.dtype)
    return params
