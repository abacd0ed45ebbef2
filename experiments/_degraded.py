"""Drafts made worse on purpose, and how fluent a draft is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.build import Drafting, make_drafter
from specjax.decoding import Loop, Weights
from specjax.drafting import DraftModel
from specjax.models import Target, causal_view, init_cache, merge
from specjax.testing import with_noise

# What a draft shares with its target; noise there would be the target's.
SHARED = ("embed", "lm_head")


def noisy_draft_model(target: Target, source: str, noise: float, num_nodes: int = 4, seed: int = 1) -> Drafting:
    """A draft model with noise on the matrices of its layers.

    Args:
        target: what it drafts for.
        source: as `draft_model` takes it.
        noise: standard deviation of the noise over that of each matrix.
        num_nodes: gamma.
        seed: of the noise.
    """
    if noise < 0:
        raise ValueError(f"noise={noise}; expected a number of at least 0")
    made = make_drafter("draft_model", target, source=source, num_nodes=num_nodes)
    own = {name: group for name, group in made.params.items() if name not in SHARED}
    return dataclasses.replace(made, params={**made.params, **with_noise(own, noise, seed)})


@dataclasses.dataclass(frozen=True)
class Fluency:
    """What a draft says of texts.

    Attributes:
        perplexity: of the tokens that are in its vocabulary.
        coverage: share of tokens that are.
    """

    perplexity: float
    coverage: float


def fluency(loop: Loop, weights: Weights, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Fluency:
    """Perplexity of a draft model on texts, by itself: no target pass, no temperature.

    Args:
        loop: whose drafter is a `DraftModel`.
        weights: its arrays.
        texts: prompts, which are read, and the tokens behind them, which are scored.
    """
    longest = max(len(prompt) + len(tokens) for prompt, tokens in texts)
    width = -(-longest // loop.chunk) * loop.chunk
    vocab = np.asarray(weights.tables["vocab"]) if "vocab" in weights.tables else None
    losses, count = [], 0
    for prompt, tokens in texts:
        count += len(tokens)
        whole = np.zeros(width, np.int32)
        whole[: len(prompt) + len(tokens)] = [*prompt, *tokens]
        law_lv = np.asarray(_laws(loop, weights, jnp.asarray(whole)))
        rows = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        ids, known = np.asarray(tokens), np.ones(len(tokens), bool)
        if vocab is not None:
            places = np.searchsorted(vocab, ids).clip(max=len(vocab) - 1)
            known, ids = vocab[places] == ids, places
        losses.append(-law_lv[rows[known], ids[known]])
    scored = np.concatenate(losses)
    if not scored.size:
        raise ValueError("the draft's vocabulary holds none of the texts' tokens: it belongs to another target")
    return Fluency(float(np.exp(scored.mean())), scored.size / count)


@partial(jax.jit, static_argnames=("loop",))
def _laws(loop: Loop, weights: Weights, tokens_l: jax.Array) -> jax.Array:
    """The draft's log-law `[L, Vd]` behind each token."""
    drafter = loop.drafter
    assert isinstance(drafter, DraftModel)
    with jax.default_matmul_precision(loop.precision):
        network = drafter.network(weights.drafter, merge(loop.graph, weights.target))
        cache = init_cache(drafter.config, 1, tokens_l.shape[0])
        view = causal_view(jnp.zeros((1,), jnp.int32), tokens_l.shape[0])
        out, _ = network.cached(tokens_l[None], cache, view, taps=("normed",))
        return jax.nn.log_softmax(network.logits(out.taps["normed"])[0].astype(jnp.float32))
