"""EAGLE's objectives on a tiny target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import merge
from specjax.models.eagle import Eagle3Config, EagleConfig, assemble, draft_layer
from specjax.testing import tiny_target
from specjax.training import hidden_states
from specjax.training.data import Document, lay_out
from specjax.training.objectives.eagle import EagleRegression, feature_noise
from specjax.training.objectives.eagle3 import TrainingTimeTest
from specjax.training.objectives.registry import OBJECTIVES
from specjax.training.objectives.rollout import drafted
from tests.training import common

KEY = jax.random.key(0)
TAPS, STEPS, LENGTH = (0, 1, 2), 3, 160


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def objective(name, target, **changes):
    layer = draft_layer(target.config, intermediate_size=48, head_size=16)
    if name == "eagle":
        return EagleRegression(EagleConfig(layer=layer), **{"noise": 0.0, **changes})
    config = Eagle3Config(layer=layer, taps=TAPS, target_hidden_size=target.config.hidden_size)
    return TrainingTimeTest(config, **{"steps": STEPS, **changes})


def stored(target, documents):
    """One row as a store would hold it."""
    batch = lay_out([documents], LENGTH)
    arrays = hidden_states._compute(target, batch, hidden_states.StoreConfig(pass_rows=1, shard_rows=1, taps=TAPS))
    taps = {str(tap): arrays[str(tap)] for tap in TAPS}
    return batch.replace(normed=arrays["normed"], lse=arrays["lse"], taps=taps)


@functools.partial(jax.jit, static_argnames=("objective", "graph"))
def traced(objective, graph, target_params, params, vocab, batch):
    def loss(params):
        found = objective.loss(params, {"vocab": vocab}, merge(graph, target_params), batch, KEY)
        return found.sum, found

    return jax.grad(loss, has_aux=True)(params)


def value(objective, target, batch, params=None):
    """Gradient and loss."""
    params = objective.init(KEY, common.network(target), {}) if params is None else params
    return traced(objective, target.graph, target.params, params, jnp.asarray(common.vocabulary()), batch)


@pytest.mark.pitfall("Megatron-LM#3159,#1532,#1661; Megatron-Bridge#6103; miles#3219")
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_packed_documents_are_apart_and_every_parameter_gets_gradient(target, name):
    made, subject = common.documents(target, 3), objective(name, target)
    gradient, packed = value(subject, target, stored(target, made))
    parts = [value(subject, target, stored(target, [document]))[1] for document in made]
    assert float(packed.weight) == sum(float(p.weight) for p in parts) > 10
    assert float(packed.sum) == pytest.approx(sum(float(p.sum) for p in parts), rel=1e-4)
    for key, (top, bottom) in packed.metrics.items():
        assert float(top) == pytest.approx(sum(float(p.metrics[key][0]) for p in parts), rel=1e-4, abs=1e-4)
        assert float(bottom) == sum(float(p.metrics[key][1]) for p in parts)
    dead = [jax.tree_util.keystr(k) for k, g in jax.tree_util.tree_leaves_with_path(gradient) if not jnp.any(g != 0)]
    assert not dead
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(gradient))


@pytest.mark.pitfall("SpecForge#895,#885")
def test_only_the_planted_token_carries_loss(target):
    """All but the last token are the prompt: each step reaches it from one position, and loses what it should there."""
    tokens = np.asarray([3, 7, 9, 4, 8, 5, 3, 6, 7, 8], np.int32)
    last = len(tokens) - 1
    batch = stored(target, [Document(tokens, last)])
    carries = np.argwhere(np.asarray(drafted(batch, STEPS))[0])
    assert {tuple(at) for at in carries} == {(last - 2 - k, k) for k in range(STEPS)}
    subject = objective("eagle3", target)
    params = subject.init(KEY, common.network(target), {})
    _, loss = value(subject, target, batch, params)
    assert float(loss.weight) == 1 and {float(loss.metrics[name][1]) for name in loss.metrics} == {1.0}
    vocab = jnp.asarray(common.vocabulary())
    net = assemble(subject.config, params, common.network(target), vocab)
    taps = {tap: jnp.asarray(batch.taps[str(tap)], jnp.float32) for tap in TAPS}
    _, hidden = net.unrolled(*map(jnp.asarray, (batch.tokens, net.fuse(taps), batch.positions, batch.segments)), STEPS)
    log_p = jax.nn.log_softmax(common.network(target).logits(jnp.asarray(batch.normed[0, last - 1], jnp.float32)))[
        vocab
    ]
    wanted = 0.0
    for k in range(STEPS):
        log_q = jax.nn.log_softmax(net.logits(hidden[k][0, last - 2 - k]))
        wanted -= 0.8**k * float(jnp.sum(jnp.exp(log_p) * log_q))
        overlap = float(jnp.sum(jnp.exp(jnp.minimum(log_p, log_q))))
        assert float(loss.metrics[f"alpha_{k}" if k else "alpha"][0]) == pytest.approx(overlap, rel=1e-3)
    assert float(loss.sum) == pytest.approx(wanted, rel=1e-4)


def test_every_step_of_training_time_test_gets_gradient(target):
    batch, vocab = stored(target, common.documents(target, 3)), jnp.asarray(common.vocabulary())
    subjects = [objective("eagle3", target, steps=steps) for steps in (1, 2, 3)]
    params = subjects[0].init(KEY, common.network(target), {})

    @jax.jit
    def gradients(target_params, params, batch):
        def loss(params, subject):
            return subject.loss(params, {"vocab": vocab}, merge(target.graph, target_params), batch, KEY).sum

        return [jax.grad(loss)(params, subject) for subject in subjects]

    one, two, three = gradients(target.params, params, batch)
    for name, before, after in (("second", one, two), ("third", two, three)):
        added = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, after)
        dead = [jax.tree_util.keystr(k) for k, size in jax.tree_util.tree_leaves_with_path(added) if size == 0]
        assert not dead, f"the {name} step adds nothing to {dead}"


@pytest.mark.pitfall("EAGLE cnets1 / hidden off-by-one (EAGLE issues, tpu-inference#782)")
def test_a_feature_pairs_with_the_token_behind_it(target):
    """Where features are embeddings, a draft that passes its token's on is right; for any other shift it is not."""
    subject = objective("eagle", target, law_weight=0.0)
    width = target.config.hidden_size
    params = jax.tree.map(jnp.zeros_like, subject.init(KEY, common.network(target), {}))
    params["fc"]["kernel"] = params["fc"]["kernel"].at[:width].set(jnp.eye(width))
    batch = stored(target, common.documents(target, 3))
    features = np.asarray(target.params["embed"]["embedding"])[batch.tokens].astype(batch.normed.dtype)
    _, loss = value(subject, target, batch.replace(normed=features), params)
    assert float(loss.weight) > 10 and float(loss.mean) < 1e-4
    for shift in (-1, 1):
        _, moved = value(subject, target, batch.replace(normed=np.roll(features, shift, 1)), params)
        assert float(moved.mean) > 1e-2


