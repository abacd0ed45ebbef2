"""Small targets for the drafters without a trained head, and the exact law of what they write."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.analysis import g_test, sequence_counts
from specjax.decoding import Drafter, Request, make_sampling
from specjax.models import ModelConfig, RopeConfig, graph, init_decoder, merge
from specjax.testing.contract import MakeRule, Subject

VOCAB = 13
FALSE_ALARM = 1e-6


def config(layers: int = 2, vocab: int = VOCAB) -> ModelConfig:
    """A Llama whose first layer has a sliding window."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        head_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=1 << 14,
        norm_eps=1e-5,
        query_scale=0.5,
        windows=(7, *[None] * (layers - 1)),
        ropes=(RopeConfig(),) * layers,
        tie_embeddings=True,
    )


def subject(drafter: Drafter, *, layers: int = 2, vocab: int = VOCAB, tables: Any = None) -> Subject:
    """A random target with peaked laws whose later layers change little, and the drafter; ids 2 and 5 end a text."""
    static = graph(config(layers, vocab))[0]
    params = jax.tree.map(
        lambda x: 2.5 * x if x.ndim > 1 else x, init_decoder(config(layers, vocab), jax.random.key(0))
    )
    for i in range(1, layers):
        params["layers"][i] = jax.tree.map(lambda x: x / 4 if x.ndim > 1 else x, params["layers"][i])
    own, made = drafter.init_params(jax.random.key(1), merge(static, params))
    return Subject(static, params, drafter, own, made if tables is None else tables, eos=(2, 5))


def exact_law(sub: Subject, prompt: tuple[int, ...], tokens: int) -> np.ndarray:
    """The joint law `[V ** tokens]` of what follows a prompt at temperature 1, from full passes over every text."""
    texts = np.array([(*prompt, *rest) for rest in itertools.product(range(sub.vocab), repeat=tokens)])
    positions = np.broadcast_to(np.arange(texts.shape[1]), texts.shape)

    @jax.jit
    def log_laws(params: Any, texts: jax.Array) -> jax.Array:
        out = merge(sub.graph, params).full(texts, positions, jnp.zeros_like(texts), taps=("normed",))
        return jax.nn.log_softmax(merge(sub.graph, params).logits(out.taps["normed"]), -1)

    laws = np.asarray(log_laws(sub.target, jnp.asarray(texts)), np.float64)
    last = len(prompt) - 1
    joint = [laws[:, last + i][np.arange(len(texts)), texts[:, last + 1 + i]] for i in range(tokens)]
    return np.exp(np.sum(joint, axis=0))


def law_p_value(sub: Subject, make_rule: MakeRule, *, prompt: tuple[int, ...], draws: int = 1 << 16) -> float:
    """p-value of a G-test of whole decodes of three tokens against the target's exact law."""
    tokens, batch, start = (
        3,
        1 << 11,
        len(prompt),
    )  # small batches: the caches of a large one do not fit the processor's
    loop, weights = dataclasses.replace(sub, eos=()).loop(make_rule)
    text = jnp.zeros((batch, 128), jnp.int32).at[:, :start].set(jnp.asarray(prompt))
    lengths = jnp.full((batch,), start, jnp.int32)
    sampling, base = make_sampling([1.0] * batch), jax.random.key(0)
    requests = jax.jit(jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(base, i))))
    counts, accepted = np.zeros(sub.vocab**tokens, np.int64), 0
    for first in range(0, draws, batch):
        keys = requests(first + jnp.arange(batch))
        state = loop.run(weights, loop.prefill(weights, text, lengths, lengths + tokens, sampling, keys), 1 << 30)
        counts += sequence_counts(np.asarray(state.tokens[:, start : start + tokens]), sub.vocab)
        accepted += int(np.asarray(state.statistics.accepted)[:, 1:].sum())
    assert accepted > 0, "nothing was accepted: the law proves nothing"
    law = exact_law(sub, prompt, tokens)
    return g_test(counts, law / law.sum()).p_value


def looping_requests(vocab: int = VOCAB) -> list[Request]:
    """Prompts that repeat themselves, with budgets long enough for drafts to be accepted."""
    return [Request(tuple((np.arange(n) % 5).tolist()), 60, id=n) for n in (20, 30, 40)]
