"""Objectives of multi-token prediction: gradients, memory, packing, and text to pretrain on."""

from __future__ import annotations

import dataclasses
import functools
import types
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
from specjax.training.objectives.mtp_sequential import SequentialPretraining
from specjax.training.objectives.registry import PRETRAINING

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


@functools.cache
def joint() -> tuple[SequentialPretraining, Any]:
    objective = SequentialPretraining(shapes(), HEADS, weights=(0.3, 0.1), switch=10, chunk=16)
    return objective, objective.init(jax.random.key(1), network(), {})


def frozen(kind: Any, shared: bool = False) -> MultiTokenHeads:
    return MultiTokenHeads(mtp_config(shapes(), depth=2, kind=kind, shared=shared), HeadsLoss(decay=0.6, chunk=16))


def tables() -> dict[str, jax.Array]:
    return {"vocab": jnp.arange(VOCAB), "step": jnp.int32(0)}


def losses(objective: Any, params: Any, *rows: list[Document]) -> dict[str, tuple[float, float]]:
    found = jax.jit(lambda p, b: objective.loss(p, tables(), network(), b, jax.random.key(0)))(params, batch(*rows))
    parts = {"loss": (found.sum, found.weight), **found.metrics}
    return {name: (float(a), float(b)) for name, (a, b) in parts.items()}


@pytest.mark.parametrize("name", ["pretraining", "sequential"])
def test_heads_are_normalised_each_for_itself(name: str) -> None:
    """The loss is the mean over heads of their own means, and so is that of a batch in pieces of unequal documents."""
    short = document(3, 4)  # the furthest head sees one position here, and many in A and B
    objective, params = pretraining() if name == "pretraining" else (frozen(name), None)
    params = objective.init(jax.random.key(1), network(), tables()) if params is None else params

    @jax.jit
    def found(part: Batch, whole: Batch) -> Any:
        return objective.loss(params, tables() | {"counts": objective.counts(tables(), whole)}, network(), part, None)

    whole, pieces = batch([A, B], [short]), (batch([A, B]), batch([short]))
    together = jax.jit(lambda b: objective.loss(params, tables(), network(), b, None))(whole)
    first, second = (found(piece, whole) for piece in pieces)
    assert float(first.sum + second.sum) == pytest.approx(float(together.sum), rel=1e-5)
    assert float(first.weight + second.weight) == pytest.approx(float(together.weight))
    if name == "pretraining":
        means = [float(a) / float(b) for a, b in (together.metrics[f"loss_{i}"] for i in (1, 2, 3))]
        assert float(together.mean) == pytest.approx(np.mean(means), rel=1e-5)


@pytest.mark.pitfall("Megatron-LM#3159", "Megatron-LM#1532", "Megatron-LM#1661", "Megatron-Bridge#6103", "miles#3219")
@pytest.mark.parametrize("name", ["pretraining", "joint", "independent", "sequential"])
def test_packed_documents_lose_what_they_lose_alone(name: str) -> None:
    own = {"pretraining": pretraining, "joint": joint}
    objective, params = own[name]() if name in own else (frozen(name), None)
    params = objective.init(jax.random.key(1), network(), tables()) if params is None else params
    packed = losses(objective, params, [A, B], [])
    apart = losses(objective, params, [A], [B])
    assert packed.keys() == apart.keys() and packed["loss"][1] > 0
    for key, pair in packed.items():
        assert pair == pytest.approx(apart[key], rel=2e-5), key
    # Each head has its own count: i ahead leaves i tokens of each document without a label.
    if name in own:
        assert [packed[f"loss_{i}"][1] for i in (1, 2, 3)] == [18.0, 16.0, 14.0]


def test_sequential_modules_train_all_they_read_by_a_weight_that_comes_down() -> None:
    """L_main + lambda / D sum L_k: what the steps before and after the switch differ in is the modules' share."""
    objective, params = joint()

    @jax.jit
    def graded(params: Any, step: jax.Array) -> tuple[Any, Any]:
        def mean(params: Any) -> tuple[jax.Array, Any]:
            loss = objective.loss(params, {"step": step}, network(), batch([A, B]), jax.random.key(0))
            return loss.mean, loss.metrics

        (value, metrics), slopes = jax.value_and_grad(mean, has_aux=True)(params)
        return (value, metrics), slopes

    (early, metrics), first = graded(params, jnp.int32(9))
    (late, _), second = graded(params, jnp.int32(10))
    own, *modules = (float(a) / float(b) for a, b in (metrics[f"loss_{i}"] for i in (1, 2, 3)))
    assert float(early) == pytest.approx(own + 0.3 * np.mean(modules), rel=1e-5)
    assert float(late) == pytest.approx(own + 0.1 * np.mean(modules), rel=1e-5)
    moved = jax.tree.map(lambda a, b: a - b, first, second)
    still = [jax.tree_util.keystr(k) for k, g in jax.tree_util.tree_leaves_with_path(moved) if jnp.max(abs(g)) < 1e-6]
    assert not still  # the trunk, the embedding that is head and input, and every module
    held_out = objective.loss(params, {}, network(), batch([A, B]), None)
    assert float(held_out.mean) == pytest.approx(own, rel=1e-5)
    saved = objective.export(params, {}, {})
    assert saved.config.kind == "sequential" and saved.config.depth == len(saved.params["heads"]) == 2


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


