"""Objectives of multi-token prediction: gradients, memory, packing, and text to pretrain on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import ModelConfig, RopeConfig, graph, init_decoder, merge
from specjax.models.mtp import mtp_config
from specjax.training import corpus
from specjax.training.data import Batch, Document, lay_out
from specjax.training.objectives.heads import HeadsLoss
from specjax.training.objectives.mtp import MultiTokenHeads
from specjax.training.objectives.mtp_pretrain import MultiTokenPretraining, labels_ahead, over_heads

VOCAB, LENGTH, HEADS = 32, 24, 3


@functools.cache
def shapes() -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        head_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position=512,
        norm_eps=1e-5,
        query_scale=8**-0.5,
        windows=(None, None),
        ropes=(RopeConfig(),) * 2,
        tie_embeddings=True,
    )


@functools.cache
def network() -> Any:
    return merge(graph(shapes())[0], init_decoder(shapes(), jax.random.key(0)))


def document(seed: int, length: int, prompt: int = 0) -> Document:
    return Document(np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32), prompt)


def batch(*rows: list[Document], length: int = LENGTH) -> Batch:
    return jax.tree.map(jnp.asarray, lay_out(rows, length))


A, B = document(1, 9), document(2, 11)
BATCH = lay_out([[A, B]], LENGTH)


@functools.cache
def pretraining(heads: int = HEADS) -> tuple[MultiTokenPretraining, Any]:
    objective = MultiTokenPretraining(shapes(), heads)
    return objective, objective.init(jax.random.key(1), network(), {})


def frozen(kind: Any, shared: bool = False) -> MultiTokenHeads:
    return MultiTokenHeads(mtp_config(shapes(), depth=2, kind=kind, shared=shared), HeadsLoss(decay=0.6, chunk=16))


def tables() -> dict[str, jax.Array]:
    return {"vocab": jnp.arange(VOCAB)}


def losses(objective: Any, params: Any, *rows: list[Document]) -> dict[str, tuple[float, float]]:
    found = jax.jit(lambda p, b: objective.loss(p, tables(), network(), b, jax.random.key(0)))(params, batch(*rows))
    parts = {"loss": (found.sum, found.weight), **found.metrics}
    return {name: (float(a), float(b)) for name, (a, b) in parts.items()}


@pytest.mark.pitfall("Megatron-LM#3159", "Megatron-LM#1532", "Megatron-LM#1661", "Megatron-Bridge#6103", "miles#3219")
@pytest.mark.parametrize("name", ["pretraining", "independent", "sequential"])
def test_packed_documents_lose_what_they_lose_alone(name: str) -> None:
    objective, params = pretraining() if name == "pretraining" else (frozen(name), None)
    params = objective.init(jax.random.key(1), network(), tables()) if params is None else params
    packed = losses(objective, params, [A, B], [])
    apart = losses(objective, params, [A], [B])
    assert packed.keys() == apart.keys() and packed["loss"][1] > 0
    for key, pair in packed.items():
        assert pair == pytest.approx(apart[key], rel=2e-5), key
    # Each head has its own count: i ahead leaves i tokens of each document without a label.
    if name == "pretraining":
        assert [packed[f"loss_{i}"][1] for i in (1, 2, 3)] == [18.0, 16.0, 14.0]


def test_prompts_carry_no_loss() -> None:
    objective, params = pretraining()
    whole, answer = (
        losses(objective, params, [A], [B]),
        losses(objective, params, [A], [dataclasses.replace(B, prompt_length=6)]),
    )
    assert answer["loss_1"][1] == whole["loss_1"][1] - 5 and answer["loss_3"][1] == whole["loss_3"][1] - 5


def test_labels_are_the_tokens_ahead() -> None:
    labels, masks = labels_ahead(batch([A, B]), 3)
    assert masks.shape == (3, 1, LENGTH)
    for i in range(3):
        rows, at = np.nonzero(np.asarray(masks[i]))
        text = np.concatenate([A.tokens, B.tokens])
        assert at.tolist() == [*range(9 - i - 1), *range(9, 20 - i - 1)]
        assert (np.asarray(labels[i])[rows, at] == text[at + i + 1]).all()


# ---- One head at a time ----


def one_head(z: jax.Array, own: jax.Array, shared: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jnp.tanh(z @ own) @ shared
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], axis=-1)
    return nll.sum(), (jnp.argmax(logits, -1) == label).sum()


def all_heads(z: jax.Array, own: jax.Array, shared: jax.Array, labels: jax.Array) -> jax.Array:
    return sum(one_head(z, own[i], shared, labels[i])[0] for i in range(len(own)))


def head_arrays(heads: int, positions: int, width: int, vocab: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], (positions, width)),
        jax.random.normal(keys[1], (heads, width, width)),
        jax.random.normal(keys[2], (width, vocab)),
        jax.random.randint(keys[3], (heads, positions), 0, vocab),
    )


def test_gradients_one_head_at_a_time_are_those_of_the_sum() -> None:
    arrays = head_arrays(3, 20, 8, 16)
    value, gradients = jax.jit(jax.value_and_grad(all_heads, argnums=(0, 1, 2)))(*arrays)
    mine = jax.jit(jax.value_and_grad(lambda *a: over_heads(one_head, *a)[0], argnums=(0, 1, 2)))(*arrays)
    np.testing.assert_allclose(mine[0], value, rtol=1e-5)
    for a, b in zip(mine[1], gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def peak(loss: Any, heads: int) -> int:
    """Bytes that a program holds beside its arguments and results."""
    arrays = head_arrays(heads, 256, 16, 2048)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_peak_memory_does_not_grow_with_the_heads() -> None:
    def saving(*arrays: jax.Array) -> jax.Array:
        return over_heads(one_head, *arrays)[0]

    assert peak(saving, 8) < 1.1 * peak(saving, 2)
    assert peak(all_heads, 8) > 2 * peak(all_heads, 2) and peak(all_heads, 8) > 2 * peak(saving, 8)


def untouched(objective: Any, params: Any) -> list[str]:
    """Parameters that get no gradient."""

    @jax.jit
    def gradient(params: Any) -> Any:
        return jax.grad(lambda p: objective.loss(p, tables(), network(), BATCH, jax.random.key(0)).mean)(params)

    leaves = jax.tree_util.tree_leaves_with_path(gradient(params))
    return [jax.tree_util.keystr(path) for path, leaf in leaves if not jnp.any(leaf)]


@pytest.mark.parametrize("heads", [1, HEADS])
def test_every_parameter_of_pretraining_learns(heads: int) -> None:
    objective, params = pretraining(heads)
    gradient = jax.jit(jax.grad(lambda p: objective.loss(p, {}, network(), batch([A, B]), jax.random.key(0)).mean))(
        params
    )
    still = [jax.tree_util.keystr(k) for k, g in jax.tree_util.tree_leaves_with_path(gradient) if not jnp.any(g)]
    assert not still
    assert ("heads" in params) == (heads > 1)


@pytest.mark.parametrize(("kind", "shared"), [("independent", False), ("sequential", False), ("sequential", True)])
def test_every_parameter_beside_a_frozen_target_learns(kind: Any, shared: bool) -> None:
    objective = frozen(kind, shared)
    params = objective.init(jax.random.key(2), network(), tables())
    assert len(params["heads"]) == (1 if shared else 2)
    assert not untouched(objective, params)


def test_more_heads_than_a_row_allows() -> None:
    objective, params = pretraining()
    with pytest.raises(ValueError, match="heads=3 predict up to 3 tokens ahead, but rows have 3"):
        objective.loss(params, {}, network(), batch([document(0, 3)], length=3), jax.random.key(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"heads": 0}, "heads=0; expected at least 1"), ({"heads": 2, "decay": 0.0}, "decay=0.0: further heads")],
)
def test_pretraining_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiTokenPretraining(shapes(), **options)


def test_one_head_makes_no_drafter() -> None:
    objective, params = pretraining(1)
    with pytest.raises(ValueError, match="heads=1: nothing predicts further"):
        objective.export(params, {}, {})


# ---- Text ----


def test_a_corpus_of_the_standard_library() -> None:
    texts = list(corpus.standard_library(60_000))
    texts += [corpus.Text(f"p{i}", "prose", "It was a dark and stormy night. " * 40) for i in range(12)]
    assert {t.kind for t in texts} == {"code", "prose"} and sum(
        len(t.text) for t in texts if t.kind == "code"
    ) >= 60_000
    tokenizer = corpus.train_tokenizer(texts, 400)
    assert tokenizer.vocab_size == 400 and tokenizer.eos_ids == (0,)
    sample = "def f(x):\n    return x + 1  # ünïcode\n"
    assert tokenizer.decode(tokenizer.encode(sample)) == sample
    documents = {k: corpus.pieces([t for t in texts if t.kind == k], tokenizer, 64) for k in ("code", "prose")}
    assert max(len(d.tokens) for d in documents["code"]) <= 64
    assert sum(int(d.tokens[-1] == 0) for d in documents["prose"]) == 12
    rows = corpus.split_corpus(documents, 64, held_out_rows=4, max_tokens=4000)
    assert rows.train.rows > 50 and {k: r.rows for k, r in rows.held_out.items()} == {"code": 4, "prose": 4}
    assert rows.train.text.predicts.any()
    with pytest.raises(ValueError, match="vocab_size=100"):
        corpus.train_tokenizer(texts, 100)
    with pytest.raises(ValueError, match="kind 'code' has 1 documents"):
        corpus.split_corpus({"code": documents["code"][:1]}, 64, 4, 4000)
