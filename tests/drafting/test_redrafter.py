"""ReDrafter: the recurrence as the paper writes it, beams as one tree, and one position in training and decoding."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import decoding
from specjax.checkpoints.drafters import load_drafter, save_drafter, target_head
from specjax.checkpoints.formats import read_head
from specjax.checkpoints.formats.tensors import write_tensors
from specjax.decoding import Request
from specjax.drafting import RecurrentDrafter
from specjax.models import merge
from specjax.models.redrafter import RedrafterConfig, redrafter_graph
from specjax.testing import contract, tiny_target
from specjax.training.data import Document, lay_out
from specjax.training.objectives import RecurrentDrafting
from specjax.training.objectives.heads import HeadsLoss
from specjax.verification import Greedy, OneHot, Recursive
from tests.drafting import common

VOCAB = jnp.asarray([0, 1, 3, 4, 5, 7, 9, 10, 12], jnp.int32)
LEVELS, BEAMS = 3, 3
CONFIG = RedrafterConfig(hidden_size=16, vocab_size=common.VOCAB, head_size=len(VOCAB), exit_dim=24)
TREE = RecurrentDrafter(CONFIG, LEVELS * BEAMS, levels=LEVELS, beams=BEAMS)
CHAIN = RecurrentDrafter(CONFIG, LEVELS, levels=LEVELS, beams=1)


@functools.cache
def subject():
    """Random parameters: at the start the recurrence would not be read."""
    made = common.subject(TREE, layers=1)
    lm_head = {"kernel": target_head(common.config(1), made.target, VOCAB)}
    leaves, structure = jax.tree.flatten({k: v for k, v in made.params.items() if k != "lm_head"})
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(structure, noisy) | {"lm_head": lm_head}
    return dataclasses.replace(made, params=params, tables={"vocab": VOCAB})


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(params, embed, hidden, path):
    """Logits behind a path of tokens, the root first, as the paper writes them; in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    state = np.zeros_like(hidden)
    for token in path:
        state = silu(embed[token] @ p["rnn_w"]["kernel"] + state @ p["rnn_u"]["kernel"] + p["rnn_u"]["bias"])
    x = np.concatenate([hidden, state])
    if "input_proj" in p:
        x = x @ p["input_proj"]["kernel"] + p["input_proj"]["bias"]
    for j in sorted(p["blocks"]):
        x = x + silu(x @ p["blocks"][j]["linear"]["kernel"] + p["blocks"][j]["linear"]["bias"])
    return (x @ p["out"]["kernel"] if "out" in p else x) @ p["lm_head"]["kernel"]


def beam_search(params, embed, hidden, root):
    """Every prefix of the beams left at the end, with its log-probability."""
    vocab, beams = np.asarray(VOCAB), [((), 0.0)]
    seen = {}
    for _ in range(LEVELS):
        ends = []
        for path, worth in beams:
            logits = by_hand(params, embed, hidden, (root, *path))
            law = logits - np.logaddexp.reduce(logits)
            ends += [((*path, int(vocab[i])), worth + law[i]) for i in range(len(vocab))]
        beams = sorted(ends, key=lambda end: -end[1])[:BEAMS]
        seen |= dict(beams)
    return {path[:n]: seen[path[:n]] for path, _ in beams for n in range(1, LEVELS + 1)}


def test_the_tree_is_the_beams_of_the_papers_recurrence():
    sub = subject()
    loop, weights = sub.loop(OneHot)
    prompts = [(1, 3, 4, 1), (7, 0, 2), (12, 9)]
    state = decoding.prefill(loop, weights, [Request(p, 8) for p in prompts], context=64, seed=0)
    target = merge(sub.graph, sub.target)
    few = dataclasses.replace(TREE, num_nodes=5)

    @jax.jit
    def drafts(s):
        arguments = (sub.params, sub.tables, target, s.cache, s.drafter, s.context, None)
        return [d.propose(*arguments)[0] for d in (TREE, few)]

    whole, cut = jax.device_get(drafts(state))
    embed = np.asarray(sub.target["embed"]["embedding"], np.float64)
    shared = 0
    for row, prompt in enumerate(prompts):
        hidden = np.asarray(state.drafter.hidden[row], np.float64)
        wanted = beam_search(sub.params, embed, hidden, int(state.tokens[row, len(prompt)]))
        found = paths(whole, row)
        assert set(found) == set(wanted) and len(found) == len(wanted)
        shared += LEVELS * BEAMS - len(wanted)
        best = sorted(wanted, key=lambda path: -wanted[path])[: few.num_nodes]
        assert set(paths(cut, row)) == set(best)
    assert shared > 0, "no beams shared a prefix: the test shows nothing of the tree"


