"""Faults that others reported of caches, rows and near-ties, each with a test that plants what brings it out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Loop, Request, TreeSpec, Verdict, Weights, prefill
from specjax.decoding.sampling import ACCEPT
from specjax.drafting import Autoregressive, DraftModel, PromptLookup
from specjax.evaluation.teacher import Teacher, rounding_bound
from specjax.models import graph
from specjax.testing import contract
from specjax.verification import Greedy, OneHot, Recursive
from tests.contract.scripted import REQUESTS, ROWS, plain, scripted
from tests.drafting import common

NODES, STEPS = 3, 12


@pytest.mark.pitfall("transformers#32165")
def test_rows_that_accept_differently_are_each_as_if_alone():
    """Acceptance rates 0, 1/2 and 1 side by side."""
    sub = scripted(TreeSpec((-1, 0, 1)), (0, 1, 2), (0.0, 0.5, 1.0))
    loop, weights = sub.loop(Greedy)
    together, alone = (contract.complete(loop, weights, REQUESTS, rows=rows) for rows in (ROWS, 1))
    for base, a, b in zip(plain(), together, alone, strict=True):
        assert base.tokens == a.tokens == b.tokens
        assert (a.steps, a.accepted.tolist()) == (b.steps, b.accepted.tolist())
    never, half, always = (done.accepted for done in together)
    assert never[1:].sum() == 0 and always[:NODES].sum() <= 1 and half[0] > 2 and half[1:].sum() > 2


@pytest.mark.pitfall("sglang#15360")
def test_the_accepted_path_is_of_the_last_born():
    """No prefix of the nodes is a path: nodes 1, 3 and 5 of six are taken, and their entries are moved up."""
    sub = scripted(TreeSpec((-1, -1, 1, 1, 3, 3)), (1, 3, 5), (1.0,) * ROWS)
    done = contract.complete(*sub.loop(Greedy), REQUESTS)
    assert [d.tokens for d in done] == [d.tokens for d in plain()]
    assert all(d.accepted[:NODES].sum() <= 1 for d in done)
    contract.check_cache(sub, Greedy, REQUESTS)


class Outside(PromptLookup):
    """Every other token that it drafts is no id of the target."""

    def propose(self, params, tables, target, cache, state, context, keys):
        draft, state, cache = super().propose(params, tables, target, cache, state, context, keys)
        far = jnp.where(jnp.arange(draft.num_nodes) % 2 == 0, jnp.asarray([-1, common.VOCAB, 1 << 20])[:ROWS, None], 0)
        return dataclasses.replace(draft, tokens=draft.tokens + far, valid=jnp.ones_like(draft.valid)), state, cache


def test_ids_outside_the_vocabulary_are_never_emitted():
    sub = common.subject(Outside(num_nodes=NODES))
    requests = contract.random_requests(common.VOCAB, ROWS, seed=2, temperature=1.5)
    done = contract.complete(*sub.loop(Recursive), requests)
    assert all(0 <= token < common.VOCAB for d in done for token in d.tokens)
    contract.check_equals_autoregressive(sub, OneHot, requests)


# ---- Caches after every count of accepted tokens ----


@dataclasses.dataclass(frozen=True)
class Planned:
    """Accepts as many nodes of a chain as the request's key says, whatever they are."""

    depth: int
    exact_for: frozenset = frozenset()

    def verify(self, draft, scores, sampling, keys):
        count = (keys.uniform(ACCEPT, 0) * (self.depth + 1)).astype(jnp.int32)
        index = jnp.arange(self.depth)
        path = jnp.where(index < count[:, None], index, -1).astype(jnp.int32)
        next_token = jnp.take_along_axis(scores.argmax, count[:, None], axis=1)[:, 0]
        return Verdict(path, count, next_token, jnp.full(path.shape, jnp.nan), jnp.full_like(count, -1))


class Holed(DraftModel):
    """Feeds the root alone: behind a fully accepted chain its cache lacks the last drafted token."""

    def __post_init__(self):
        pass


def steps_of(drafter: DraftModel) -> tuple[Loop, Weights, list[Any]]:
    """States, on the host, after the prefill and after each step."""
    sub = dataclasses.replace(common.subject(drafter), eos=())
    loop, weights = sub.loop(Planned)
    requests = [dataclasses.replace(request, max_new_tokens=60) for request in REQUESTS]
    state = prefill(loop, weights, requests, context=contract.CONTEXT, seed=0, buffer=contract.BUFFER)
    states = [jax.device_get(state)]
    for _ in range(STEPS):
        state = loop.step(weights, state)
        states.append(jax.device_get(state))
    return loop, weights, states


