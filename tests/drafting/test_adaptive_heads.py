"""Adaptive lengths over heads, which read the target's hidden states: what they know after steps without a draft."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Keys, Request, make_sampling, prefill
from specjax.decoding.tree import TreeSpec, from_choices
from specjax.drafting.adaptive import Adaptive
from specjax.drafting.eagle import EagleChain
from specjax.drafting.eagle2 import EagleTree
from specjax.drafting.eagle_static import EagleStatic
from specjax.drafting.hydra import Hydra, HydraPlusPlus
from specjax.drafting.kangaroo import Kangaroo
from specjax.drafting.medusa import Medusa
from specjax.drafting.mtp import MultiToken
from specjax.drafting.pending import still_pending
from specjax.drafting.redrafter import RecurrentDrafter
from specjax.models import KVCache, merge
from specjax.models.eagle import Eagle3Config, EagleConfig, draft_layer
from specjax.models.kangaroo import kangaroo_config
from specjax.models.medusa import HydraConfig, MedusaConfig
from specjax.models.mtp import MtpConfig
from specjax.models.redrafter import RedrafterConfig
from specjax.testing import contract
from specjax.verification import Recursive
from tests.drafting import common, test_eagle

NODES = 3
CHAIN = TreeSpec((-1, 0, 1))
BRANCHES = from_choices([(0,), (1,), (0, 0)])


def inner(name: str, vocab: int = common.VOCAB):
    """A drafter of three nodes, for a target of two layers."""
    layer = draft_layer(common.config(2, vocab), intermediate_size=16, head_size=vocab)
    heads = {"hidden_size": 16, "vocab_size": vocab, "head_size": vocab, "num_heads": NODES}
    eagle = EagleConfig(layer=layer)
    made = {
        "medusa": lambda: Medusa(MedusaConfig(**heads), CHAIN),
        "medusa_tree": lambda: Medusa(MedusaConfig(**heads), BRANCHES),
        "hydra": lambda: Hydra(HydraConfig(**heads), CHAIN),
        "hydra++": lambda: HydraPlusPlus(HydraConfig(**heads, prefix=common.config(1, vocab)), CHAIN),
        "eagle": lambda: EagleChain(eagle, NODES),
        "eagle2": lambda: EagleTree(eagle, NODES, levels=2, top_k=2),
        "eagle_static": lambda: EagleStatic(eagle, NODES, tree=BRANCHES),
        "eagle3": lambda: EagleChain(Eagle3Config(layer=layer, taps=(0, 1), target_hidden_size=16), NODES),
        "redrafter": lambda: RecurrentDrafter(
            RedrafterConfig(hidden_size=16, vocab_size=vocab, head_size=vocab, exit_dim=32), NODES, levels=2, beams=2
        ),
    }
    return made[name]()


def subject(name: str, widths: tuple[int, ...] = (), vocab: int = common.VOCAB, **options):
    """With a middle width where the depth grows with it."""
    widths = widths or ((0, NODES) if name in ("eagle2", "redrafter") else (0, 2, NODES))
    return common.subject(Adaptive(inner(name, vocab), widths, **options), vocab=vocab)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("hydra", "hydra++", "eagle2", "eagle3", "redrafter")]


@pytest.mark.parametrize("name", ["medusa", "eagle", *SLOW])
def test_contract(name):
    """Rests of a step or more lie between drafts."""
    sub = subject(name, prior=0.2, probe_every=2)
    contract.check_drafter(sub, Recursive)
    contract.check_equals_autoregressive(dataclasses.replace(sub, eos=()), Recursive, common.looping_requests())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_trained_head_is_accepted(name):
    sub = test_eagle.subject(name)
    sub = dataclasses.replace(sub, drafter=Adaptive(sub.drafter, (0, 1, NODES), prior=0.9, probe_every=2), eos=())
    requests = [Request(tuple(np.arange(n) % test_eagle.VOCAB), 60, id=n) for n in (20, 30, 40)]
    done = contract.check_equals_autoregressive(sub, Recursive, requests)
    assert sum(c.accepted[1:].sum() for c in done) > 0


@pytest.mark.parametrize("name", ["eagle", pytest.param("medusa", marks=pytest.mark.slow)])
def test_law(name):
    """Draws at lengths that change from step to step, plain steps among them."""
    sub = subject(name, (0, 1, NODES), vocab=4, prior=0.5, draft_cost=0.2, probe_every=1)
    assert common.law_p_value(sub, Recursive, prompt=(0, 1, 3)) > common.FALSE_ALARM


def check_drafts_as_behind_a_prompt(sub, loop, weights, state) -> None:
    """The next draft, and what the drafter's cache then holds, are those behind a fresh prefill of the same text."""
    name, lengths = type(sub.drafter.inner).__name__, np.asarray(state.length)
    texts = [tokens[: n - 1].tolist() for tokens, n in zip(np.asarray(state.tokens), lengths, strict=True)]
    fresh = prefill(loop, weights, [Request(tuple(text), 20) for text in texts], context=64, seed=0)
    np.testing.assert_array_equal(fresh.length, state.length)

    @jax.jit
    def propose(params, state):
        context = state.context.replace(sampling=make_sampling([1.0, 1.0]))
        keys = Keys(jnp.zeros((2, 2), jnp.uint32), state.length)
        own = state.drafter.inner
        return sub.drafter.inner.propose(
            sub.params, sub.tables, merge(sub.graph, params), state.cache, own, context, keys
        )

    (mine, after, _), (theirs, expected, _) = propose(sub.target, state), propose(sub.target, fresh)
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    np.testing.assert_allclose(mine.laws, theirs.laws, atol=1e-5)
    found = [x for x in (getattr(after, "cache", None), getattr(expected, "cache", None)) if isinstance(x, KVCache)]
    assert bool(found) == (name == "HydraPlusPlus" or name.startswith("Eagle"))
    for a, b in zip(*(x.layers for x in found), strict=True) if found else ():
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(a.k[row, : length - 1], b.k[row, : length - 1], atol=1e-5)


