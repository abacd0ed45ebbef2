"""A tiny target, what it wrote, and a student of it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import Target, graph, merge
from specjax.testing import tiny_target
from specjax.training.data import Answer, Document, frequent_tokens, render
from specjax.training.draft import Student

WORDS = "the tree runs a loop and drafts some tokens that it then verifies".split()


def answers(count: int = 24, seed: int = 0) -> list[Answer]:
    """Made-up answers over the tiny tokenizer's bytes, of many lengths."""
    rng, tokenizer = np.random.default_rng(seed), tiny_target().tokenizer
    made = []
    for i in range(count):
        text = " ".join(rng.choice(WORDS, rng.integers(1, 6)))
        ids = tokenizer.encode(text, add_special=False)
        prompt = " ".join(rng.choice(WORDS, rng.integers(1, 4)))
        made.append(Answer("made", i, float(i % 2), prompt, (*ids, 0), text, "stop"))
    return made


def documents(target: Target, count: int = 24) -> list[Document]:
    return [render(target.tokenizer, answer) for answer in answers(count)]


def vocabulary(size: int = 16) -> np.ndarray:
    return frequent_tokens(answers(), size, (0,))


def tied(target: Target) -> Target:
    """The same target with its embedding as head."""
    config = dataclasses.replace(target.config, tie_embeddings=True)
    params = {name: group for name, group in target.params.items() if name != "lm_head"}
    return dataclasses.replace(target, config=config, graph=graph(config)[0], params=params)


def student(target: Target, **changes: object) -> Student:
    options = {"layers": (0, 1), "intermediate_size": 48, "draft_vocab": 16} | changes
    return Student(target.config, **options)


def network(target: Target):
    return merge(target.graph, target.params)


@functools.partial(jax.jit, static_argnames=("static",))
def _logits(static, params, tokens):
    decoder = merge(static, params)
    positions = jnp.arange(tokens.shape[1])[None]
    out = decoder.full(tokens, positions, jnp.ones_like(tokens), taps=("normed",))
    return decoder.logits(out.taps["normed"])


def logits(target: Target, document: Document, length: int = 128) -> np.ndarray:
    """The target's logits `[n, V]` on one document alone."""
    count = len(document.tokens)
    tokens = np.pad(document.tokens, (0, length - count))[None]
    return np.asarray(_logits(target.graph, target.params, tokens))[0, :count]