def test_a_head_of_its_own_is_trained(target):
    """It starts as the target's, so the loss is that of the shared one; only then does it get gradient."""
    batch, vocab = stored(target, common.documents(target, 3)), jnp.asarray(common.vocabulary())
    shared, own = (objective("eagle3", target, own_head=own_head) for own_head in (False, True))
    params = own.init(KEY, common.network(target), {"vocab": vocab})
    gradient, loss = value(own, target, batch, params)
    head = params.pop("lm_head")
    without, same = value(shared, target, batch, params)
    assert float(loss.sum) == pytest.approx(float(same.sum), rel=1e-5)
    slope = gradient.pop("lm_head")["kernel"]
    for found, wanted in zip(jax.tree.leaves(gradient), jax.tree.leaves(without), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    # Along its own gradient the loss moves as the gradient says.
    step = 1e-2 / float(jnp.linalg.norm(slope))
    _, moved = value(own, target, batch, {**params, "lm_head": {"kernel": head["kernel"] + step * slope}})
    assert float(moved.sum - loss.sum) == pytest.approx(step * float(jnp.sum(slope**2)), rel=0.05)
    assert own.export(params, {}, {}).shares == ("embed",) and shared.export(params, {}, {}).shares == ("embed", "head")


def test_noise_is_in_the_features(target):
    batch = stored(target, common.documents(target, 1))
    clean, noisy = (value(objective("eagle", target, noise=noise), target, batch)[1] for noise in (0.0, 0.02))
    assert float(clean.sum) != float(noisy.sum)
    assert float(noisy.sum) == pytest.approx(float(clean.sum), rel=0.1)


def test_noise_is_as_wide_as_a_document_is_short():
    """As in the authors' code, 0.2 * 512 / n; packing several into a row does not narrow it."""
    batch = lay_out([[Document(np.arange(n, dtype=np.int32), 1) for n in (64, 16)]], 96)
    noise = np.abs(np.asarray(feature_noise(KEY, jnp.zeros((1, 96, 32)), batch.segments, 0.2)))[0]
    for part, n in ((noise[:64], 64), (noise[64:80], 16)):
        half = 0.2 * 512 / n / 2
        assert 0.98 * half < part.max() <= half and part.mean() == pytest.approx(half / 2, rel=0.1)


def test_what_the_store_lacks_is_named(target):
    text = lay_out([common.documents(target, 1)], LENGTH)
    with pytest.raises(ValueError, match="hidden-state store, not text"):
        value(objective("eagle", target), target, text)
    batch = stored(target, common.documents(target, 1))
    with pytest.raises(ValueError, match=r"lacks the taps 1, 2 \(it has 0\)"):
        value(objective("eagle3", target), target, batch.replace(taps={"0": batch.taps["0"]}))


def test_a_bad_setting_is_refused(target):
    with pytest.raises(ValueError, match="steps=0; expected 1 or more"):
        objective("eagle3", target, steps=0)
    with pytest.raises(ValueError, match="a target of 2 layers is too shallow"):
        OBJECTIVES["eagle3"](target, intermediate_size=48, draft_vocab=16)
    with pytest.raises(ValueError, match=r"'fc_norms' is unknown; expected some of norm_before_fc"):
        OBJECTIVES["eagle3"](target, intermediate_size=48, draft_vocab=16, taps=TAPS, norms=("fc_norms",))