def paths(draft, row):
    """Tokens from the root to each valid node."""
    found = {-1: ()}
    for node, (token, parent) in enumerate(zip(draft.tokens[row], draft.parents[row], strict=True)):
        if draft.valid[row, node]:
            found[node] = (*found[int(parent)], int(token))
    return [path for node, path in found.items() if node >= 0]


@functools.cache
def fitted():
    """A network trained for a moment on what the target wrote, the texts, and what the objective says of them."""
    sub = dataclasses.replace(subject(), drafter=CHAIN)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, common.VOCAB, rng.integers(3, 7)).tolist()) for _ in range(16)]
    done = contract.complete(*dataclasses.replace(sub, eos=()).autoregressive(), [Request(p, 8) for p in prompts])
    documents = [Document(np.asarray([*p, *d.tokens], np.int32), len(p)) for p, d in zip(prompts, done, strict=True)]
    batch = jax.tree.map(jnp.asarray, lay_out([documents[:8], documents[8:]], 128))
    out = merge(sub.graph, sub.target).full(batch.tokens, batch.positions, batch.segments, taps=("normed",))
    batch = batch.replace(normed=out.taps["normed"])
    objective = RecurrentDrafting(CONFIG, LEVELS, HeadsLoss(decay=1.0, ranks=1))
    params, optimizer = {k: v for k, v in sub.params.items() if k != "lm_head"}, optax.adam(1e-2)

    def loss(params, batch):
        return objective.loss(params, sub.tables, merge(sub.graph, sub.target), batch, None)

    def update(carry, _):
        params, state = carry
        grads = jax.grad(lambda p: loss(p, batch).mean)(params)
        updates, state = optimizer.update(grads, state)
        moved = jax.tree.map(lambda g: jnp.any(g != 0), grads)
        return (optax.apply_updates(params, updates), state), moved

    (params, _), moved = jax.jit(lambda start: jax.lax.scan(update, start, length=40))((params, optimizer.init(params)))
    served = dataclasses.replace(sub, params=params | {"lm_head": sub.params["lm_head"]}, eos=())
    return served, documents, batch, jax.jit(functools.partial(loss, params)), moved


def test_every_parameter_gets_gradient():
    moved = fitted()[4]
    dead = [jax.tree_util.keystr(k) for k, g in jax.tree_util.tree_leaves_with_path(moved) if not bool(g[0])]
    assert not dead and {"rnn_w", "rnn_u", "input_proj", "blocks", "out"} == set(moved)


@pytest.mark.pitfall("SpecForge#455,#473; dflash#41")
def test_acceptance_in_training_is_acceptance_in_decoding():
    """One step of the loop from every position of a greedy text accepts what the objective counts there."""
    served, documents, batch, loss, _ = fitted()
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
    off = loss(batch.replace(normed=jnp.roll(batch.normed, 1, axis=1))).metrics
    assert abs(float(off["accepted"][0]) - accepted.sum()) > 5


@pytest.mark.slow
def test_a_tree_decodes_as_the_target_does():
    served, documents, *_ = fitted()
    sub = dataclasses.replace(served, drafter=TREE, eos=(2, 5))
    requests = [Request(tuple(d.tokens[: d.prompt_length].tolist()), 8) for d in documents[:6]]
    done = contract.check_equals_autoregressive(sub, Recursive, requests)
    assert sum(c.accepted[1:].sum() for c in done) > 0


@pytest.mark.parametrize("drafter", [TREE, CHAIN])
def test_contract(drafter):
    contract.check_drafter(dataclasses.replace(fitted()[0], drafter=drafter, eos=(2, 5)), Recursive)


def test_law_of_whole_decodes():
    served = dataclasses.replace(fitted()[0], drafter=TREE)
    assert common.law_p_value(served, Recursive, prompt=(1, 3, 4, 1, 3)) > common.FALSE_ALARM


