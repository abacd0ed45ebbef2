"""Lookahead's window and pool, stepped by hand on a target whose next token is a table's; its probes; its law."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Context, Keys, Request, prefill, score
from specjax.drafting.lookahead import Lookahead
from specjax.drafting.ngram_pool import bucket_of, init_pool, look_up, put_all
from specjax.models import merge
from specjax.testing import contract
from specjax.testing.markov import markov_graph, markov_params
from specjax.verification import Greedy, OneHot, Recursive
from tests.drafting import common

SMALL = Lookahead(window=3, ngram=3, guesses=2)
NEXT = [4, 7, 0, 6, 9, 2, 8, 5, 10, 3, 1]  # the text 0 4 9 3 6 8 10 1 7 5 2 0 ...


def table_subject(drafter: Lookahead) -> contract.Subject:
    law = np.full((11, 11), 1e-4)
    law[np.arange(11), NEXT] = 1.0
    return contract.Subject(markov_graph(11), markov_params(law / law.sum(1, keepdims=True)), drafter, {}, {})


class ByHand:
    """Algorithm 2 of the paper for one row, in lists."""

    def __init__(self, drafter: Lookahead, text: list[int], window: list[list[int]]):
        self.d, self.text, self.window, self.steps, self.pool = drafter, text, window, 0, {}

    def put(self, gram: tuple[int, ...]) -> None:
        entries = self.pool.setdefault(gram[0], [])
        if gram[1:] in entries:
            entries.remove(gram[1:])
        entries.append(gram[1:])  # the latest last
        del entries[: -self.d.guesses]

    def step(self) -> None:
        root = self.text[-1]
        true = [root]
        for _ in range(self.d.ngram):
            true.append(NEXT[true[-1]])
        hits = 0
        for entry in self.pool.get(root, []):
            same = [a == b for a, b in zip(entry, true[1:], strict=False)]
            hits = max(hits, (same + [False]).index(False))
        grid = [list(row) for row in self.window]
        grid[0][0] = root
        fresh = [NEXT[token] for token in grid[-1]]
        grown = [*grid, fresh]
        if self.steps >= self.d.ngram - 2:
            for column in range(self.d.window):
                self.put(tuple(row[column] for row in grown))
        before = len(self.text)
        self.text = self.text + true[1 : hits + 2]
        if self.d.pool_from_prompt:
            for end in range(before, len(self.text) + 1):
                if end >= self.d.ngram:
                    self.put(tuple(self.text[end - self.d.ngram : end]))
        self.window = [row[hits:] + row[:hits] for row in ([*r] for r in grown[1:])]
        self.steps += 1


def pool_of(state, row: int) -> dict[int, set[tuple[int, ...]]]:
    found: dict[int, set[tuple[int, ...]]] = {}
    first, rest = np.asarray(state.pool.first[row]), np.asarray(state.pool.rest[row])
    for bucket, slot in zip(*np.nonzero(first >= 0), strict=True):
        found.setdefault(int(first[bucket, slot]), set()).add(tuple(rest[bucket, slot].tolist()))
    return found


@pytest.mark.parametrize("from_prompt", [False, True])
def test_window_and_pool_by_hand(from_prompt):
    assert len(set(np.asarray(bucket_of(jnp.arange(11), SMALL.buckets)).tolist())) == 11
    drafter = dataclasses.replace(SMALL, pool_from_prompt=from_prompt)
    loop, weights = table_subject(drafter).loop(Greedy)
    prompts = [(0, 4, 9, 3, 5, 5, 2), (8, 8)]
    state = prefill(loop, weights, [Request(p, 60) for p in prompts], context=128, seed=0)
    context = Context(state.tokens, state.length, state.sampling)
    windows = np.asarray(drafter._first_window(context, Keys(state.request, state.length)))
    hands = []
    for row, prompt in enumerate(prompts):
        text = [*prompt, NEXT[prompt[-1]]]
        assert set(windows[row].ravel()) <= set(text), "the window starts with tokens of the text"
        hands.append(ByHand(drafter, text, windows[row].tolist()))
        if from_prompt:
            for start in range(len(prompt) - drafter.ngram + 1):
                hands[row].put(tuple(prompt[start : start + drafter.ngram]))
    longest = 0
    for _ in range(16):  # the window's guesses trail the root: it meets them once the text comes round
        state = loop.step(weights, state)
        for row, hand in enumerate(hands):
            before = len(hand.text)
            hand.step()
            longest = max(longest, len(hand.text) - before)
            assert np.asarray(state.tokens[row, : int(state.length[row])]).tolist() == hand.text
            # The root takes the place of the first entry.
            mine, theirs = np.asarray(state.drafter.window[row]).ravel()[1:], np.ravel(hand.window)[1:]
            np.testing.assert_array_equal(mine, theirs)
            assert pool_of(state.drafter, row) == {k: set(v) for k, v in hand.pool.items() if v}
    assert longest == drafter.ngram, "a whole n-gram was never accepted"


def test_the_least_recently_used_entry_gives_way():
    pool = init_pool(1, buckets=4, entries=2, rest=1)
    grams = jnp.asarray([[[7, 1], [7, 2], [7, 1], [7, 3]]])  # 1 is used anew, so 2 goes
    pool = put_all(pool, grams, jnp.ones((1, 4), bool))
    rest, there = look_up(pool, jnp.asarray([7]))
    assert set(np.asarray(rest)[np.asarray(there)][:, 0].tolist()) == {1, 3}
    assert not look_up(pool, jnp.asarray([6]))[1].any()
    same = put_all(pool, jnp.asarray([[[7, 9]]]), jnp.zeros((1, 1), bool))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(pool), jax.tree.leaves(same), strict=True))


def test_probes_are_scored_in_their_own_context():
    """The target's choice at each window entry is that behind the text of its ancestors."""
    sub = common.subject(SMALL)
    loop, weights = sub.loop(Greedy)
    state = prefill(loop, weights, [Request((*range(common.VOCAB), 0, 1), 20)], context=64, seed=0)

    @jax.jit
    def run(params, state):
        target = merge(sub.graph, params)
        draft, _, cache = SMALL.propose(
            {}, {}, target, state.cache, state.drafter, state.context, Keys(state.request, state.length)
        )
        return draft, score(target, cache, draft, state.context, ())[0].argmax

    draft, argmax = run(sub.target, state)
    text = np.asarray(state.tokens[0, : int(state.length[0])]).tolist()
    parents = np.concatenate([draft.parents[0], draft.probes.parents[0]])
    tokens = np.concatenate([draft.tokens[0], draft.probes.tokens[0]])
    assert SMALL.num_probes == 5 and np.asarray(draft.probes.parents[0] - 4).tolist() == [-5, 0, -5, 0, 1]
    assert draft.valid.any()
    for node in range(SMALL.num_nodes, len(tokens)):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tokens[at]))
            at = parents[at]
        padded = jnp.asarray([text + path + [0] * (SMALL.window + SMALL.ngram - len(path))])
        positions = jnp.arange(padded.shape[1])[None]
        out = merge(sub.graph, sub.target).full(padded, positions, jnp.zeros_like(padded), taps=("normed",))
        logits = merge(sub.graph, sub.target).logits(out.taps["normed"])
        assert int(argmax[0, node + 1]) == int(jnp.argmax(logits[0, len(text) + len(path) - 1]))


