import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import merge
from specjax.testing import tiny_target
from specjax.training import hidden_states
from specjax.training.data import Document, lay_out
from specjax.training.objectives import DIVERGENCES, Distill, LanguageModel
from specjax.training.objectives.base import over_positions
from specjax.training.objectives.distill import divergence_of
from specjax.training.objectives.registry import OBJECTIVES
from tests.training import common

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def with_law(target, batch):
    """The batch with what a store would hold for it."""
    arrays = hidden_states._compute(target, batch, hidden_states.StoreConfig(pass_rows=1, shard_rows=1))
    return batch.replace(normed=arrays["normed"], lse=arrays["lse"])


@functools.partial(jax.jit, static_argnames=("objective", "graph"))
def traced(objective, graph, target_params, params, vocab, batch):
    return objective.loss(params, {"vocab": vocab}, merge(graph, target_params), batch, KEY)


def value(objective, target, batch, vocab, params=None):
    params = objective.init(KEY, common.network(target), {}) if params is None else params
    return traced(objective, target.graph, target.params, params, jnp.asarray(vocab), batch)


def objectives(target):
    student = common.student(target)
    return {"lm": LanguageModel(student)} | {name: Distill(student, name) for name in DIVERGENCES}


@pytest.mark.pitfall("SpecForge#895,#885")
def test_only_the_planted_label_carries_loss(target):
    vocab = common.vocabulary()
    tokens = np.asarray([*vocab[:6], *vocab[3:8]], np.int32)
    # All but the last token are the prompt: the loss is -log q(last | all before).
    batch = lay_out([[Document(tokens, len(tokens) - 1)]], 14)
    objective = LanguageModel(common.student(target))
    loss = value(objective, target, batch, vocab)
    assert float(loss.weight) == 1
    decoder, tables = common.network(target), jnp.asarray(vocab)
    params = objective.init(KEY, decoder, {})
    net, hidden = objective.student.hidden(params, decoder, tables, jax.tree.map(jnp.asarray, batch))
    log_q = jax.nn.log_softmax(net.logits(hidden[0, len(tokens) - 2]))
    assert float(loss.sum) == pytest.approx(-float(log_q[7]), rel=1e-5)
    # Labels before it are the prompt's: other ones change what the draft reads, so change only the one not read.
    other = tokens.copy()
    other[-1] = vocab[1]
    again = value(objective, target, lay_out([[Document(other, len(tokens) - 1)]], 14), vocab)
    assert float(again.sum) == pytest.approx(-float(log_q[1]), rel=1e-5)


@pytest.mark.pitfall("Megatron-LM#3159,#1532,#1661; Megatron-Bridge#6103; miles#3219")
@pytest.mark.parametrize("name", ["lm", *DIVERGENCES])
def test_packed_documents_are_apart_and_padding_is_nothing(target, name):
    objective, vocab = objectives(target)[name], common.vocabulary()
    made = common.documents(target, 3)
    packed = value(objective, target, with_law(target, lay_out([made], 160)), vocab)
    parts = [value(objective, target, with_law(target, lay_out([[d]], 160)), vocab) for d in made]
    assert float(packed.weight) == sum(float(p.weight) for p in parts) > 10
    assert float(packed.sum) == pytest.approx(sum(float(p.sum) for p in parts), rel=1e-4)
    for key, (top, bottom) in packed.metrics.items():
        assert float(top) == pytest.approx(sum(float(p.metrics[key][0]) for p in parts), rel=1e-4, abs=1e-4)
        assert float(bottom) == sum(float(p.metrics[key][1]) for p in parts)


@pytest.mark.parametrize("name", ["lm", *DIVERGENCES])
def test_every_parameter_gets_gradient(target, name):
    objective, vocab = objectives(target)[name], common.vocabulary()
    batch = with_law(target, lay_out([common.documents(target, 3)], 160))
    params = objective.init(KEY, common.network(target), {})
    grads = jax.grad(lambda p: value(objective, target, batch, vocab, p).mean)(params)
    dead = [jax.tree_util.keystr(k) for k, g in jax.tree_util.tree_leaves_with_path(grads) if not jnp.any(g != 0)]
    assert not dead
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))


@pytest.mark.pitfall("EAGLE cnets1 / hidden off-by-one (EAGLE issues, tpu-inference#782)")
@pytest.mark.parametrize("tied", [False, True])
def test_the_target_as_its_own_student_has_no_loss_unless_shifted(target, tied):
    target = common.tied(target) if tied else target
    config = target.config
    student = common.student(target, intermediate_size=config.intermediate_size, draft_vocab=config.vocab_size)
    vocab, objective = np.arange(config.vocab_size), Distill(student)
    batch = with_law(target, lay_out([common.documents(target, 3)], 160))
    loss = value(objective, target, batch, vocab)
    # What is left is the store's bfloat16.
    assert float(loss.mean) < 2e-3
    assert float(loss.metrics["alpha"][0] / loss.metrics["alpha"][1]) > 0.97
    assert float(loss.metrics["mass"][0] / loss.metrics["mass"][1]) == pytest.approx(1, abs=1e-4)
    for shift in (-1, 1):
        moved = batch.replace(normed=np.roll(batch.normed, shift, 1), lse=np.roll(batch.lse, shift, 1))
        assert float(value(objective, target, moved, vocab).mean) > 0.1


