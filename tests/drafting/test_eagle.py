"""EAGLE-1, 2 and 3 in the loop: the contract, the law, the tree against a plain search, drafting against training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import decoding
from specjax.decoding import Keys, Loop, Request, Weights
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.models import causal_view, graph, merge
from specjax.models.eagle import Eagle3Config, EagleConfig, assemble, draft_layer
from specjax.testing import contract
from specjax.testing.markov import markov_config, markov_graph, markov_params, random_law
from specjax.training.data import Document, lay_out
from specjax.training.objectives.eagle import EagleRegression
from specjax.training.objectives.eagle3 import TrainingTimeTest
from specjax.training.objectives.rollout import drafted
from specjax.verification import Greedy, Recursive
from tests.contract.test_contract import VOCAB, config, target_params

LAYER = draft_layer(config(2), intermediate_size=24, head_size=VOCAB)
TAPS = (0, 1, 2)
NETWORKS = {
    "eagle": EagleConfig(layer=LAYER),
    "eagle3": Eagle3Config(layer=LAYER, taps=TAPS, target_hidden_size=16, norm_output=True, fc_norm=True),
}
OBJECTIVES = {
    "eagle": EagleRegression(NETWORKS["eagle"], law_weight=1.0, noise=0.0),
    "eagle3": TrainingTimeTest(NETWORKS["eagle3"], steps=3),
}
DRAFTERS = {
    "eagle": ("eagle", EagleChain(NETWORKS["eagle"], num_nodes=3)),
    "eagle2": ("eagle", EagleTree(NETWORKS["eagle"], num_nodes=7, levels=3, top_k=3)),
    "eagle3": ("eagle3", EagleChain(NETWORKS["eagle3"], num_nodes=3)),
    "eagle3_tree": ("eagle3", EagleTree(NETWORKS["eagle3"], num_nodes=5, levels=3, top_k=2)),
}
EVERY_ID = {"vocab": jnp.arange(VOCAB)}
GRAPH = graph(config(2))[0]


@functools.cache
def greedy_text():
    """What the target writes, as a store would hold it but in float32."""
    sub = contract.Subject(GRAPH, target_params(), DRAFTERS["eagle"][1], {}, {})
    requests = [Request(tuple(np.random.default_rng(i).integers(0, VOCAB, 4 + i).tolist()), 96, id=i) for i in range(6)]
    done = contract.complete(*sub.autoregressive(), requests)
    pairs = zip(requests, done, strict=True)
    texts = [Document(np.asarray([*r.prompt, *c.tokens], np.int32), len(r.prompt)) for r, c in pairs]
    batch = jax.tree.map(jnp.asarray, lay_out([[text] for text in texts], 108))

    @jax.jit
    def states(params, batch):
        target = merge(GRAPH, params)
        out = target.full(batch.tokens, batch.positions, batch.segments, taps=(*TAPS, "normed"))
        lse = jax.nn.logsumexp(target.logits(out.taps["normed"]), -1)
        return batch.replace(normed=out.taps["normed"], lse=lse, taps={str(tap): out.taps[tap] for tap in TAPS})

    return states(target_params(), batch)


@functools.cache
def trained(network):
    """A head that has learnt the greedy text."""
    objective, optimizer = OBJECTIVES[network], optax.adam(1e-2)

    @jax.jit
    def train(target, batch):
        def loss(params):
            found = objective.loss(params, EVERY_ID, merge(GRAPH, target), batch, jax.random.key(0))
            return found.mean, found.metrics

        def body(_, carry):
            params, state, _ = carry
            (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, metrics

        params = objective.init(jax.random.key(1), merge(GRAPH, target), EVERY_ID)
        metrics = jax.tree.map(jnp.zeros_like, jax.eval_shape(loss, params)[1])
        return jax.lax.fori_loop(0, 150, body, (params, optimizer.init(params), metrics))[::2]

    params, metrics = train(target_params(), greedy_text())
    assert metrics["match"][0] / metrics["match"][1] > 0.5
    return params


def subject(name):
    network, drafter = DRAFTERS[name]
    return contract.Subject(GRAPH, target_params(), drafter, trained(network), {}, eos=(2, 5))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "eagle3", "eagle3_tree")]


@pytest.mark.parametrize("name", ["eagle2", *SLOW])
def test_contract(name):
    sub = subject(name)
    contract.check_drafter(sub, Recursive)
    # Equality would be empty if nothing were ever accepted.
    requests = [Request(tuple(np.arange(n) % VOCAB), 60, id=n) for n in (20, 30, 40)]
    done = contract.check_equals_autoregressive(dataclasses.replace(sub, eos=()), Recursive, requests)
    assert sum(c.accepted[2:].sum() for c in done) > 0


@pytest.mark.pitfall("SpecForge#455,#473; dflash#41")
@pytest.mark.parametrize("network", ["eagle", "eagle3"])
def test_the_loop_accepts_what_training_measures(network):
    """Step by step: a chain from any point of the greedy text keeps as many tokens as the rollout from there hits."""
    drafter, params, batch = DRAFTERS[network][1], trained(network), greedy_text()
    hits = rollout_hits(NETWORKS[network], params, batch)
    assert 0.2 < hits[drafted(batch, 3)].mean() < 1
    prompts = [tuple(np.asarray(row[: 4 + i]).tolist()) for i, row in enumerate(batch.tokens[:3])]
    loop = Loop(GRAPH, drafter, Greedy(3), (), chunk=16)
    weights = Weights(target_params(), params, {})
    state = decoding.prefill(loop, weights, [Request(p, 90, id=0) for p in prompts], context=112, seed=0, buffer=128)
    seen = []
    while not bool(jnp.all(state.done)):
        root, before = np.asarray(state.length) - 1, np.asarray(state.statistics.emitted)
        state = loop.step(weights, state)
        kept = np.asarray(state.statistics.emitted) - before - 1
        for row in np.flatnonzero(~np.asarray(state.done)):
            # The pair of the root is the one before it: feature root - 1, token root.
            seen.append((row, root[row] - 1, kept[row]))

    def apart(hits):
        """At how many roots the loop keeps another number of tokens."""
        return sum(kept != np.cumprod(hits[row, place]).sum() for row, place, kept in seen)

    assert apart(hits) == 0 and len(seen) > 60
    # What training reports as accepted is this very count.
    if network == "eagle3":
        objective = OBJECTIVES[network]
        count = jax.jit(lambda p, t, b: objective.loss(p, EVERY_ID, merge(GRAPH, t), b, None).metrics["accepted"][0])
        first = np.cumprod(hits & np.asarray(drafted(batch, 3)), axis=-1).sum(-1)
        assert float(count(params, target_params(), batch)) == first.sum()
    # A gate that these faults passed would prove nothing.
    shape, taps = batch.tokens.shape, batch.taps
    wrong = {
        "mask: no token sees another": batch.replace(segments=jnp.broadcast_to(jnp.arange(1, shape[1] + 1), shape)),
        "positions stretched": batch.replace(positions=3 * batch.positions),
        "features one too late": batch.replace(
            normed=jnp.roll(batch.normed, 1, 1), taps={tap: jnp.roll(x, 1, 1) for tap, x in taps.items()}
        ),
    }
    if network == "eagle3":
        wrong["taps in another order"] = batch.replace(taps=dict(zip(taps, reversed(taps.values()), strict=True)))
    found = {name: apart(rollout_hits(NETWORKS[network], params, bad)) for name, bad in wrong.items()}
    shifted = np.roll(np.arange(VOCAB), 1)
    found["draft ids one off"] = apart(rollout_hits(NETWORKS[network], params, batch, shifted))
    assert min(found.values()) >= 3, found


@functools.partial(jax.jit, static_argnames=("config",))
def rollout_choices(config, target, params, batch):
    net = assemble(config, params, merge(GRAPH, target))
    features = net.fuse({"normed": batch.normed, **{int(tap): x for tap, x in batch.taps.items()}})
    _, hidden = net.unrolled(batch.tokens, features, batch.positions, batch.segments, 3)
    return jnp.stack([jnp.argmax(net.logits(h), -1) for h in hidden], axis=-1)


def rollout_hits(config, params, batch, ids=None):
    """`[B, T, 3]`: whether the draft's first choice at step k from position t is the text's token t + 2 + k.

    `ids` are the target's of the draft's ids, the same where there are none.
    """
    chosen, tokens = np.asarray(rollout_choices(config, target_params(), params, batch)), np.asarray(batch.tokens)
    chosen = chosen if ids is None else ids[chosen]
    text = np.pad(tokens, ((0, 0), (0, 4)), constant_values=-1)
    return np.stack([chosen[..., k] == text[:, 2 + k : 2 + k + tokens.shape[1]] for k in range(3)], axis=-1)


@functools.partial(jax.jit, static_argnames=("drafter",))
def propose(drafter, weights, state):
    target, keys = merge(GRAPH, weights.target), Keys(state.request, state.length)
    return drafter.propose(weights.drafter, {}, target, state.cache, state.drafter, state.context, keys)[0]


@functools.partial(jax.jit, static_argnames=("drafter",))
def log_laws(drafter, weights, state, path):
    """`[B, 3, V]`: behind the root, and behind each token of a path `[B, 2]`, by single passes."""
    net = drafter.network(weights.drafter, {}, merge(GRAPH, weights.target))
    feature, hidden, own = drafter.catch_up(net, state.drafter, state.context)
    read = [hidden]
    for i in range(2):
        view = causal_view(state.context.length - 1 + i, 1)
        features, hidden, own = net.cached(path[:, i : i + 1], feature[:, None], own, view)
        feature = features[:, 0]
        read.append(hidden[:, 0])
    return jax.nn.log_softmax(net.logits(jnp.stack(read, 1)), -1)


def test_the_tree_is_that_of_a_plain_search():
    """Every candidate's law from a chain of its own, without masks, pools or shared slots."""
    network, drafter = DRAFTERS["eagle2"]
    sub = subject("eagle2")
    loop, weights = sub.loop(Greedy)
    requests = [Request(tuple(np.random.default_rng(9).integers(0, VOCAB, n).tolist()), 40, id=n) for n in (3, 7, 20)]
    state = decoding.prefill(loop, weights, requests, context=112, seed=0, buffer=128)
    for _ in range(2):
        state = loop.step(weights, state)

    draft = propose(drafter, weights, state)
    every = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    laws = {path: np.asarray(log_laws(drafter, weights, state, jnp.asarray([path] * 3))) for path in every}
    for row in range(3):
        if bool(state.done[row]):
            continue
        found, expected = paths(draft, row), search(laws, row, drafter)
        assert found == expected
    parents = np.asarray(draft.parents)
    assert not (parents[0] == parents[1:]).all(), "the rows' trees have one shape: the search proves little"


