"""What the target says along a finished text: entropies of its laws, logits at a position, greedy comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.analysis import GreedyComparison, compare_greedy
from specjax.decoding.generate import BUCKET
from specjax.models import Decoder, KVCache, causal_view, init_cache, merge
from specjax.parallel import to_host

# How far rounding may move the difference of two logits: between passes of different width, by dtype of the model.
# Logits of language models lie within some tens; float32 passes differ by about 1e-5 of them, bfloat16 by 1e-2.
ROUNDING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# Products in bfloat16 or TF32 passes, which accelerators use for float32 unless told otherwise.
LOW_PRECISION = 0.5


def rounding_bound(dtype: str, precision: str, given: float = 0.0) -> float:
    """The stated bound below which a gap between two logits is a near-tie.

    Args:
        dtype: of the target's parameters.
        precision: `float32` for full products, `default` for the platform's.
        given: by the user; 0 for the one that dtype and precision call for.

    Raises:
        ValueError: `given` is negative or no number.
    """
    if not 0 <= given < math.inf:
        raise ValueError(f"near_tie_bound={given}; expected a gap of two logits, or 0 for the dtype's own")
    if given:
        return given
    full = precision == "float32" or jax.default_backend() == "cpu"
    return ROUNDING[dtype] if full else max(ROUNDING[dtype], LOW_PRECISION)


@partial(jax.jit, static_argnames=("graph", "chunk", "precision"))
def score_text(
    graph: nnx.GraphDef[Decoder],
    chunk: int,
    precision: str,
    params: Any,
    tokens_l: jax.Array,
    length: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs one text through the target in chunks.

    Args:
        graph: the target's.
        chunk: tokens a pass.
        precision: of matrix products.
        params: the target's.
        tokens_l: `[L]` int32, L a multiple of the chunk.
        length: int32, valid tokens.
        position: int32, whose logits to return.

    Returns:
        Of the untempered law behind each token the entropy in nats and the largest probability, `[2, L]`; the logits
        `[V]` behind `position`.
    """
    with jax.default_matmul_precision(precision):
        target = merge(graph, params)
        cache = init_cache(target.config, 1, tokens_l.shape[0])

        def body(c: jax.Array, carry: tuple[KVCache, jax.Array, jax.Array]) -> tuple[KVCache, jax.Array, jax.Array]:
            cache, found, picked = carry
            piece = jax.lax.dynamic_slice_in_dim(tokens_l, c * chunk, chunk)[None]
            view = causal_view(jnp.full((1,), c * chunk, jnp.int32), chunk)
            out, cache = target.cached(piece, cache, view, taps=("normed",))
            logits = target.logits(out.taps["normed"])[0]
            law = jax.nn.log_softmax(logits)
            both = jnp.stack([-jnp.sum(jnp.exp(law) * law, axis=-1), jnp.exp(jnp.max(law, axis=-1))])
            here = position - c * chunk
            row = logits[jnp.clip(here, 0, chunk - 1)]
            picked = jnp.where((here >= 0) & (here < chunk), row, picked)
            return cache, jax.lax.dynamic_update_slice(found, both, (0, c * chunk)), picked

        init = (cache, jnp.zeros((2, *tokens_l.shape)), jnp.zeros((target.config.head_size,)))
        chunks = (length + chunk - 1) // chunk
        return jax.lax.fori_loop(0, chunks, body, init)[1:]


class Teacher:
    """Scores finished texts by a target, with one program a buffer length; each text is run once."""

    def __init__(self, graph: nnx.GraphDef[Decoder], params: Any, *, precision: str, chunk: int = 64, buffer: int = 0):
        """Compiles nothing yet.

        Args:
            graph: the target's.
            params: its parameters, in any layout.
            precision: of matrix products.
            chunk: tokens a pass.
            buffer: shortest token buffer; longer texts get whole buckets.
        """
        self._graph, self._params, self._precision, self._chunk = graph, params, precision, chunk
        self._buffer = buffer
        self._means: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}

    def entropy(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Mean entropy in nats of the target's laws, untempered, at the emitted positions."""
        return self._mean(prompt, tokens)[0]

    def top1(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Mean probability of the target's likeliest token, untempered, at the emitted positions: how peaked it is."""
        return self._mean(prompt, tokens)[1]

    def logits(self, prompt: Sequence[int], tokens: Sequence[int], position: int) -> np.ndarray:
        """The logits `[V]` that choose the emitted token at `position` (0 is the first one)."""
        return self._score([*prompt, *tokens], len(prompt) + position - 1)[1]

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        baseline: Sequence[Sequence[int]],
        other: Sequence[Sequence[int]],
        bound: float,
    ) -> GreedyComparison:
        """Greedy texts against the baseline's, near-ties apart.

        Args:
            prompts: token ids that both continued.
            baseline: what plain decoding emitted for each.
            other: what the method under test emitted.
            bound: see `rounding_bound`.
        """
        return compare_greedy(
            [np.asarray(t) for t in baseline],
            [np.asarray(t) for t in other],
            lambda row, position: self.logits(prompts[row], baseline[row], position),
            bound,
        )

    def _mean(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[float, float]:
        """Entropy and largest probability over the emitted positions; each text is run once."""
        key = tuple(prompt), tuple(tokens)
        if key not in self._means:
            found, _ = self._score([*prompt, *tokens], 0)
            entropy, top1 = found[:, len(prompt) - 1 : len(prompt) + len(tokens) - 1].mean(axis=1)
            self._means[key] = float(entropy), float(top1)
        return self._means[key]

    def _score(self, text: Sequence[int], position: int) -> tuple[np.ndarray, np.ndarray]:
        buffer = max(self._buffer, -(-len(text) // BUCKET) * BUCKET)
        tokens = np.zeros((buffer,), np.int32)
        tokens[: len(text)] = text
        found, logits = score_text(
            self._graph,
            self._chunk,
            self._precision,
            self._params,
            jnp.asarray(tokens),
            jnp.int32(len(text)),
            jnp.int32(position),
        )
        return to_host((found, logits))
