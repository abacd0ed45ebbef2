"""Kangaroo's objective on a tiny target: every parameter learns, documents stay apart, the store's taps are used."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.build import make_drafter, make_loop
from specjax.checkpoints.drafters import save_drafter
from specjax.decoding import Request, generate, make_sampling
from specjax.models import merge
from specjax.models.kangaroo import kangaroo_config
from specjax.testing import tiny_target
from specjax.training import OptimizerConfig, Trainer, TrainerConfig, hidden_states
from specjax.training.data import TextRows, lay_out
from specjax.training.objectives.kangaroo import KangarooDistillation
from specjax.training.objectives.registry import OBJECTIVES
from tests.training import common

LENGTH, DRAFT_VOCAB, EXIT = 160, 16, 1


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


@functools.cache
def objective() -> KangarooDistillation:
    return KangarooDistillation(kangaroo_config(tiny_target().config, EXIT, DRAFT_VOCAB))


@functools.partial(jax.jit, static_argnames=("graph",))
def _traced(graph: Any, target_params: Any, params: Any, vocab: jax.Array, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        found = objective().loss(params, {"vocab": vocab}, merge(graph, target_params), batch, None)
        return found.sum, found

    return jax.grad(loss, has_aux=True)(params)


@pytest.fixture(scope="module")
def row(target: Any) -> Any:
    """Three documents in one row, with what a store keeps of them."""
    batch = lay_out([common.documents(target, 3)], LENGTH)
    config = hidden_states.StoreConfig(pass_rows=1, shard_rows=1, taps=(EXIT,))
    arrays = hidden_states._compute(target, batch, config)
    return batch.replace(normed=arrays["normed"], lse=arrays["lse"], taps={str(EXIT): arrays[str(EXIT)]})


def value(target: Any, batch: Any) -> tuple[Any, Any]:
    params = objective().init(jax.random.key(0), merge(target.graph, target.params), {})
    vocab = jnp.asarray(common.vocabulary(DRAFT_VOCAB))
    return _traced(target.graph, target.params, params, vocab, batch)


def test_every_parameter_learns(target: Any, row: Any) -> None:
    gradient, loss = value(target, row)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    assert len(leaves) == 6 and not [jax.tree_util.keystr(path) for path, g in leaves if not jnp.any(g != 0)]
    assert float(loss.weight) == row.predicts.sum() > 10
    alpha, match = (float(loss.metrics[k][0] / loss.metrics[k][1]) for k in ("alpha", "match"))
    assert 0 < alpha < 1 and 0 <= match < 1


@pytest.mark.pitfall("Megatron-LM#3159,#1532,#1661; Megatron-Bridge#6103; miles#3219")
def test_packed_documents_are_apart(target: Any, row: Any) -> None:
    """Each document alone, with the very hidden states of the packed row."""
    documents = common.documents(target, 3)
    gradient, packed = value(target, row)
    ends, parts = np.cumsum([len(d.tokens) for d in documents]), []
    for document, end in zip(documents, ends, strict=True):
        mine = slice(end - len(document.tokens), end)

        def cut(x: Any, mine: slice = mine, size: int = len(document.tokens)) -> Any:
            return np.pad(np.asarray(x)[:, mine], ((0, 0), (0, LENGTH - size)) + ((0, 0),) * (x.ndim - 2))

        alone = lay_out([[document]], LENGTH)
        kept = {name: cut(tap) for name, tap in row.taps.items()}
        parts.append(value(target, alone.replace(normed=cut(row.normed), lse=cut(row.lse), taps=kept)))
    assert float(packed.sum) == pytest.approx(sum(float(p.sum) for _, p in parts), rel=1e-4)
    added = jax.tree.map(lambda *xs: sum(xs), *[g for g, _ in parts])
    for whole, summed in zip(jax.tree.leaves(gradient), jax.tree.leaves(added), strict=True):
        np.testing.assert_allclose(whole, summed, rtol=1e-3, atol=1e-5)


def test_a_store_without_the_tap_will_do(target: Any, row: Any) -> None:
    stored, computed = value(target, row)[1], value(target, row.replace(taps={}))[1]
    # The store keeps bfloat16.
    assert float(stored.sum) == pytest.approx(float(computed.sum), rel=2e-2)


def test_text_alone_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="needs the target's hidden states"):
        value(target, lay_out([common.documents(target, 3)], LENGTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 2}, "exit_layer=2 lies outside the model: the target has 2 layers; expected 1 to 1"),
        ({"divergence": "kl"}, "divergence 'kl' is unknown; expected forward_kl"),
    ],
)
def test_what_does_not_fit(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OBJECTIVES["kangaroo"](target, **{"exit_layer": 1, "draft_vocab": 16, **options})


@pytest.mark.slow
def test_a_trained_adapter_is_exported_and_decodes(target: Any, row: Any, tmp_path: Any) -> None:
    made, vocab = objective(), jnp.asarray(common.vocabulary(DRAFT_VOCAB))
    trainer = Trainer(
        target=target,
        objective=made,
        tables={"vocab": vocab},
        optimizer=OptimizerConfig(learning_rate=3e-3, steps=40),
        config=TrainerConfig(steps=40, batch=1, best="same/match"),
        train=TextRows(row),
        held_out={"same": TextRows(row)},
    )
    state = trainer.init()
    before = trainer.evaluate(state.params)
    for _ in range(40):
        state, _ = trainer.step(state, row)
    after = trainer.evaluate(state.params)
    assert after["same/loss"] < before["same/loss"] and after["same/alpha"] > before["same/alpha"]
    save_drafter(tmp_path, made.export(state.params, {"vocab": vocab}, {"held_out": after}), target, dtype="float32")
    drafting = make_drafter("kangaroo", target, source=str(tmp_path), num_nodes=3, min_confidence=0.0)
    request = Request(tuple(target.tokenizer.encode("the tree runs")), 24)
    told = []
    for own in (make_drafter("autoregressive", target), drafting):
        loop, weights = make_loop(target, own, make_sampling([0.0]))
        told.append(generate(loop, weights, [request], context=256, vocab=target.config.vocab_size)[0])
    assert told[0].tokens == told[1].tokens