@pytest.mark.pitfall("LookaheadDecoding#41")
@pytest.mark.parametrize(
    "drafter", [SMALL, Lookahead(window=1, ngram=2, guesses=1, buckets=8)], ids=["w3n3g2", "least"]
)
def test_contract(drafter):
    sub = common.subject(drafter)
    contract.check_drafter(sub, Recursive)


@pytest.mark.pitfall("LookaheadDecoding#6", "LookaheadDecoding#53")
@pytest.mark.parametrize("rule", [OneHot, pytest.param(Recursive, marks=pytest.mark.slow)])
def test_law_with_candidates_that_share_a_token(rule):
    """Behind each of 0..3 the prompt has n-grams that begin alike and go on differently."""
    prompt = (0, 1, 2, 0, 1, 3, 1, 2, 3, 1, 2, 0, 2, 3, 0, 2, 3, 1, 3, 0, 1, 3, 0, 2)
    sub = common.subject(dataclasses.replace(SMALL, buckets=16), layers=1, vocab=4)
    assert common.law_p_value(sub, rule, prompt=prompt) > common.FALSE_ALARM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0; expected at least 1 .W"),
        ({"ngram": 1}, "ngram=1; expected at least 2 .N"),
        ({"guesses": 0}, "guesses=0; expected at least 1 .G"),
    ],
)
def test_sizes_below_their_least(options, message):
    with pytest.raises(ValueError, match=message):
        Lookahead(**options)
