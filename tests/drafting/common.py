"""Small targets for the drafters without a trained head, and the exact law of what they write."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from specjax.decoding import Drafter, Request
from specjax.models import ModelConfig, RopeConfig, graph, init_decoder, merge
from specjax.testing.decode_law import g_test_of_decodes
from specjax.testing.subject import MakeRule, Subject

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


def law_p_value(sub: Subject, make_rule: MakeRule, *, prompt: tuple[int, ...], draws: int = 1 << 16) -> float:
    """p-value of a G-test of decodes of three tokens against the target's exact law at temperature 1."""
    return g_test_of_decodes(sub, make_rule, prompt=prompt, draws=draws, temperature=1.0).p_value


def looping_requests(vocab: int = VOCAB) -> list[Request]:
    """Prompts that repeat themselves, with budgets long enough for drafts to be accepted."""
    return [Request(tuple((np.arange(n) % 5).tolist()), 60, id=n) for n in (20, 30, 40)]
