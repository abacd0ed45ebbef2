"""Multi-token prediction in the loop: the contract, the law, and drafts that equal whole-sequence predictions."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.build import make_drafter
from specjax.checkpoints.drafters import SavedDrafter, save_drafter
from specjax.decoding import Request
from specjax.drafting.mtp import MultiToken
from specjax.models import ModelConfig, RopeConfig, graph, init_decoder, merge
from specjax.models.mtp import MtpConfig, copy_last_layer, init_mtp, mtp_config, mtp_graph
from specjax.testing import contract, tiny_target
from specjax.testing.markov import markov_config, markov_params, random_law
from specjax.training.data import Document, lay_out
from specjax.training.objectives.heads import HeadsLoss, ahead
from specjax.training.objectives.mtp import MultiTokenHeads
from specjax.training.objectives.mtp_pretrain import MultiTokenPretraining
from specjax.training.objectives.mtp_sequential import SequentialPretraining
from specjax.verification import Greedy, Recursive

VOCAB, DEPTH = 13, 3
KINDS = ("independent", "sequential", "shared")


def config() -> ModelConfig:
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
        max_position=1 << 14,
        norm_eps=1e-5,
        query_scale=8**-0.5,
        windows=(None, None),
        ropes=(RopeConfig(),) * 2,
        tie_embeddings=True,
    )


def layers(name: str, target: ModelConfig, depth: int = DEPTH) -> MtpConfig:
    kind: Any = "independent" if name == "independent" else "sequential"
    return mtp_config(target, depth=depth, kind=kind, shared=name == "shared")


@functools.cache
def target() -> tuple[Any, Any]:
    params = jax.tree.map(lambda x: 2.5 * x if x.ndim > 1 else x, init_decoder(config(), jax.random.key(0)))
    return graph(config())[0], params


def subject(name: str, eos: tuple[int, ...] = (2, 5)) -> contract.Subject:
    """Random heads, larger than at initialisation: every depth says something of its own."""
    drafter = MultiToken(layers(name, config()))
    params = jax.tree.map(lambda x: 2.5 * x if x.ndim > 1 else x, init_mtp(drafter.config, jax.random.key(3)))
    return contract.Subject(*target(), drafter, params, {}, eos=eos)


@pytest.mark.parametrize(
    "name", ["shared", *(pytest.param(n, marks=pytest.mark.slow) for n in ("independent", "sequential"))]
)
def test_contract(name: str) -> None:
    contract.check_drafter(subject(name), Recursive)


def predictions(sub: contract.Subject, tokens_t: np.ndarray) -> np.ndarray:
    """`[T, D]`: what depth k = 1..D says at position t, on the true text."""
    config, tokens = sub.drafter.config, jnp.asarray(tokens_t)[None]
    decoder, net = merge(sub.graph, sub.target), merge(mtp_graph(config)[0], sub.params)
    positions, segments = jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)
    stop = config.feature if isinstance(config.feature, int) else None
    taps = decoder.full(tokens, positions, segments, stop=stop, taps=config.taps).taps
    hidden = feature = taps[config.feature]
    said = []
    for k in range(1, config.depth + 1):
        embedded = decoder.embed_tokens(ahead(tokens, k)) if config.kind == "sequential" else None
        hidden = net.full(k, feature if embedded is None else hidden, embedded, positions, segments)
        said.append(jnp.argmax(net.logits(net.normed(k, hidden, decoder), decoder), -1)[0])
    return np.stack([np.asarray(s) for s in said], axis=-1)


@pytest.mark.pitfall("Megatron-LM#3159")
@pytest.mark.parametrize("name", ["independent", "sequential", pytest.param("shared", marks=pytest.mark.slow)])
def test_the_loop_accepts_what_training_measures(name: str) -> None:
    """Every step of the loop, replayed on the finished text by whole-sequence predictions with the true tokens fed in.

    It fails when a depth is fed the wrong token, a cache entry is stale, or a position is off by one.
    """
    sub = subject(name, eos=())
    requests = [
        Request(tuple(np.random.default_rng(n).integers(0, VOCAB, n)), 60, id=n) for n in (1, 4, 15, 16, 17, 35)
    ]
    done = contract.check_equals_autoregressive(sub, Greedy, requests)
    found, replayed = np.zeros(DEPTH + 1, int), np.zeros(DEPTH + 1, int)
    for request, completion in zip(requests, done, strict=True):
        text = np.asarray([*request.prompt, *completion.tokens])
        said = predictions(sub, np.pad(text, (0, 100 - len(text))))
        length = len(request.prompt) + 1
        while length < len(text):
            right = [k < len(text) - length and said[length - 2, k] == text[length + k] for k in range(DEPTH)]
            count = int(np.cumprod(right).sum())
            replayed[min(count, len(text) - length)] += 1
            length += count + 1
        found += completion.accepted
    assert found[1:].sum() > 20
    assert found.tolist() == replayed.tolist()


@pytest.mark.parametrize("name", ["independent", "joint", "sequential"])
def test_what_objectives_count_is_what_the_replay_of_the_loop_counts(name: str) -> None:
    """`match_<i>` of training, against the predictions by which the test above replays the loop."""
    sub = subject("independent" if name == "independent" else "sequential", eos=())
    text = np.random.default_rng(5).integers(0, VOCAB, 60).astype(np.int32)
    said, batch = predictions(sub, text), jax.tree.map(jnp.asarray, lay_out([[Document(text, 0)]], len(text)))
    right = [int((said[: -1 - k, k - 1] == text[1 + k :]).sum()) for k in range(1, DEPTH + 1)]
    params, first = {"target": sub.target, **sub.params}, 2
    if name == "independent":
        objective: Any = MultiTokenPretraining(config(), DEPTH + 1)
    elif name == "joint":
        objective = SequentialPretraining(config(), DEPTH + 1, chunk=16)
    else:
        objective, params, first = MultiTokenHeads(sub.drafter.config, HeadsLoss(chunk=16)), sub.params, 0
    decoder, tables = merge(sub.graph, sub.target), {"vocab": jnp.arange(VOCAB)}
    metrics = jax.jit(lambda p, b: objective.loss(p, tables, decoder, b, None).metrics)(params, batch)
    assert [int(metrics[f"match_{first + k}"][0]) for k in range(DEPTH)] == right
    assert [int(metrics[f"match_{first + k}"][1]) for k in range(DEPTH)] == [len(text) - 1 - k for k in (1, 2, 3)]
    assert sum(right) > 5


def markov(name: str) -> tuple[Any, Any, Any]:
    shapes = layers(name, markov_config(4), depth=2)
    drafter = MultiToken(shapes)
    own = copy_last_layer(shapes, init_mtp(shapes, jax.random.key(1)), markov_params(random_law(4, 0)))
    return drafter, own, {}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_law_of_whole_decodes(name: str) -> None:
    assert contract.law_p_value(*markov(name), Recursive, draws=1 << 16) > 1e-6


def test_a_saved_drafter_is_found_by_name(tmp_path: Any) -> None:
    small = tiny_target(width=16)
    shapes = mtp_config(small.config, depth=2, kind="sequential", draft_vocab=32)
    drafter = MultiToken(shapes)
    params, tables = drafter.init_params(jax.random.key(0), merge(small.graph, small.params))
    save_drafter(tmp_path, SavedDrafter("mtp", shapes, params, tables, ("head",)), small, dtype="float32")
    loaded = make_drafter("mtp", small, source=str(tmp_path))
    assert loaded.drafter == drafter
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (loaded.params, loaded.tables), (params, tables))
    assert all(jax.tree.leaves(same))
    assert make_drafter("mtp", small, source=str(tmp_path), num_nodes=1).drafter.depth == 1
    with pytest.raises(ValueError, match=r"num_nodes=3, but there are heads for 2 tokens .* expected 1 to 2"):
        make_drafter("mtp", small, source=str(tmp_path), num_nodes=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "parallel"}, "kind='parallel'; expected independent or sequential"),
        ({"depth": 0}, "depth=0; expected at least 1"),
        ({"kind": "independent", "shared": True}, "all of them would predict the same token"),
    ],
)
def test_shapes_that_make_no_heads(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mtp_config(config(), **{"depth": 2, "kind": "sequential", **changes})
