"""The one seam through which every weight matrix is applied, whatever its layout in memory.

Two layouts exist, told apart by rank. `plain` is `[in, out]`, what training, prefill and accelerators use.
`blocked` is `[out / BLOCK, in, BLOCK]`, zero padded: on CPUs a skinny product (a few rows) then streams the
weight once, front to back. Layouts are data, not modes: `pack` changes a parameter tree, the networks do not know.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

BLOCK = 64
# Above this many rows a plain product beats the blocked one (measured by experiments.profile_pass).
BLOCKED_ROWS = 8


def block(kernel_io: jax.Array) -> jax.Array:
    """Lays `[in, out]` out as `[ceil(out / BLOCK), in, BLOCK]`, zero padded."""
    rows, out = kernel_io.shape
    blocks = -(-out // BLOCK)
    padded = jnp.pad(kernel_io, ((0, 0), (0, blocks * BLOCK - out)))
    return padded.reshape(rows, blocks, BLOCK).transpose(1, 0, 2)


def unblock(kernel_nib: jax.Array, out: int) -> jax.Array:
    """Undoes `block`: `[blocks, in, BLOCK]` to `[in, out]`."""
    blocks, rows, width = kernel_nib.shape
    return kernel_nib.transpose(1, 0, 2).reshape(rows, blocks * width)[:, :out]


def linear(x: jax.Array, kernel: jax.Array, out: int) -> jax.Array:
    """Applies a weight to the last axis of `x`.

    Args:
        x: `[..., in]`.
        kernel: `[in, out]`, or blocked `[blocks, in, BLOCK]`.
        out: number of outputs; the padding of a blocked kernel is cut to it.

    Returns:
        `[..., out]` in the dtype of `x`; products accumulate in float32.
    """
    lead, rows = x.shape[:-1], x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    if kernel.ndim == 3 and rows > BLOCKED_ROWS:
        kernel = unblock(kernel, out)
    if kernel.ndim == 2:
        y = jnp.dot(flat, kernel, preferred_element_type=jnp.float32)
    else:
        # Without the explicit broadcast XLA:CPU takes a path three times slower.
        spread = jnp.broadcast_to(flat, (kernel.shape[0], *flat.shape))
        y = jnp.einsum("nri,nio->rno", spread, kernel, preferred_element_type=jnp.float32)
        y = y.reshape(rows, -1)[:, :out]
    return y.astype(x.dtype).reshape(*lead, out)


class Linear(nnx.Module):
    """A dense layer: `kernel` [in, out] (or blocked), optional `bias` [out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype: str, rngs: nnx.Rngs):
        scale = inputs**-0.5
        kernel = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * scale
        self.outputs = outputs
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in]` to `[..., out]`."""
        y = linear(x, self.kernel[...], self.outputs)
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token embeddings `[vocab, d]` (or blocked `[vocab / BLOCK, d, BLOCK]`), usable as a tied head."""

    def __init__(self, vocab: int, width: int, *, dtype: str, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab, width), jnp.float32) * width**-0.5
        self.vocab = vocab
        self.embedding = nnx.Param(table.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids `[...]` to `[..., d]`."""
        table = self.embedding[...]
        if table.ndim == 2:
            return table[tokens]
        return table[tokens // BLOCK, :, tokens % BLOCK]

    def attend(self, x: jax.Array) -> jax.Array:
        """`[..., d]` to `[..., vocab]`: the tied head."""
        table = self.embedding[...]
        return linear(x, table.T if table.ndim == 2 else table, self.vocab)


def pack(params: Any) -> Any:
    """Lays every weight matrix of a parameter tree out in blocks, for decoding few rows on a CPU."""

    def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "kernel" and x.ndim == 2:
            return block(x)
        if name == "embedding" and x.ndim == 2:
            return block(x.T)
        return x

    return jax.tree_util.tree_map_with_path(leaf, params)
