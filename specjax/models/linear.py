"""The one seam through which every weight matrix is applied, whatever its layout in memory.

Two layouts exist, told apart by rank. `plain` is `[in, out]` (an embedding `[vocab, d]`): training, prefill on
accelerators, all decoding there. `packed` is `[1, out, in]` (an embedding `[1, vocab, d]`), for decoding on a CPU: a
product of a few rows then streams the weight once, through a native kernel where a C++ compiler is at hand. Layouts
are data, not modes: `pack` changes a parameter tree, the networks do not know.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models import native
from specjax.parallel import whole_vectors

# Above this many rows XLA's product beats the native one (experiments.profile_pass shows where they cross).
NATIVE_ROWS = 32


def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Applies a weight to the last axis of `x`.

    Args:
        x: `[..., in]`.
        kernel: `[in, out]`, or packed `[1, out, in]`.

    Returns:
        `[..., out]` in the dtype of `x`; products accumulate in float32.
    """
    if kernel.ndim == 2:
        return jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    kernel_oi = kernel[0]
    native_fits = x.dtype == kernel.dtype == jnp.float32 and flat.shape[0] <= NATIVE_ROWS
    if native_fits and native.available():
        y = jax.lax.platform_dependent(flat, kernel_oi, cpu=native.skinny_matmul, default=_transposed)
    else:
        y = _transposed(flat, kernel_oi)
    return y.astype(x.dtype).reshape(*x.shape[:-1], kernel_oi.shape[0])


def _transposed(x: jax.Array, kernel_oi: jax.Array) -> jax.Array:
    return jnp.einsum("ri,oi->ro", x, kernel_oi, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """A dense layer: `kernel` [in, out] (or packed), optional `bias` [out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, dtype: str, rngs: nnx.Rngs):
        scale = inputs**-0.5
        kernel = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * scale
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in]` to `[..., out]`."""
        y = linear(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token embeddings `[vocab, d]` (or packed `[1, vocab, d]`), usable as a tied head."""

    def __init__(self, vocab: int, width: int, *, dtype: str, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab, width), jnp.float32) * width**-0.5
        self.embedding = nnx.Param(table.astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids `[...]` to `[..., d]`."""
        table = whole_vectors(self.embedding[...])
        return table[tokens] if table.ndim == 2 else table[0, tokens]

    def attend(self, x: jax.Array) -> jax.Array:
        """`[..., d]` to `[..., vocab]`: the tied head."""
        table = self.embedding[...]
        return linear(x, table.T if table.ndim == 2 else table)


def pack(params: Any) -> Any:
    """Packs every weight matrix of a parameter tree, for decoding a few rows at a time on a CPU."""

    def leaf(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "kernel" and x.ndim == 2:
            return x.T[None]
        if name == "embedding" and x.ndim == 2:
            return x[None]
        return x

    return jax.tree_util.tree_map_with_path(leaf, params)
