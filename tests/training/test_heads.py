"""The objectives of Medusa and Hydra on a tiny target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import merge
from specjax.models.medusa import HydraConfig, MedusaConfig
from specjax.testing import tiny_target
from specjax.training import hidden_states
from specjax.training.data import Document, lay_out
from specjax.training.objectives.heads import HeadsLoss
from specjax.training.objectives.hydra import Hydra
from specjax.training.objectives.medusa import Medusa
from tests.training import common

KEY = jax.random.key(0)
HEADS, RANKS, LENGTH, DRAFT_VOCAB = 3, 4, 160, 16
NAMES = ["medusa", "hydra", "hydra++"]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def objective(name, target, **criterion):
    shapes = {
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
        "head_size": DRAFT_VOCAB,
        "num_heads": HEADS,
    }
    loss = HeadsLoss(**{"teacher": 0.5, "ranks": RANKS, "chunk": 32} | criterion)
    if name == "medusa":
        return Medusa(MedusaConfig(**shapes), loss)
    if name == "hydra":
        return Hydra(HydraConfig(**shapes, num_layers=2, embed_rank=8), loss)
    return Hydra(HydraConfig(**shapes, residual="hidden", prefix=target.config.with_layers((1,))), loss)


@functools.cache
def start(name, target):
    """Parameters some way from the start, where no gradient is zero for want of a factor."""
    params = objective(name, target).init(KEY, common.network(target), {})
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def stored(target, documents):
    """One row as a store would hold it."""
    batch = lay_out([documents], LENGTH)
    arrays = hidden_states._compute(target, batch, hidden_states.StoreConfig(pass_rows=1, shard_rows=1))
    return batch.replace(normed=arrays["normed"], lse=arrays["lse"])


@functools.partial(jax.jit, static_argnames=("objective", "graph"))
def traced(objective, graph, target_params, params, vocab, batch, more=None):
    more = more or {}

    def loss(params):
        found = objective.loss(params, {"vocab": vocab, **more}, merge(graph, target_params), batch, KEY)
        return found.sum, found

    return jax.grad(loss, has_aux=True)(params)


def value(name, target, batch, params=None, whole=None):
    """Gradient and loss, of a batch that is a piece of `whole`."""
    params = start(name, target) if params is None else params
    vocab = jnp.asarray(common.vocabulary(DRAFT_VOCAB))
    more = {} if whole is None else {"counts": objective(name, target).counts({"vocab": vocab}, whole)}
    return traced(objective(name, target), target.graph, target.params, params, vocab, batch, more)


@pytest.mark.pitfall("Megatron-LM#3159,#1532,#1661; Megatron-Bridge#6103; miles#3219")
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_apart(target, name):
    made = common.documents(target, 3)
    batch = stored(target, made)
    gradient, packed = value(name, target, batch)
    ends = np.cumsum([len(document.tokens) for document in made])
    parts = []
    for document, end in zip(made, ends, strict=True):
        # The very hidden states of the packed row: their rounding differs from pass to pass.
        mine = slice(end - len(document.tokens), end)
        fill = ((0, 0), (0, LENGTH - len(document.tokens)))
        normed, lse = np.pad(batch.normed[:, mine], (*fill, (0, 0))), np.pad(batch.lse[:, mine], fill)
        alone = lay_out([[document]], LENGTH).replace(normed=normed, lse=lse)
        parts.append(value(name, target, alone, whole=batch))
    assert float(packed.weight) == pytest.approx(sum(float(p.weight) for _, p in parts))
    assert float(packed.weight) > 10
    assert float(packed.sum) == pytest.approx(sum(float(p.sum) for _, p in parts), rel=1e-4)
    for key, (top, bottom) in packed.metrics.items():
        assert float(top) == pytest.approx(sum(float(p.metrics[key][0]) for _, p in parts), abs=1e-4)
        assert float(bottom) == sum(float(p.metrics[key][1]) for _, p in parts)
    added = jax.tree.map(lambda *xs: sum(xs), *[g for g, _ in parts])
    for whole, summed in zip(jax.tree.leaves(gradient), jax.tree.leaves(added), strict=True):
        np.testing.assert_allclose(whole, summed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("head", range(HEADS))
@pytest.mark.parametrize("name", NAMES)
def test_the_head_gets_gradient(target, name, head):
    gradient, _ = value(name, target, stored(target, common.documents(target, 3)))
    mine = jax.tree_util.tree_leaves_with_path(gradient["heads"][head])
    dead = [jax.tree_util.keystr(path) for path, g in mine if not jnp.any(g != 0)]
    assert mine and not dead
    rest = [g for part, group in gradient.items() if part != "heads" for g in jax.tree.leaves(group)]
    assert all(bool(jnp.any(g != 0)) for g in rest)


@pytest.mark.pitfall("SpecForge#895,#885")
def test_only_the_planted_label_carries_loss(target):
    vocab = common.vocabulary(DRAFT_VOCAB)
    # The answer is the last two tokens: head 0 has one label, the last token, from before the answer; no other head.
    tokens = np.asarray([*vocab[:6], *vocab[3:8]], np.int32)
    batch = stored(target, [Document(tokens, len(tokens) - 2)])
    plain = objective("medusa", target, teacher=0.0)
    params = plain.init(KEY, common.network(target), {})
    gradient, loss = traced(plain, target.graph, target.params, params, jnp.asarray(vocab), batch)
    assert float(loss.weight) == 1
    logits = np.asarray(batch.normed[0, len(tokens) - 3], np.float32) @ target.params["lm_head"]["kernel"][:, vocab]
    assert float(loss.sum) == pytest.approx(-float(jax.nn.log_softmax(logits)[7]), rel=1e-4)
    assert [float(loss.metrics[f"match_{i}"][1]) for i in range(HEADS)] == [1, 0, 0]
    moving = {i: any(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradient["heads"][i])) for i in range(HEADS)}
    assert moving == {0: True, 1: False, 2: False}


def called(loss, x, batch, vocab, head):
    return jax.jit(lambda x: loss(x, batch, jnp.asarray(vocab), head, 0.0))(x)


@pytest.mark.pitfall("EAGLE cnets1 / hidden off-by-one (EAGLE issues, tpu-inference#782)")
def test_head_i_at_t_is_for_token_t_plus_2_plus_i(target):
    """Heads that know the text have no loss, and only when they tell it for the right position."""
    made, vocab = common.documents(target, 3), np.arange(target.config.vocab_size)
    batch = lay_out([made], LENGTH)
    known = np.eye(len(vocab), dtype=np.float32)[batch.tokens]

    def knowing(shift):
        return jnp.stack([np.roll(known, -(shift + i), axis=1) for i in range(HEADS)], axis=2) * 50

    found = called(HeadsLoss(), knowing(2), batch, vocab, jnp.eye(len(vocab)))
    assert float(found.mean) < 1e-6
    assert all(float(found.metrics[f"match_{i}"][0]) == float(found.metrics[f"match_{i}"][1]) for i in range(HEADS))
    lengths = [len(d.tokens) - d.prompt_length for d in made]
    assert [float(found.metrics[f"match_{i}"][1]) for i in range(HEADS)] == [
        sum(max(n - 1 - i, 0) for n in lengths) for i in range(HEADS)
    ]
    # From a position on, all heads are right that have a label there.
    assert float(found.metrics["accepted"][0]) == sum(min(HEADS, left) for n in lengths for left in range(1, n))
    for wrong in (1, 3):
        assert float(called(HeadsLoss(), knowing(wrong), batch, vocab, jnp.eye(len(vocab))).mean) > 10


def test_the_teacher_is_the_targets_law_at_the_label(target):
    made, vocab = common.documents(target, 2), np.arange(target.config.vocab_size)
    batch, head = stored(target, made), target.params["lm_head"]["kernel"]
    normed = np.asarray(batch.normed, np.float32)
    taught = HeadsLoss(teacher=1.0, decay=1.0)

    def saying(shift):
        x = jnp.stack([np.roll(normed, -(shift + i), axis=1) for i in range(HEADS)], axis=2)
        return called(taught, x, batch, vocab, head)

    entropies = []
    for document in made:
        log_p = np.asarray(jax.nn.log_softmax(common.logits(target, document), -1), np.float64)
        entropies.append(-(np.exp(log_p) * log_p).sum(-1))
    # Cross-entropy with itself is entropy; head i's label at t is drawn from the law at t + 1 + i.
    want = sum(e[d.prompt_length + i : -1].sum() for e, d in zip(entropies, made, strict=True) for i in range(HEADS))
    assert float(saying(1).sum) == pytest.approx(want, rel=5e-3)
    assert all(float(saying(wrong).sum) > 1.2 * want for wrong in (0, 2))


@pytest.mark.pitfall("SpecJAX ops")
def test_ranks_are_places_among_the_candidates(target):
    vocab, rng = common.vocabulary(DRAFT_VOCAB), np.random.default_rng(0)
    batch = lay_out([common.documents(target, 3)], LENGTH)
    # Few values, so that there are ties, which go to the lower index as in top-k.
    x = rng.integers(0, 4, (1, LENGTH, HEADS, DRAFT_VOCAB)).astype(np.float32)
    found = called(HeadsLoss(ranks=RANKS), jnp.asarray(x), batch, vocab, jnp.eye(DRAFT_VOCAB))
    place = np.argsort(np.argsort(-x, axis=-1, kind="stable"), axis=-1)
    counts, total = np.zeros((HEADS, RANKS)), np.zeros(HEADS)
    for t in range(LENGTH):
        for i in range(HEADS):
            label = t + 2 + i
            if label >= LENGTH or not batch.predicts[0, t:label].all():
                continue
            total[i] += 1
            at = np.flatnonzero(vocab == batch.tokens[0, label])
            if len(at) and place[0, t, i, at[0]] < RANKS:
                counts[i, place[0, t, i, at[0]]] += 1
    for i in range(HEADS):
        names = [f"match_{i}", *(f"rank_{i}_{r}" for r in range(1, RANKS))]
        assert [float(found.metrics[name][0]) for name in names] == counts[i].tolist()
        assert {float(found.metrics[name][1]) for name in names} == {total[i]}


@pytest.mark.parametrize("name", NAMES)
def test_calibration_goes_with_the_heads(target, name):
    made, tables = objective(name, target), {"vocab": jnp.asarray(common.vocabulary(DRAFT_VOCAB))}
    names = [[f"greedy/match_{i}", *(f"greedy/rank_{i}_{r}" for r in range(1, RANKS))] for i in range(HEADS)]
    held_out = {key: i / 10 + r / 100 for i, row in enumerate(names) for r, key in enumerate(row)}
    saved = made.export({}, tables, {"held_out": held_out})
    assert (saved.method, saved.config.ranks) == (name.removesuffix("++"), RANKS)
    want = [[i / 10 + r / 100 for r in range(RANKS)] for i in range(HEADS)]
    np.testing.assert_allclose(saved.tables["accuracy"], want, rtol=1e-6)
    plain = made.export({}, tables, {"held_out": {"greedy/loss": 1.0}})
    assert plain.config.ranks == 0 and "accuracy" not in plain.tables


def test_what_cannot_be_trained_is_refused(target):
    text = lay_out([common.documents(target, 1)], LENGTH)
    with pytest.raises(ValueError, match="heads read the target's hidden states"):
        value("medusa", target, text)
    with pytest.raises(ValueError, match="needs the target's log-sum-exps"):
        value("medusa", target, text.replace(normed=np.zeros((1, LENGTH, 32), np.float32)))
    with pytest.raises(ValueError, match="own_head=True: training keeps the target's"):
        Medusa(MedusaConfig(hidden_size=8, vocab_size=9, head_size=9, own_head=True))
    for bad in ({"decay": 0.0}, {"teacher": 1.5}, {"ranks": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            HeadsLoss(**bad)
    with pytest.raises(ValueError, match="residual='none'; expected 'linear' or 'hidden'"):
        HydraConfig(hidden_size=8, vocab_size=9, head_size=9, residual="none")
    with pytest.raises(ValueError, match="prefix has 2 layers of width 32; expected 1 layer of width 8"):
        HydraConfig(hidden_size=8, vocab_size=9, head_size=9, prefix=target.config)
    with pytest.raises(ValueError, match="head_size=10: expected 1 to the target's 9"):
        MedusaConfig(hidden_size=8, vocab_size=9, head_size=10)