def paths(draft, row):
    """The nodes of a row as token paths."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(np.asarray(draft.tokens[row]), np.asarray(draft.parents[row]), strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), int(token)))
    assert len(set(made)) == len(made)
    return set(made)


def search(laws, row, drafter):
    """EAGLE-2's tree from the laws behind every path of two tokens."""

    def law(path):
        a, b = (*path, 0, 0)[:2]
        return laws[a, b][row, len(path)]

    level, pool = {(): 0.0}, {}
    for _ in range(drafter.levels):
        fresh = {}
        for path, score in level.items():
            for token in np.argsort(-law(path))[: drafter.top_k]:
                fresh[(*path, int(token))] = score + law(path)[token]
        pool |= fresh
        level = dict(sorted(fresh.items(), key=lambda item: -item[1])[: drafter.top_k])
    return set(sorted(pool, key=lambda path: -pool[path])[: drafter.num_nodes])


def test_a_sampled_chain_records_the_laws_it_was_drawn_from():
    drafter = DRAFTERS["eagle"][1]
    loop, weights = subject("eagle").loop(Recursive)
    prompts = [tuple(np.random.default_rng(n).integers(0, VOCAB, n).tolist()) for n in (3, 7, 20)]
    requests = [Request(prompt, 40, temperature=0.7, id=i) for i, prompt in enumerate(prompts)]
    state = decoding.prefill(loop, weights, requests, context=112, seed=0, buffer=128)
    draft = propose(drafter, weights, state)
    assert draft.is_chain and (np.asarray(draft.law) == np.arange(3)).all()
    laws = jax.nn.log_softmax(log_laws(drafter, weights, state, draft.tokens[:, :2]) / 0.7, -1)
    np.testing.assert_allclose(np.asarray(draft.laws), np.asarray(laws), atol=1e-4)


@pytest.mark.slow
def test_sampled_chain_keeps_the_law():
    layer = draft_layer(markov_config(4), intermediate_size=2, head_size=4)
    drafter = EagleChain(EagleConfig(layer=layer), num_nodes=2)
    target = merge(markov_graph(4), markov_params(random_law(4, 0)))
    params, tables = drafter.init_params(jax.random.key(1), target)
    assert contract.law_p_value(drafter, params, tables, Recursive, draws=1 << 16) > 1e-6


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EagleChain(NETWORKS["eagle"], num_nodes=0), "num_nodes=0; expected at least 1"),
        (lambda: EagleTree(NETWORKS["eagle"], num_nodes=22, levels=3, top_k=3), "num_nodes=22; expected 3 .* to 21"),
        (lambda: EagleTree(NETWORKS["eagle"], num_nodes=2, levels=3, top_k=3), "num_nodes=2; expected 3"),
        (lambda: EagleTree(NETWORKS["eagle"], levels=0), "levels=0, top_k=4; expected at least 1 each"),
        (lambda: EagleTree(NETWORKS["eagle"], top_k=14), "top_k=14 exceeds the draft vocabulary of 13"),
    ],
)
def test_a_draft_that_cannot_be_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
