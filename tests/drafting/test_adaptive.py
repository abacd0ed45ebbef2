"""Adaptive lengths: the contract, the law, what is chosen when, and what a bad draft costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Context, Keys, Request, make_sampling, prefill, request_keys
from specjax.drafting import DraftModel, OtherTokenizer, PromptLookup
from specjax.drafting.adaptive import Adaptive, AdaptiveState
from specjax.drafting.early_exit import EarlyExit
from specjax.drafting.ensemble import EnsembleMixture, EnsembleVote, Members
from specjax.drafting.jacobi import Jacobi
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.recycling import Recycling
from specjax.drafting.retrieval import Retrieval
from specjax.drafting.suffix import Suffix
from specjax.models import init_cache, init_decoder, merge
from specjax.testing import contract
from specjax.verification import Greedy, Recursive
from tests.drafting import common

LOOKUP = Adaptive(PromptLookup(num_nodes=4, policy="most_frequent"), (0, 2, 4), probe_every=4)


def good_draft(widths: tuple[int, ...] = (0, 2, 4), vocab: int = common.VOCAB, **options) -> contract.Subject:
    """The target itself as its own draft."""
    drafter = Adaptive(DraftModel(common.config(vocab=vocab), num_nodes=widths[-1]), widths, **options)
    sub = common.subject(drafter, vocab=vocab)
    return dataclasses.replace(sub, params=sub.target)


def bad_draft(**options) -> contract.Subject:
    """A draft whose likeliest token the target never says."""
    sub = good_draft(**options)
    params = jax.tree.map(lambda x: x, sub.target)
    params["final_norm"]["weight"] = -params["final_norm"]["weight"]
    return dataclasses.replace(sub, params=params, eos=())


@pytest.mark.parametrize(
    "name", ["early_exit", *(pytest.param(x, marks=pytest.mark.slow) for x in ("prompt_lookup", "recycling"))]
)
def test_contract(name):
    inner = {
        "prompt_lookup": LOOKUP,
        "early_exit": Adaptive(EarlyExit(1, num_nodes=3, min_confidence=0.3), (0, 1, 3), probe_every=2),
        "recycling": Adaptive(Recycling(num_nodes=5, candidates=3), (0, 5), draft_cost=0.0),
    }
    sub = common.subject(inner[name])
    contract.check_drafter(sub, Recursive, prompt=tuple(i % 5 for i in range(20)))
    # Without an end of text: a look-up needs some text to look up.
    done = contract.check_equals_autoregressive(dataclasses.replace(sub, eos=()), Recursive, common.looping_requests())
    assert sum(c.accepted[1:].sum() for c in done) > 0


def test_law():
    """Draws from a law that is near the target's, at lengths that change from step to step."""
    sub = good_draft((0, 1, 2), vocab=4, prior=0.5, draft_cost=0.2, probe_every=1)
    noise = init_decoder(common.config(vocab=4), jax.random.key(5))
    sub = dataclasses.replace(sub, params=jax.tree.map(lambda x, y: x + y / 2 if x.ndim > 1 else x, sub.target, noise))
    assert common.law_p_value(sub, Recursive, prompt=(0, 1, 3)) > common.FALSE_ALARM


def test_a_good_draft_is_used_in_full():
    sub = dataclasses.replace(good_draft(), eos=())
    done = contract.complete(*sub.loop(Greedy), common.looping_requests())
    for found in done:
        assert found.accepted[4] == found.steps or found.emitted / found.steps > 4.5


@pytest.fixture(scope="module")
def bad():
    """110 steps with a draft that is never right: the states behind each, a prefill's first; its loop and weights."""
    loop, weights = bad_draft(draft_cost=0.07).loop(Greedy)
    state = prefill(loop, weights, [Request((1, 2, 3, 1, 2), 120)], context=140, seed=0)
    states = [jax.tree.map(np.array, state)]
    for _ in range(110):
        state = loop.step(weights, state)
        states.append(jax.tree.map(np.array, state))
    return states, loop, weights