@pytest.mark.parametrize(
    "name", ["medusa", "medusa_tree", "hydra", "hydra++", "eagle", "eagle2", "eagle_static", "eagle3", "redrafter"]
)
def test_after_a_rest_it_drafts_what_it_would_have(name):
    """Nine plain steps, in which what is pending fills up twice; then a draft like that behind a fresh prompt."""
    sub = dataclasses.replace(subject(name, (0, NODES), prior=0.0, probe_every=100), eos=())
    loop, weights = sub.loop(Recursive)
    state = prefill(loop, weights, [Request((1, 3, 4, 1), 40), Request((7, 0), 40)], context=64, seed=0)
    for _ in range(9):
        state = loop.step(weights, state)
    assert state.drafter.stale.tolist() == [9, 9] and state.statistics.accepted[:, 0].tolist() == [9, 9]
    check_drafts_as_behind_a_prompt(sub, loop, weights, state)


def test_between_drafts_and_rests_in_turn_too():
    sub = dataclasses.replace(subject("eagle", (0, 1, NODES), prior=0.9, probe_every=1), eos=())
    loop, weights = sub.loop(Recursive)
    state = prefill(loop, weights, [Request((1, 3, 4, 1), 40), Request((7, 0), 40)], context=64, seed=0)
    rested = []
    for _ in range(9):
        state = loop.step(weights, state)
        rested.append(int(state.drafter.stale[0]))
    assert min(rested) == 0 < max(rested)
    check_drafts_as_behind_a_prompt(sub, loop, weights, state)


def test_a_narrow_draft_is_the_beginning_of_a_wide_one():
    """Else a row's draft would depend on the widest of its batch."""
    for name in ("medusa_tree", "hydra", "eagle", "hydra++", "eagle_static"):
        check_narrow_begins_wide(subject(name))
    eagle, recurrent = inner("eagle2"), inner("redrafter")
    trees = (
        dataclasses.replace(eagle, num_nodes=8, levels=3, top_k=3),
        dataclasses.replace(recurrent, num_nodes=8, levels=3, beams=4),
    )
    for drafter in trees:
        for width in (3, 5):
            check_narrow_begins_wide(common.subject(Adaptive(drafter, (0, 8))), width)
        with pytest.raises(ValueError, match="drafts 3 deep at 5 nodes and at 8; a row chooses by depth, so give it 0"):
            Adaptive(drafter, (0, 5, 8))


def check_narrow_begins_wide(sub, width: int = 2) -> None:
    loop, weights = sub.loop(Recursive)
    requests = [Request(tokens, 8) for tokens in ((1, 3, 4, 1), (2, 2, 5), (6, 1, 2, 3, 4))]
    state = prefill(loop, weights, requests, context=64, seed=0)
    target = merge(sub.graph, sub.target)
    wide, narrow = (
        drafter.propose(sub.params, sub.tables, target, state.cache, state.drafter.inner, state.context, None)[0]
        for drafter in (sub.drafter.inner, sub.drafter._at(width))
    )
    np.testing.assert_array_equal(narrow.valid, wide.valid[:, :width])
    np.testing.assert_array_equal(narrow.tokens, wide.tokens[:, :width])
    np.testing.assert_array_equal(narrow.parents, wide.parents[:, :width])


def test_what_was_not_run_stays_pending():
    waiting, fresh = jnp.arange(4.0).reshape(1, 4, 1), 10 + jnp.arange(4.0).reshape(1, 4, 1)
    for count, ran, new, expected in (
        (3, 3, 2, [10, 11]),
        (3, 0, 1, [0, 1, 2, 10]),
        (4, 4, 1, [10]),
        (1, 0, 1, [0, 10]),
    ):
        left, found = still_pending(waiting, *(jnp.asarray([x]) for x in (count, ran)), fresh, jnp.asarray([new]))
        assert found.tolist() == [len(expected)] and left[0, : len(expected), 0].tolist() == expected


def test_heads_that_could_not_follow_are_refused():
    layer = draft_layer(common.config(2), intermediate_size=16, head_size=common.VOCAB)
    for drafter in (
        Kangaroo(kangaroo_config(common.config(), 1), NODES),
        MultiToken(MtpConfig(layer=layer, depth=NODES, kind="sequential")),
    ):
        with pytest.raises(
            ValueError, match=f"{type(drafter).__name__} keeps a state that would miss what is committed"
        ):
            Adaptive(drafter, (0, NODES))
    with pytest.raises(
        ValueError, match=r"widths=\(0, 1, 3\): EagleTree cannot draft 1 nodes \(num_nodes=1; expected 2"
    ):
        Adaptive(inner("eagle2"), (0, 1, NODES))
