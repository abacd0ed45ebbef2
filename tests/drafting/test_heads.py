"""Medusa and Hydra: what they draft, their trees, and that training and decoding mean the same position."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import decoding
from specjax.checkpoints.drafters import target_head
from specjax.decoding import Request
from specjax.decoding.tree import TreeSpec, from_choices
from specjax.drafting import Hydra, Medusa
from specjax.drafting.heads import best_tree, choose_tree, expected_length
from specjax.drafting.hydra import HydraPlusPlus
from specjax.models import merge
from specjax.models.medusa import HydraConfig, MedusaConfig, heads_graph
from specjax.testing import contract
from specjax.training import objectives
from specjax.training.data import Document, lay_out
from specjax.training.objectives.heads import HeadsLoss
from specjax.verification import Greedy, OneHot, Recursive
from tests.drafting import common

HEADS, DRAFT_VOCAB = 3, 9
CHAIN = TreeSpec(tuple(range(-1, HEADS - 1)))
# Rank 2 of the root is left out, one branch is deeper than the others.
TREE = from_choices([(0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (3, 1), (0, 1, 0), (1, 0, 0), (1, 0, 2)])
NAMES = ["medusa", "hydra", "hydra++"]


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def shapes(**changes):
    made = {"hidden_size": 16, "vocab_size": common.VOCAB, "head_size": DRAFT_VOCAB, "num_heads": HEADS}
    return made | changes


def drafter(name, tree=TREE, **changes):
    if name == "medusa":
        return Medusa(MedusaConfig(**shapes(**changes)), tree)
    if name == "hydra":
        return Hydra(HydraConfig(**shapes(**changes), num_layers=2, embed_rank=4, residual="hidden"), tree)
    return HydraPlusPlus(HydraConfig(**shapes(**changes), num_layers=2, prefix=common.config(1)), tree)


def noisy(params, seed=3, scale=0.3):
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        structure, [x + scale * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    )


def subject(name, tree=TREE, **changes):
    made = common.subject(drafter(name, tree, **changes))
    vocab = jnp.asarray([0, 1, 3, 4, 5, 7, 9, 10, 12], jnp.int32)
    lm_head = {"kernel": target_head(common.config(), made.target, vocab)}
    params = noisy({k: v for k, v in made.params.items() if k != "lm_head"}) | {"lm_head": lm_head}
    return dataclasses.replace(made, params=params, tables={"vocab": vocab})


@pytest.mark.slow
@pytest.mark.parametrize("rule", [OneHot, Recursive])
@pytest.mark.parametrize("name", NAMES)
def test_law_of_whole_decodes(name, rule):
    served = dataclasses.replace(fitted(name)[0], drafter=drafter(name))
    assert common.law_p_value(served, rule, prompt=(1, 3, 4, 1, 3)) > common.FALSE_ALARM


def silu(x):
    return x / (1 + np.exp(-x))


def affine(part, x):
    return x @ np.asarray(part["kernel"], np.float64) + np.asarray(part["bias"], np.float64)


def by_hand(name, sub, hidden, root, path):
    """Logits at the end of a path of tokens, as the papers write them."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), sub.params)
    head, embed = params["heads"][len(path)], np.asarray(sub.target["embed"]["embedding"], np.float64)
    x = hidden
    if name != "medusa":
        read = [embed[token] for token in (root, *path)]
        read = [x @ params["embed_in"]["kernel"] for x in read] if name == "hydra" else read
        whole = np.concatenate([hidden, *read])
        kept = hidden if name == "hydra" else affine(head["grounded"]["residual"], whole)
        x = kept + silu(affine(head["grounded"]["linear"], whole))
    for i in sorted(head["blocks"]):
        x = x + silu(affine(head["blocks"][i]["linear"], x))
    return x @ params["lm_head"]["kernel"]