def test_a_bad_draft_is_left_alone_but_for_a_try_now_and_then(bad):
    """Two steps while the first trust wears off, one 32 steps later, the next 64 steps after that."""
    states, loop, _ = bad
    assert int(states[-1].statistics.accepted[0, 0]) == 110, "the draft was meant to be bad"
    drafted = np.flatnonzero([int(state.drafter.idle[0]) == 0 for state in states[1:]])
    assert drafted.tolist() == [0, 1, 34, 99]
    # By these costs 64 tokens come at 0.98 of plain decoding's speed at least.
    cost = loop.drafter.draft_cost + loop.drafter.pass_cost
    assert 64 / (64 + loop.drafter.widths[1] * cost * (drafted < 64).sum()) > 0.98


def test_after_a_rest_a_draft_model_has_what_it_missed(bad):
    """Its cache is that of a draft which was fed every token."""
    states, loop, weights = bad
    for state in (states[35], states[100]):
        assert int(state.drafter.stale[0]) == 0 < int(states[34].drafter.stale[0])
        tokens = state.tokens[0, : int(state.length[0]) - 2].tolist()
        fresh = prefill(loop, weights, [Request(tuple(tokens), 120 + 5 - len(tokens))], context=140, seed=0)
        for mine, theirs in zip(state.drafter.inner.cache.layers, fresh.drafter.inner.cache.layers, strict=True):
            np.testing.assert_allclose(mine.k[0, : len(tokens)], theirs.k[0, : len(tokens)], atol=1e-5)


def test_a_rest_may_be_longer_than_the_text():
    sub = good_draft((0, 4), probe_every=256)
    target, drafter = merge(sub.graph, sub.target), sub.drafter

    def propose():
        state = drafter.init_state(sub.params, {}, target, 1, 140)
        context = Context(jnp.zeros((1, 128), jnp.int32), jnp.asarray([100]), make_sampling([0.0]))
        keys = Keys(request_keys(0, [0]), context.length)
        return drafter.propose(sub.params, {}, target, init_cache(target.config, 1, 140), state, context, keys)[0]

    assert jax.eval_shape(propose).tokens.shape == (1, 4)


def decide(adaptive: Adaptive, tokens: list[int], **fields: int | float) -> tuple[list[bool], AdaptiveState]:
    """What one row drafts at a state of these fields, and the state then."""
    sub = common.subject(adaptive)
    target = merge(sub.graph, sub.target)
    state = adaptive.init_state({}, {}, target, 1, 64)
    state = state.replace(**{name: jnp.full_like(getattr(state, name), value) for name, value in fields.items()})
    context = Context(
        jnp.asarray([tokens + [0] * (32 - len(tokens))]), jnp.asarray([len(tokens)]), make_sampling([0.0])
    )
    keys = Keys(request_keys(0, [0]), context.length)
    draft, state, _ = adaptive.propose({}, {}, target, None, state, context, keys)
    return draft.valid[0].tolist(), state


