"""Laws of whole sequences: a target with four tokens, what it says about the next three, and what a loop draws.

Sixty-four sequences are few enough to state the law of each, and many enough for a draft to be accepted, rejected and
followed by another step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.analysis import Certificate, sequence_counts
from specjax.checkpoints.vocabularies import CONTROL, NORMAL, byte_level_bpe
from specjax.decoding import Loop, Request, Weights
from specjax.evaluation.certify import Claim, continuations, sequence_certificate
from specjax.evaluation.next_law import next_law
from specjax.evaluation.teacher import Teacher
from specjax.models import ModelConfig, RopeConfig, Target, graph, init_decoder
from specjax.models.target import config_hash
from specjax.models.tokenizer import Tokenizer
from specjax.testing.markov import markov_config, markov_params, random_law

LETTERS = 4
TOKENS = 3
# Every pair of tokens once, and the first again, so that a look-up finds what followed it.
PROMPT = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)
ROWS = 1 << 9  # more fall out of a core's cache
CHUNK = 32  # Short prefill chunks keep the token buffer, and with it every cache, short.


def four_token_target(*, layers: int = 2, seed: int = 0) -> Target:
    """A random Llama over four tokens whose laws depend on the whole context.

    Args:
        layers: transformer layers.
        seed: of the weights.
    """
    config = ModelConfig(
        family="llama",
        vocab_size=LETTERS,
        head_size=LETTERS,
        hidden_size=16,
        intermediate_size=16,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=1 << 12,
        norm_eps=1e-5,
        query_scale=0.5,
        windows=(None,) * layers,
        ropes=(RopeConfig(),) * layers,
    )
    params = jax.tree.map(lambda x: 2 * x if x.ndim == 2 else x, init_decoder(config, jax.random.key(seed)))
    return _target("four tokens", config, params)


def mild_law() -> np.ndarray:
    """A random table of next-token laws `[4, 4]` in which no token is rare."""
    return random_law(LETTERS, 0, sharpness=1.0)


def markov_target(law_vv: np.ndarray | None = None) -> Target:
    """A target over four tokens whose law depends on the last one alone; in it all 64 sequences are likely enough.

    Args:
        law_vv: P(next = j | last = i), `mild_law` by default.
    """
    law_vv = mild_law() if law_vv is None else law_vv
    return _target("markov", markov_config(LETTERS), markov_params(law_vv))


def _target(name: str, config: ModelConfig, params: Any) -> Target:
    backend = byte_level_bpe("gpt-2", ["<|end|>", "a", "b", "c"], [CONTROL, NORMAL, NORMAL, NORMAL], [])
    return Target(
        config=config,
        graph=graph(config)[0],
        params=params,
        tokenizer=Tokenizer(backend=backend, eos_ids=(), bos_id=None, pad_id=None, chat_template=None),
        name=name,
        config_hash=config_hash(config),
        eos_ids=(),
        context=config.max_position,
    )


def sequence_law(teacher: Teacher, request: Request, context: Sequence[int], tokens: int = TOKENS) -> np.ndarray:
    """The law `[V ** tokens]` of the next tokens, from the target's own logits behind each prefix.

    Args:
        teacher: the target.
        request: prompt and sampling parameters.
        context: the prompt's token ids, then what was emitted.
        tokens: length of the sequences.
    """
    law_v = next_law(teacher, request, context)
    if tokens == 1:
        return law_v
    behind = [sequence_law(teacher, request, (*context, token), tokens - 1) for token in range(law_v.size)]
    return np.concatenate([chance * law for chance, law in zip(law_v, behind, strict=True)])


def certify_sequences(
    claim: Claim,
    target: Target,
    loop: Loop,
    weights: Weights,
    *,
    sampling: Mapping[str, Any],
    draws: int,
    tv: float,
    rows: int = ROWS,
    seed: int = 0,
) -> Certificate:
    """Certifies that sequences drawn in the loop have the law that the target states.

    Args:
        claim: what is certified.
        target: of few tokens (see `four_token_target` and `markov_target`).
        loop: what decodes.
        weights: its parameters.
        sampling: fields of a `Request`.
        draws: sequences.
        tv: total variation against which the power is stated.
        rows: sequences in a batch.
        seed: of all draws.
    """
    loop = dataclasses.replace(loop, chunk=CHUNK)
    request = Request(PROMPT, TOKENS + 1, **sampling)
    buffer = -(-(len(PROMPT) + TOKENS + loop.drafter.depth + 2) // CHUNK) * CHUNK
    rows = min(rows, draws)
    found = continuations(
        target, loop, weights, request, tokens=TOKENS, draws=draws, rows=rows, seed=seed, buffer=buffer
    )
    teacher = Teacher(loop.graph, weights.target, precision=loop.precision)
    law = sequence_law(teacher, request, found.context)
    counts = sequence_counts(found.tokens, target.config.vocab_size)
    return sequence_certificate(claim, request, counts, law, tv=tv, accepted=found.accepted)