PROCESSED = {"frequency_penalty": 2.0, "suppress_tokens": (4, 10)}


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAMES), ("medusa", PROCESSED), ("hydra", PROCESSED)]
)
def test_nodes_are_the_heads_candidates_of_their_own_path(name, options):
    """Under penalties too: Hydra counts the path, Medusa's heads know the committed text alone."""
    sub = subject(name)
    loop, weights = sub.loop(OneHot)
    prompts = [(1, 3, 4, 1), (7, 0, 2)]
    state = decoding.prefill(loop, weights, [Request(p, 8, **options) for p in prompts], context=64, seed=0)
    target = merge(sub.graph, sub.target)
    propose = jax.jit(
        lambda s: sub.drafter.propose(sub.params, sub.tables, target, s.cache, s.drafter, s.context, None)
    )
    drafted = np.asarray(propose(state)[0].tokens)
    vocab = np.asarray(sub.tables["vocab"])
    for row, prompt in enumerate(prompts):
        tokens = jnp.asarray([prompt])
        out = target.full(tokens, jnp.arange(len(prompt))[None], jnp.ones_like(tokens), taps=("normed",))
        hidden = out.taps["normed"]
        if name == "hydra++":
            network = merge(heads_graph(sub.drafter.config)[0], sub.params)
            hidden = network.prefix.full(hidden, jnp.arange(len(prompt))[None], jnp.ones_like(tokens))
        hidden = np.asarray(hidden[0, -1], np.float64)
        root = int(state.tokens[row, len(prompt)])
        paths = {-1: ()}
        for node, (parent, rank) in enumerate(zip(TREE.parents, TREE.child_ranks, strict=True)):
            logits = by_hand(name, sub, hidden, root, paths[parent])
            if options:
                for token in (root, *(paths[parent] if name == "hydra" else ())):
                    logits = logits - PROCESSED["frequency_penalty"] * (vocab == token)
                logits = np.where(np.isin(vocab, PROCESSED["suppress_tokens"]), -np.inf, logits)
            token = int(vocab[np.argsort(-logits, kind="stable")[rank]])
            assert drafted[row, node] == token, (row, node)
            paths[node] = (*paths[parent], token)