def test_a_rest_lasts_until_something_is_drafted():
    """Without a match a chance is not used up; a match that fills the widest draft ends a rest early."""
    adaptive = Adaptive(Suffix(num_nodes=4), (0, 1, 4), draft_cost=0.0, probe_every=8)
    bad = {"accepted": 0.0, "tried": 4.0}
    none, short, long = [1, 2, 3, 4], [1, 2, 3, 1], [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert decide(adaptive, short, **bad, idle=7)[0] == [False] * 4
    valid, state = decide(adaptive, none, **bad, idle=8)
    assert not any(valid) and int(state.idle[0]) == 9 and int(state.rest[0]) == 8
    valid, state = decide(adaptive, short, **bad, idle=9)
    assert valid == [True, False, False, False] and int(state.idle[0]) == 0 and int(state.rest[0]) == 16
    assert decide(adaptive, long, **bad, idle=1)[0] == [True, False, False, False]
    assert decide(adaptive, long, **bad, idle=0)[0] == [False] * 4


def test_the_pass_fits_the_match():
    """No match, no wide pass; a match in one row of two widens it for both."""
    lookup = dataclasses.replace(LOOKUP, prior=1.0)
    sub = common.subject(lookup)
    target = merge(sub.graph, sub.target)

    def choice(rows: list[list[int]]) -> tuple[int, list[list[bool]]]:
        tokens = jnp.asarray([row + [0] * (16 - len(row)) for row in rows])
        lengths = jnp.asarray([len(row) for row in rows])
        context = Context(tokens, lengths, make_sampling([0.0] * len(rows)))
        state = lookup.init_state({}, {}, target, len(rows), 32)
        keys = Keys(request_keys(0, list(range(len(rows)))), lengths)
        draft, _, _ = lookup.propose({}, {}, target, None, state, context, keys)
        return int(draft.widths.choice), draft.valid.tolist()

    assert choice([[1, 2, 3, 4]]) == (0, [[False] * 4])
    assert choice([[1, 2, 3, 1]])[0] == 2
    assert choice([[4, 3, 3]])[0] == 1  # one token follows the match
    assert choice([[1, 2, 3, 4], [1, 2, 3, 1]]) == (2, [[False] * 4, [True] * 3 + [False]])


def test_a_row_drafts_what_it_would_alone():
    """Where a shorter draft would be another one: a lookup of one token copies from a match that four do not follow."""
    text, other = [1, 5, 6, 7, 8, 1, 9, 1], [1, 2, 3, 4, 1, 2, 3, 1]
    adaptive = Adaptive(PromptLookup(num_nodes=4), (0, 1, 4), draft_cost=0.01, pass_cost=0.2)
    sub = common.subject(adaptive)
    target = merge(sub.graph, sub.target)

    def drafts(rows: list[list[int]], rates: list[float]) -> tuple[list[int], list[bool]]:
        tokens = jnp.asarray([row + [0] * (16 - len(row)) for row in rows])
        lengths = jnp.asarray([len(row) for row in rows])
        state = adaptive.init_state({}, {}, target, len(rows), 32)
        state = state.replace(accepted=10 * jnp.asarray(rates), tried=jnp.full((len(rows),), 10.0))
        keys = Keys(request_keys(0, list(range(len(rows)))), lengths)
        context = Context(tokens, lengths, make_sampling([0.0] * len(rows)))
        draft = adaptive.propose({}, {}, target, None, state, context, keys)[0]
        assert draft.valid.sum(1).tolist() == [1, 4][: len(rows)]
        return draft.tokens[0][draft.valid[0]].tolist(), draft.valid[0].tolist()

    assert drafts([text], [0.4]) == drafts([text, other], [0.4, 1.0])


def test_a_shorter_draft_of_early_layers_makes_fewer_passes():
    """It is what its choice was told to cost."""
    adaptive = Adaptive(EarlyExit(1, num_nodes=3), (0, 1, 3))
    sub = common.subject(adaptive)
    loop, weights = sub.loop(Recursive)
    state = prefill(loop, weights, [Request((1, 3, 4, 1), 20)], context=64, seed=0)
    low = state.drafter.replace(accepted=jnp.asarray([4.0]), tried=jnp.asarray([10.0]))
    keys, target = Keys(state.request, state.length), merge(sub.graph, sub.target)
    assert not adaptive._asked_whole and Adaptive(PromptLookup(num_nodes=4), (0, 1, 4))._asked_whole
    draft = adaptive.propose({}, {}, target, state.cache, low, state.context, keys)[0]
    assert draft.valid[0].tolist() == [True, False, False]
    assert jnp.any(draft.resume.hidden[0, 1] != 0) and not jnp.any(draft.resume.hidden[0, 2:])


def expected_choice(rate: float, widths: tuple[int, ...], cost: Callable[[int], float]) -> int:
    return int(np.argmax([sum(rate**i for i in range(w + 1)) / (cost(w) if w else 1) for w in widths]))


def test_the_width_is_the_one_with_the_most_tokens_for_the_time():
    """A lookup is one pass, a draft model's are as many as tokens, early exit makes one more and saves its layers."""
    rates = np.linspace(0, 1, 21)
    sub = common.subject(LOOKUP)
    start = LOOKUP.init_state({}, {}, merge(sub.graph, sub.target), 21, 32)
    state = start.replace(accepted=jnp.asarray(10 * rates, jnp.float32), tried=jnp.full((21,), 10.0))
    for inner, verified, cost in (
        (PromptLookup(num_nodes=6), 1.0, lambda w: 1.2 + 0.1 * w),
        (DraftModel(common.config(), num_nodes=6), 1.0, lambda w: 1 + 0.3 * w),
        (EarlyExit(1, num_nodes=6), 0.5, lambda w: 0.2 * (w + 1) + 0.5 * (1 + 0.1 * w)),
    ):
        adaptive = Adaptive(inner, (0, 2, 6), draft_cost=0.2, pass_cost=0.1)
        expected = [expected_choice(rate, adaptive.widths, cost) for rate in rates]
        assert adaptive._best(state, verified).tolist() == expected and {0, 2} <= set(expected)


def test_a_finished_row_drafts_nothing():
    adaptive = Adaptive(PromptLookup(num_nodes=4), (0, 4))
    assert decide(adaptive, [1, 2, 1], length=2)[0] == [True] * 4
    assert decide(adaptive, [1, 2, 1], length=3)[0] == [False] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adaptive(PromptLookup(4), (2, 4)), r"widths=\(2, 4\); expected 0 and one or two greater numbers"),
        (lambda: Adaptive(PromptLookup(4), (0, 1, 2, 4)), "expected 0 and one or two greater numbers"),
        (lambda: Adaptive(PromptLookup(4), (0, 3)), "end with another number than the draft's 4 nodes"),
        (lambda: Adaptive(PromptLookup(4), (0, 4), prior=1.5), "prior=1.5; expected a number in"),
        (lambda: Adaptive(PromptLookup(4), (0, 4), probe_every=0), "probe_every=0"),
        (lambda: Adaptive(PromptLookup(4), (0, 4), draft_cost=-1.0), "draft_cost=-1.0"),
        (
            lambda: Adaptive(Retrieval(16, depth=6), (0, 4, 16)),
            r"widths=.0, 4, 16.: Retrieval cannot draft 4 nodes .dep",
        ),
        (lambda: Adaptive(Lookahead(2, 2, 2), (0, 2)), "Lookahead makes probes in every step"),
    ],
)
def test_what_cannot_adapt(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class DeclaredJacobi(Jacobi):
    """It says that it may be asked behind any text, but its state has the length of its draft."""

    any_context: ClassVar[bool] = True


@pytest.mark.parametrize("widths", [(0, 2, 4), (0, 4)])
def test_a_state_that_depends_on_the_length_cannot_adapt(widths):
    sub = common.subject(Adaptive(DeclaredJacobi(4), widths))
    with pytest.raises(ValueError, match="DeclaredJacobi keeps a state whose shape depends on num_nodes"):
        sub.drafter.init_state({}, {}, merge(sub.graph, sub.target), 1, 32)


def test_a_state_that_would_miss_what_is_committed_cannot_adapt():
    draft, lookup = DraftModel(common.config()), PromptLookup(num_nodes=4)
    text, both = Members((lookup, lookup)), Members((lookup, draft))
    for inner in (
        Jacobi(4),
        OtherTokenizer(common.config(), 4),
        EnsembleVote(both),
        EnsembleMixture(both),
        EnsembleMixture(text, learning_rate=0.5),
    ):
        for widths in ((0, 4), (0, 2, 4)):
            with pytest.raises(ValueError, match=f"{type(inner).__name__} keeps a state that would miss"):
                Adaptive(inner, widths)
    for inner in (draft, lookup, Recycling(num_nodes=4), EnsembleMixture(text)):
        adaptive = Adaptive(inner, (0, 4))
    sub = common.subject(adaptive)
    adaptive.init_state(sub.params, sub.tables, merge(sub.graph, sub.target), 1, 32)
