"""A target whose law is known exactly: the next token depends on the last one, through a table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import ModelConfig, graph
from specjax.models.decoder import init_decoder


def markov_config(vocab: int) -> ModelConfig:
    """One layer over one-hot embeddings, the head untied."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        head_size=vocab,
        hidden_size=vocab,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position=1 << 16,
        norm_eps=1e-12,
        query_scale=1.0,
        windows=(None,),
        ropes=(None,),
    )


def markov_params(law_vv: np.ndarray) -> Any:
    """Parameters of a `Decoder` (see `markov_config`) with P(next = j | last = i) = law[i, j].

    Embeddings are one-hot, the layer adds nothing, and the head holds the log-probabilities: a real decoder, so a
    real loop, with a law to hold its output against.
    """
    vocab = law_vv.shape[0]
    params = jax.tree.map(jnp.zeros_like, init_decoder(markov_config(vocab), jax.random.key(0)))
    params["embed"]["embedding"] = jnp.eye(vocab)
    params["final_norm"]["weight"] = jnp.ones((vocab,))
    # The norm scales a one-hot vector by sqrt(vocab).
    params["lm_head"]["kernel"] = jnp.asarray(np.log(np.maximum(law_vv, 1e-30)) / np.sqrt(vocab), jnp.float32)
    for norm in ("attn_norm", "mlp_norm"):
        params["layers"][0][norm]["weight"] = jnp.ones((vocab,))
    return params


def markov_graph(vocab: int) -> Any:
    """The static graph that goes with `markov_params`."""
    return graph(markov_config(vocab))[0]


def random_law(vocab: int, seed: int, sharpness: float = 2.0) -> np.ndarray:
    """A random table of next-token laws `[V, V]`, peaked as language is."""
    logits = np.random.default_rng(seed).normal(size=(vocab, vocab)) * sharpness
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def sequence_law(law_vv: np.ndarray, last: int, length: int) -> np.ndarray:
    """The joint law `[V ** length]` of the next tokens behind `last`, in `sequence_counts` order."""
    joint = law_vv[last]
    for _ in range(length - 1):
        vocab = law_vv.shape[0]
        joint = (joint.reshape(-1, vocab)[:, :, None] * law_vv[None]).reshape(-1)
    return joint