@pytest.fixture(scope="module")
def planned() -> tuple[Loop, Weights, list[Any]]:
    return steps_of(DraftModel(common.config(1), num_nodes=NODES))


@pytest.mark.pitfall("mlx-lm#1528")
def test_lengths_after_any_pattern_of_acceptance(planned):
    _, _, states = planned
    patterns = []
    for before, after in zip(states, states[1:], strict=False):
        accepted = (after.statistics.accepted - before.statistics.accepted).argmax(1)
        np.testing.assert_array_equal(after.length, before.length + accepted + 1)
        np.testing.assert_array_equal(after.cache.length, after.length - 1)
        patterns.append(tuple(accepted.tolist()))
    assert {a for pattern in patterns for a in pattern} == set(range(NODES + 1))
    assert len(set(patterns)) > STEPS // 2


def assert_fresh(loop: Loop, weights: Weights, state: Any) -> None:
    """Target's and draft's caches hold what a prefill of the committed tokens would put there."""
    again = [Request(tuple(row[: n - 1].tolist()), 1) for row, n in zip(state.tokens, state.length, strict=True)]
    fresh = jax.device_get(prefill(loop, weights, again, context=contract.CONTEXT, seed=0, buffer=contract.BUFFER))
    # The next pass of the draft feeds the last two committed tokens, whatever stands there.
    for mine, theirs, behind in ((state.cache, fresh.cache, 1), (state.drafter.cache, fresh.drafter.cache, 2)):
        for row, length in enumerate(state.length):
            for a, b in zip(jax.tree.leaves(mine.layers), jax.tree.leaves(theirs.layers), strict=True):
                np.testing.assert_allclose(a[row, : length - behind], b[row, : length - behind], atol=1e-5, rtol=0)


@pytest.mark.pitfall("lablup/mlxcel#994", "lablup/mlxcel#1002")
def test_caches_after_every_step_are_those_of_a_fresh_prefill(planned):
    loop, weights, states = planned
    for state in states[1:]:
        assert_fresh(loop, weights, state)


@pytest.mark.slow
@pytest.mark.pitfall("lablup/mlxcel#1002")
def test_a_hole_behind_a_fully_accepted_chain_would_be_seen():
    loop, weights, states = steps_of(Holed(common.config(1), num_nodes=NODES, window=1))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        for state in states[1:]:
            assert_fresh(loop, weights, state)


# ---- Rounding ----


@pytest.mark.slow
@pytest.mark.pitfall("vllm#7627")
def test_in_bfloat16_texts_part_at_near_ties_alone():
    """And beside plain decoding in passes of the same shape they do not part."""
    full, config = common.subject(Autoregressive()), dataclasses.replace(common.config(), dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), full.target)
    sub = dataclasses.replace(full, graph=graph(config)[0], target=params)
    mine = dataclasses.replace(sub, drafter=DraftModel(config, num_nodes=NODES), params=params)
    wide = dataclasses.replace(sub, drafter=Autoregressive(num_nodes=NODES))
    requests = contract.random_requests(common.VOCAB, 2 * ROWS, seed=5)
    base = contract.complete(*sub.autoregressive(), requests)
    done, same = (contract.complete(*s.loop(Greedy), requests) for s in (mine, wide))
    assert sum(d.accepted[1:].sum() for d in done) > 5 and sum(d.accepted[1:].sum() for d in same) == 0
    assert [d.tokens for d in done] == [d.tokens for d in same]
    teacher, bound = Teacher(sub.graph, sub.target, precision="float32"), rounding_bound("bfloat16", "float32")
    prompts, texts = [r.prompt for r in requests], [d.tokens for d in base]
    assert teacher.compare(prompts, texts, [d.tokens for d in done], bound).matches
    # A token that rounding cannot choose is no near-tie.
    logits = teacher.logits(prompts[0], texts[0], 0)
    assert logits.max() - logits.min() > bound
    wrong = [(int(np.argmin(logits)), *texts[0][1:]), *texts[1:]]
    assert not teacher.compare(prompts, texts, wrong, bound).matches