def written(sub):
    """Short texts that the target wrote greedily, as documents: before it begins to repeat itself."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, common.VOCAB, rng.integers(3, 7)).tolist()) for _ in range(16)]
    done = contract.complete(*dataclasses.replace(sub, eos=()).autoregressive(), [Request(p, 8) for p in prompts])
    return [Document(np.asarray([*p, *d.tokens], np.int32), len(p)) for p, d in zip(prompts, done, strict=True)]


@functools.cache
def fitted(name):
    """Heads trained for a moment on what the target wrote, the batch, and what the objective says of it."""
    sub = subject(name, CHAIN)
    documents = written(sub)
    batch = jax.tree.map(jnp.asarray, lay_out([documents[:8], documents[8:]], 128))
    out = merge(sub.graph, sub.target).full(batch.tokens, batch.positions, batch.segments, taps=("normed",))
    batch = batch.replace(normed=out.taps["normed"])
    objective = (objectives.Medusa if name == "medusa" else objectives.Hydra)(sub.drafter.config, HeadsLoss(ranks=1))
    params, optimizer = {k: v for k, v in sub.params.items() if k != "lm_head"}, optax.adam(1e-2)

    def loss(params, batch):
        return objective.loss(params, sub.tables, merge(sub.graph, sub.target), batch, None)

    def update(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(lambda p: loss(p, batch).mean)(params), state)
        return (optax.apply_updates(params, updates), state), None

    train = jax.jit(lambda start: jax.lax.scan(update, start, length=40)[0][0])
    params = train((params, optimizer.init(params)))
    served = dataclasses.replace(sub, params=params | {"lm_head": sub.params["lm_head"]}, eos=())
    return served, documents, batch, jax.jit(functools.partial(loss, params))


@pytest.mark.pitfall("SpecForge#455,#473; dflash#41")
@pytest.mark.parametrize("name", ["medusa", slow("hydra"), "hydra++"])
def test_acceptance_in_training_is_acceptance_in_decoding(name):
    """One step of the loop from every position of a greedy text accepts what the objective counts there."""
    served, documents, batch, loss = fitted(name)
    requests, room = [], []
    for document in documents:
        for t in range(document.prompt_length - 1, len(document.tokens) - 2):
            requests.append(Request(tuple(document.tokens[: t + 1].tolist()), 16))
            room.append(len(document.tokens) - 2 - t)
    loop, weights = served.loop(Greedy)
    state = loop.step(weights, decoding.prefill(loop, weights, requests, context=64, seed=0))
    accepted = np.minimum(np.argmax(state.statistics.accepted, axis=-1), room)
    counted = loss(batch).metrics
    assert set(accepted) == {0, 1, 2, 3}
    assert float(counted["accepted"][0]) == accepted.sum()
    assert float(counted["match_0"][0]) == (accepted > 0).sum()
    assert float(counted["accepted"][1]) == len(requests)
    # Hidden states that are one position off are another experiment.
    for shift in (-1, 1):
        off = loss(batch.replace(normed=jnp.roll(batch.normed, shift, axis=1))).metrics
        assert abs(float(off["accepted"][0]) - accepted.sum()) > 5


@pytest.mark.parametrize("name", [slow("medusa"), slow("hydra"), "hydra++"])
def test_contract(name):
    served, documents, _, _ = fitted(name)
    sub = dataclasses.replace(served, drafter=drafter(name), eos=(2, 5))
    contract.check_drafter(sub, Recursive)
    requests = [Request(tuple(d.tokens[: d.prompt_length].tolist()), 8) for d in documents[:6]]
    done = contract.check_equals_autoregressive(sub, Recursive, requests)
    assert sum(c.accepted[1:].sum() for c in done) > 0


def test_the_best_tree_is_the_best_of_all():
    accuracy = np.asarray([[0.5, 0.3, 0.1], [0.4, 0.35, 0.2]])
    paths = [(r,) for r in range(3)] + list(itertools.product(range(3), repeat=2))
    for nodes in (1, 3, 5, 12):
        grown = expected_length(accuracy, best_tree(accuracy, nodes))
        trees = [c for c in itertools.combinations(paths, nodes) if all(p[:1] in c for p in c)]
        best = max(1 + sum(np.prod([accuracy[d, r] for d, r in enumerate(p)]) for p in tree) for tree in trees)
        assert grown == pytest.approx(best)
    assert best_tree(accuracy, 3) == from_choices([(0,), (1,), (0, 0)])
    # A rank that is never right comes last, whatever its place.
    assert best_tree([[0.0, 0.6, 0.2]], 2) == from_choices([(1,), (2,)])


def test_options_of_the_tree():
    config, accuracy = MedusaConfig(**shapes()), [[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]

    def chosen(tree="chain", nodes=0, choices=(), accuracy=accuracy):
        return choose_tree(config, accuracy, tree=tree, nodes=nodes, choices=choices)

    assert chosen() == CHAIN and chosen(nodes=2).num_nodes == 2
    assert chosen("calibrated", 4) == best_tree(accuracy, 4)
    assert chosen("choices", choices=[(0,), (0, 0)]).depth == 2
    assert [drafter("hydra").draft_passes, drafter("hydra++").draft_passes] == [3, 4]
    for options, says in (
        ({"tree": "bush"}, "tree='bush'; expected 'chain', 'calibrated' or 'choices'"),
        ({"tree": "choices"}, "tree='choices' with 0 choices; give paths"),
        ({"choices": [(0,)]}, "tree='chain' with 1 choices"),
        ({"tree": "calibrated", "nodes": 2, "accuracy": None}, "these heads are not calibrated"),
        ({"tree": "calibrated"}, "nodes=0: 3 heads with 2 ranks give 1 to 14"),
    ):
        with pytest.raises(ValueError, match=says):
            chosen(**options)
    with pytest.raises(ValueError, match="depth 4, but num_heads=3 allows depth 3"):
        Medusa(config, TreeSpec((-1, 0, 1, 2)))
    with pytest.raises(ValueError, match="a node has 10 children, the draft vocabulary only 9 tokens"):
        Medusa(config, from_choices([(9,)]))
    with pytest.raises(ValueError, match="these heads have no prefix layer"):
        HydraPlusPlus(HydraConfig(**shapes()), CHAIN)
    with pytest.raises(ValueError, match="the tree has no nodes"):
        Medusa(config, TreeSpec(()))
    with pytest.raises(ValueError, match="expected probabilities by head and rank"):
        best_tree([[1.5]], 1)