def published(target, layers=2, inner=24):
    """Tensors and config as the authors write them."""
    rng, d, v = np.random.default_rng(0), target.config.hidden_size, target.config.vocab_size

    def drawn(*shape):
        return (rng.normal(size=shape) * 0.3).astype(np.float32)

    tensors = {"rnn_w.weight": drawn(d, d), "rnn_u.weight": drawn(d, d), "rnn_u.bias": drawn(d)}
    tensors |= {"input_proj.weight": drawn(inner, 2 * d), "input_proj.bias": drawn(inner)}
    for j in range(layers):
        tensors |= {f"lm_head.{j}.linear.weight": drawn(inner, inner), f"lm_head.{j}.linear.bias": drawn(inner)}
    tensors[f"lm_head.{layers}.weight"] = drawn(v, inner)
    sizes = {"vocab_size": v, "hidden_size": d, "exit_dim": inner, "num_draft_layers": layers, "rnn": True}
    return tensors, {"model_type": "recurrent_drafting_drafter", **sizes}


def write(directory, tensors, config):
    directory.mkdir(parents=True)
    write_tensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_published_layout_says_what_its_authors_code_says(tmp_path):
    target = tiny_target(layers=1, width=16)
    tensors, config = published(target)
    saved = read_head(write(tmp_path / "theirs", tensors, config), target)
    assert (saved.method, saved.config.num_layers, saved.config.exit_dim) == ("redrafter", 2, 24)
    network = merge(redrafter_graph(saved.config)[0], saved.params)
    embed = np.asarray(target.params["embed"]["embedding"])
    hidden, path, state = np.random.default_rng(1).normal(size=16).astype(np.float32), (5, 80, 7), jnp.zeros(16)
    # torch keeps [out, in]; their state is SiLU(U s + W e) with the bias in U.
    told = np.zeros(16)
    for token in path:
        state = network.advance(state, jnp.asarray(embed[token]))
        told = silu(tensors["rnn_u.weight"] @ told + tensors["rnn_u.bias"] + tensors["rnn_w.weight"] @ embed[token])
        x = tensors["input_proj.weight"] @ np.concatenate([hidden, told]) + tensors["input_proj.bias"]
        for j in range(2):
            x = x + silu(tensors[f"lm_head.{j}.linear.weight"] @ x + tensors[f"lm_head.{j}.linear.bias"])
        mine = np.asarray(network.logits(network(jnp.asarray(hidden), state)))
        np.testing.assert_allclose(mine, tensors["lm_head.2.weight"] @ x, rtol=1e-4, atol=1e-4)
    save_drafter(tmp_path / "ours", saved, target, dtype="float32")
    again = load_drafter(tmp_path / "ours", target)
    assert again.config == saved.config
    assert all(map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(saved.params)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rnn_u.bias": None}, "missing rnn_u.bias"),
        ({"rnn_v.weight": np.ones(2, np.float32)}, "unexpected rnn_v.weight"),
        ({"lm_head.2.weight": np.ones((9, 24), np.float32)}, r"has shape \[9, 24\], expected \[259, 24\]"),
        ({"rnn_w.weight": np.full((16, 16), np.nan, np.float32)}, "NaN or infinity in rnn_w.weight"),
        ({"lm_head.0.linear.weight": None}, "missing lm_head.0.linear.weight"),
        ({f"rnn_{n}": None for n in ("w.weight", "u.weight", "u.bias")}, "says rnn=True, the tensors say False"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path, change, says):
    target = tiny_target(layers=1, width=16)
    tensors, config = published(target)
    kept = {name: value for name, value in (tensors | change).items() if value is not None}
    with pytest.raises(ValueError, match=says):
        read_head(write(tmp_path / "theirs", kept, config), target)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_nodes": 10, "levels": 3, "beams": 3}, "num_nodes=10; expected 3 .one beam. to 9"),
        ({"levels": 0}, "levels=0, beams=3; expected at least 1 each"),
        ({"num_nodes": 20, "levels": 2, "beams": 10}, "beams=10 exceeds the draft vocabulary of 9"),
    ],
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(ValueError, match=says):
        RecurrentDrafter(CONFIG, **options)
    with pytest.raises(ValueError, match="own_head=True: training keeps the target's"):
        RecurrentDrafting(dataclasses.replace(CONFIG, own_head=True))