def test_evaluation_pays_for_no_gradient_and_does_not_suffer_from_one() -> None:
    arrays = head_arrays(2, 20, 8, 16)
    text = str(jax.make_jaxpr(lambda *a: over_heads(one_head, *a)[0])(*arrays))
    products = str(jax.make_jaxpr(lambda z, own, shared, labels: one_head(z, own[0], shared, labels[0])[0])(*arrays))
    assert text.count("dot_general") == products.count("dot_general") == 2

    # The slope of a root at 0 is infinite; its value is 0.
    def root(z: jax.Array, own: jax.Array, shared: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sqrt(z).sum() * shared + own, shared

    zero, one = jnp.zeros(3), jnp.ones(())
    value, slopes = jax.value_and_grad(lambda z: over_heads(root, z, jnp.ones(2), one, jnp.zeros(2))[0])(zero)
    assert value == 2.0 and jnp.isinf(slopes).all()


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


@pytest.mark.slow
def test_peak_memory_of_pretraining_does_not_grow_with_the_heads() -> None:
    """The objective itself, where a head's logits are what is largest."""
    wide = dataclasses.replace(shapes(), vocab_size=2048, head_size=2048)
    rows = lay_out([[document(i, 128)] for i in range(4)], 128)

    def temporary(heads: int) -> int:
        objective = MultiTokenPretraining(wide, heads)
        params = jax.eval_shape(lambda: objective.init(jax.random.key(0), None, {}))  # type: ignore[arg-type]
        loss = jax.grad(lambda p, b: objective.loss(p, {}, None, b, None).mean)  # type: ignore[arg-type]
        return jax.jit(loss).lower(params, rows).compile().memory_analysis().temp_size_in_bytes

    assert temporary(6) < 1.1 * temporary(2)


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
    with pytest.raises(ValueError, match="depth=2 predicts up to 3 tokens ahead, but rows have 3"):
        frozen("sequential").loss({}, tables(), network(), batch([document(0, 3)], length=3), jax.random.key(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads=0; expected at least 1"),
        ({"heads": 2, "decay": 0.0}, "decay=0.0: further heads"),
        ({"kind": "sequential", "heads": 1}, "heads=1 with kind='sequential': no module is left"),
        ({"kind": "sequential", "heads": 2, "weights": (0.3, 0.0)}, "weights=.0.3, 0.0.; expected two numbers above 0"),
        ({"kind": "sequential", "heads": 2, "switch": 1.5}, "switch=1.5; expected a share"),
        ({"kind": "parallel"}, "kind='parallel'; expected independent or sequential"),
    ],
)
def test_pretraining_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PRETRAINING["mtp"](types.SimpleNamespace(config=shapes()), 100, **options)


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
    train, apart = (
        {k: corpus.pieces([t for t in part if t.kind == k], tokenizer, 64) for k in ("code", "prose")}
        for part in corpus.hold_out(texts)
    )
    assert max(len(d.tokens) for d in train["code"]) <= 64
    assert sum(int(d.tokens[-1] == 0) for d in train["prose"]) == 12
    rows = corpus.lay_out_corpus(train, apart, 64, held_out_rows=4, max_tokens=4000)
    assert rows.train.rows > 50 and {k: r.rows for k, r in rows.held_out.items()} == {"code": 4, "prose": 4}
    assert rows.train.text.predicts.any()
    with pytest.raises(ValueError, match="vocab_size=100"):
        corpus.train_tokenizer(texts, 100)
    with pytest.raises(ValueError, match="kind 'code' has 1 pieces to train on and 0 held out"):
        corpus.lay_out_corpus({"code": train["code"][:1]}, {"code": []}, 64, 4, 4000)


def test_held_out_text_continues_nothing_that_is_trained_on() -> None:
    """Pieces of one file in both parts share what is told by heart: names, and the sentence that was cut."""
    code = [corpus.Text(f"{i}.py", "code", f"name_{i} = {i}\n" * 50) for i in range(23)]
    prose = [corpus.Text(f"{i}.txt", "prose", "\n\n".join(f"Chapter {i}-{j}." for j in range(40))) for i in range(2)]
    train, apart = corpus.hold_out([*code, *prose])
    assert [t.name for t in apart] == ["0.py", "10.py", "20.py", "0.txt", "1.txt"]
    assert not {t.name for t in train if t.kind == "code"} & {t.name for t in apart if t.kind == "code"}
    for whole in prose:
        parts = [next(t.text for t in part if t.name == whole.name) for part in (train, apart)]
        assert "\n\n".join(parts) == whole.text and 0.05 < len(parts[1]) / len(whole.text) < 0.15
    (unbroken,) = corpus.hold_out([corpus.Text("a", "prose", "x" * 100)])[1]
    assert unbroken.text == "x" * 10


def test_what_is_taken_of_many_is_spread_over_all() -> None:
    assert corpus.spread(range(100), 4) == [0, 25, 50, 75] and corpus.spread("ab", 4) == ["a", "b"]