def test_the_law_keeps_its_mass_outside_the_draft_vocabulary(target):
    vocab, made = common.vocabulary(), common.documents(target, 2)
    loss = value(Distill(common.student(target)), target, with_law(target, lay_out([made], 160)), vocab)
    mass = 0.0
    for document in made:
        law = jax.nn.softmax(common.logits(target, document), -1)
        mass += float(law[document.prompt_length - 1 : -1][:, vocab].sum())
    assert float(loss.metrics["mass"][0]) == pytest.approx(mass, rel=5e-3)


@pytest.mark.pitfall("SpecJAX ops")
def test_metrics_are_over_valid_positions(target):
    vocab, made = common.vocabulary(), common.documents(target, 2)
    objective = LanguageModel(common.student(target))
    loss = value(objective, target, lay_out([made], 160), vocab)
    assert float(loss.metrics["match"][1]) == sum(len(d.tokens) - d.prompt_length for d in made)
    # Tokens outside the draft vocabulary count as misses of `match`, and carry no loss.
    assert float(loss.weight) == sum(int(np.isin(d.tokens[d.prompt_length :], vocab).sum()) for d in made)


def test_divergences_against_their_definitions():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(9), 5), rng.dirichlet(np.ones(9), 5)
    m = (p + q) / 2
    want = {
        "forward_kl": (p * np.log(p / q)).sum(-1),
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "jsd": ((p * np.log(p / m)).sum(-1) + (q * np.log(q / m)).sum(-1)) / 2,
        "tvd": np.abs(p - q).sum(-1) / 2,
        "lk": -np.log(np.minimum(p, q).sum(-1)),
    }
    assert want.keys() == DIVERGENCES.keys()
    for name, expected in want.items():
        np.testing.assert_allclose(DIVERGENCES[name](np.log(p), np.log(q)), expected, rtol=2e-4)


def test_the_mixture_of_jsd_is_weighed_by_beta(target):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(9), 5), rng.dirichlet(np.ones(9), 5)
    m = 0.1 * p + 0.9 * q
    expected = 0.1 * (p * np.log(p / m)).sum(-1) + 0.9 * (q * np.log(q / m)).sum(-1)
    np.testing.assert_allclose(divergence_of("jsd", 0.1)(np.log(p), np.log(q)), expected, rtol=2e-4)
    options = {"layers": (0,), "intermediate_size": 48, "draft_vocab": 16}
    assert OBJECTIVES["distill"](target, divergence="jsd", beta=0.1, **options) == Distill(
        common.student(target, layers=(0,)), "jsd", 0.1
    )
    with pytest.raises(ValueError, match="beta=1.0; expected a number between 0 and 1"):
        OBJECTIVES["distill"](target, divergence="jsd", beta=1.0, **options)


def test_unknown_divergence_is_refused(target):
    with pytest.raises(ValueError, match="divergence 'kl' is unknown; expected forward_kl"):
        Distill(common.student(target), "kl")


def test_distilling_needs_a_store(target):
    with pytest.raises(ValueError, match="hidden-state store"):
        value(Distill(common.student(target)), target, lay_out([common.documents(target, 1)], 160), common.vocabulary())


@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_chunked_loss_is_the_plain_one(chunk):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(2, 9, 5))), jnp.asarray(rng.normal(size=(5, 11)))
    labels, mask = jnp.asarray(rng.integers(0, 11, (2, 9))), jnp.asarray(rng.random((2, 9)) < 0.4)

    def nll(x, labels):
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1)[..., 0]

    def part(x, labels, mask):
        return jnp.sum(jnp.where(mask, nll(x, labels), 0)), jnp.sum(mask)

    def chunked(x):
        return over_positions(part, x * 2, labels, mask, chunk)

    (value, count), gradient = jax.value_and_grad(chunked, has_aux=True)(x)
    want, slope = jax.value_and_grad(lambda x: jnp.sum(jnp.where(mask, nll(x * 2, labels), 0)))(x)
    assert int(count) == int(mask.sum())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": (0, 9)}, r"layers=\(0, 9\): expected one or more of the target's layers 0 to 1"),
        ({"layers": ()}, "layers="),
        ({"intermediate_size": 65}, "intermediate_size=65: expected 1 to the target's 64"),
        ({"draft_vocab": 0}, "draft_vocab=0: expected 1 to"),
    ],
)
def test_a_student_that_does_not_fit_is_refused(target, changes, says):
    with pytest.raises(ValueError, match=says):
        common.student(target, **changes)


def test_a_narrowed_layer_keeps_the_largest_neurons(target):
    layer = target.params["layers"][1]["mlp"]
    params = common.student(target, layers=(1,)).init(common.network(target))["layers"][0]["mlp"]
    size = np.prod([np.linalg.norm(layer[n]["kernel"], axis=a) for n, a in (("gate", 0), ("up", 0), ("down", 1))], 0)
    kept = np.sort(np.argsort(-size)[:48])
    np.testing.assert_array_equal(params["gate"]["kernel"], np.asarray(layer["gate"]["kernel"])[:, kept])
    np.testing.assert_array_equal(params["down"]["kernel"], np.asarray(layer["down"]["kernel"])[kept])
