"""The contract of a drafter, as checks that run from anybody's repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoding
from specjax.analysis import g_test, sequence_counts
from specjax.decoding import Completion, DecodeState, Draft, Drafter, Keys, Kind, Loop, Request, Sampling, Weights
from specjax.decoding.tree import check_parents
from specjax.models import merge
from specjax.testing.decode_law import LAW_DRAWS, check_law
from specjax.testing.markov import markov_graph, markov_params, random_law, sequence_law
from specjax.testing.subject import MakeRule, Subject
from specjax.verification import OneHot

BATCH, BUFFER, CONTEXT = 3, 128, 112
STEPS = 1 << 30


def random_requests(vocab: int, count: int, *, seed: int = 0, **sampling: Any) -> list[Request]:
    """Prompts of 1 to 40 random tokens with budgets of 1 to 40."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            prompt=tuple(rng.integers(0, vocab, rng.integers(1, 41)).tolist()),
            max_new_tokens=int(rng.integers(1, 41)),
            id=i,
            **sampling,
        )
        for i in range(count)
    ]


def complete(
    loop: Loop, weights: Weights, requests: Sequence[Request], *, seed: int = 0, rows: int = BATCH
) -> list[Completion]:
    """All requests, `rows` at a time in one shape: every loop compiles once, whatever it is asked."""
    done: list[Completion] = []
    for start in range(0, len(requests), rows):
        group = list(requests[start : start + rows])
        state = _prefill(loop, weights, group + [group[0]] * (rows - len(group)), seed)
        state = loop.run(weights, state, jnp.int32(STEPS))
        done += [decoding.read_row(state, row) for row in range(len(group))]
    return done


def check_equals_autoregressive(
    subject: Subject, make_rule: MakeRule, requests: Sequence[Request], *, seed: int = 0
) -> list[Completion]:
    """Output, token for token, is that of plain decoding with the same seed.

    Holds for every rule at temperature 0 and for the one-hot rule at any temperature.

    Raises:
        AssertionError: names the first request that differs, and where.
    """
    base = complete(*subject.autoregressive(), requests, seed=seed)
    mine = complete(*subject.loop(make_rule), requests, seed=seed)
    _assert_same(base, mine, "plain decoding")
    for i, found in enumerate(mine):
        if found.emitted != len(found.tokens) - 1:
            raise AssertionError(
                f"request {i} counted {found.emitted} emitted tokens, but has {len(found.tokens)}, prefill's included"
            )
    return mine


def check_rows_are_independent(subject: Subject, make_rule: MakeRule, requests: Sequence[Request]) -> None:
    """A request's output does not depend on its slot in the batch, nor on its neighbours, nor on slot refill.

    Raises:
        AssertionError: names the first request that differs, and where.
    """
    loop, weights = subject.loop(make_rule)
    straight = complete(loop, weights, requests)
    turned = complete(loop, weights, [*requests[1:], requests[0]])
    _assert_same(straight, [turned[-1], *turned[:-1]], "the same request in another slot")
    if len(requests) <= BATCH:  # Nothing is refilled.
        return
    refilled = decoding.generate(
        loop, weights, requests, context=CONTEXT, vocab=subject.vocab, batch=BATCH, buffer=BUFFER
    )
    _assert_same(straight, refilled, "the same request without refill")


def check_alone(subject: Subject, make_rule: MakeRule, requests: Sequence[Request]) -> None:
    """A request's output is the same in a batch of one as among others.

    Raises:
        AssertionError: names the first request that differs, and where.
    """
    loop, weights = subject.loop(make_rule)
    alone = complete(loop, weights, requests, rows=1)
    _assert_same(alone, complete(loop, weights, requests), "the same request alone")


def check_cache(subject: Subject, make_rule: MakeRule, requests: Sequence[Request], *, steps: int = 6) -> None:
    """After some steps the target's cache holds what a fresh prefill of the committed tokens would.

    Raises:
        AssertionError: names row, layer and the largest difference.
    """
    loop, weights = subject.loop(make_rule)
    state = loop.run(weights, _prefill(loop, weights, requests[:BATCH]), jnp.int32(steps))
    held = np.array(state.cache.length)
    if any(held != np.array(state.length) - 1):
        raise AssertionError(f"rows hold {held} cache entries for {np.array(state.length)} tokens; expected one fewer")
    tokens = np.array(state.tokens)
    again = [Request(tuple(row[:n].tolist()), 1) for row, n in zip(tokens, held, strict=True)]
    fresh = _prefill(*subject.autoregressive(), again)
    for i, (mine, theirs) in enumerate(zip(state.cache.layers, fresh.cache.layers, strict=True)):
        for name in ("k", "v"):
            a, b = np.array(getattr(mine, name)), np.array(getattr(theirs, name))
            for row, n in enumerate(held):
                worst = np.abs(a[row, :n] - b[row, :n]).max()
                if not worst < 1e-4:
                    raise AssertionError(f"row {row}, layer {i}: cached {name} differ from a fresh prefill by {worst}")


def check_device_loop(subject: Subject, make_rule: MakeRule, requests: Sequence[Request]) -> None:
    """The loop makes no host transfer, and a second batch of the same shapes compiles nothing.

    Raises:
        AssertionError: it compiled again.
        Exception: the transfer guard's, on a transfer.
    """
    loop, weights = subject.loop(make_rule)
    jax.block_until_ready(loop.run(weights, _prefill(loop, weights, requests[:BATCH]), jnp.int32(STEPS)))
    compiled = _programs()
    state, steps = jax.block_until_ready((_prefill(loop, weights, requests[BATCH - 1 :: -1], seed=1), jnp.int32(STEPS)))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(loop.run(weights, state, steps))
    if _programs() != compiled:
        raise AssertionError("a second batch of the same shapes compiled the loop again")


def check_draft(subject: Subject, requests: Sequence[Request]) -> Draft:
    """What is proposed lies within what the drafter declares: a tree of its size and depth, and laws that are laws.

    Nothing in the loop looks: a dynamic tree out of order, or a law in other ids than the tokens, ends in wrong output.

    Returns:
        The draft.

    Raises:
        AssertionError: names what does not hold, the row and the node.
    """
    drafter, loop, weights = subject.drafter, *subject.loop(OneHot)
    state = _prefill(loop, weights, requests[:BATCH])

    @jax.jit
    def propose(weights: Weights, state: DecodeState) -> Draft:
        target, keys = merge(subject.graph, weights.target), Keys(state.request, state.length)
        return drafter.propose(
            weights.drafter, weights.tables, target, state.cache, state.drafter, state.context, keys
        )[0]

    draft = propose(weights, state)
    assert_declared(draft, drafter, subject.vocab, state.sampling)
    return draft


def assert_declared(draft: Draft, drafter: Drafter, vocab: int, sampling: Sampling) -> None:
    """See `check_draft`; of one draft."""
    draft, kind = jax.tree.map(np.array, draft), drafter.kind(sampling)
    if draft.num_nodes != drafter.num_nodes:
        raise AssertionError(f"the draft has {draft.num_nodes} nodes; the drafter declares {drafter.num_nodes}")
    if draft.probes is not None and draft.probes.tokens.shape[1] > drafter.num_probes:
        raise AssertionError(f"{draft.probes.tokens.shape[1]} probes; the drafter declares {drafter.num_probes}")
    for row, parents in enumerate(draft.parents.tolist()):
        _assert_tree(parents, drafter.depth, draft.is_chain, f"row {row}")
        for node in np.flatnonzero(draft.valid[row]):
            _assert_node(draft, row, int(node), vocab, kind)


def law_p_value(
    drafter: Drafter, params: Any, tables: Any, make_rule: MakeRule, *, draws: int, tokens: int = 3, seed: int = 0
) -> float:
    """p-value of a G-test of whole decodes against the exact law of a four-token Markov target.

    Args:
        drafter: for a vocabulary of 4.
        params: its parameters.
        tables: its tables.
        make_rule: the rule under test.
        draws: sequences to draw; a batch of them runs at a time.
        tokens: length of the sequences, the prefill's token included.
        seed: of target table and draws.
    """
    law = random_law(4, seed)
    subject = Subject(markov_graph(4), markov_params(law), drafter, params, tables)
    loop, weights = subject.loop(make_rule)
    batch = min(draws, 1 << 12)
    counts = np.zeros(4**tokens, np.int64)
    for start in range(0, draws, batch):
        requests = [Request((0, 1), tokens, temperature=1.0, id=start + i) for i in range(batch)]
        state = decoding.prefill(loop, weights, requests, context=64, seed=seed)
        state = loop.run(weights, state, 1 << 30)
        counts += sequence_counts(np.asarray(state.tokens[:, 2 : 2 + tokens]), 4)
    return g_test(counts, sequence_law(law, 1, tokens)).p_value


def check_drafter(
    subject: Subject,
    make_exact_rule: MakeRule,
    *,
    prompt: Sequence[int] | None = None,
    draws: int = LAW_DRAWS,
) -> None:
    """The whole contract: drafts, the law, greedy and seeded equality, cache, rows, device loop.

    Rows are compared alone, in another slot and beside others, with drawn tokens too. Only where rows share a width
    (`Draft.widths`) a row's draws may depend on its neighbours, its law does not, and the one-hot rule stands in.

    Args:
        subject: target and drafter.
        make_exact_rule: a rule that is exact for the drafter's kind of draft.
        prompt: for the law, see `check_law`.
        draws: for the law, see `check_law`.

    Raises:
        AssertionError: what does not hold, and where.
        ValueError: the law cannot be tested, see `check_law`.
    """
    requests = random_requests(subject.vocab, 2 * BATCH)
    sampled = random_requests(subject.vocab, BATCH, seed=1, temperature=1.0)
    draft = check_draft(subject, sampled)
    check_law(subject, make_exact_rule, prompt=prompt, draws=draws)
    check_equals_autoregressive(subject, make_exact_rule, requests)
    check_rows_are_independent(subject, make_exact_rule, requests)
    seeded = make_exact_rule if draft.widths is None else OneHot
    check_rows_are_independent(subject, seeded, sampled)
    check_alone(subject, seeded, sampled)
    check_cache(subject, make_exact_rule, requests)
    check_device_loop(subject, make_exact_rule, requests)
    check_equals_autoregressive(subject, OneHot, sampled)


def _assert_tree(parents: list[int], depth: int, is_chain: bool, where: str) -> None:
    if is_chain:
        if parents != list(range(-1, len(parents) - 1)):
            raise AssertionError(f"{where}: the draft says it is a chain, its parents are {parents}")
        return
    try:
        check_parents(parents)
    except ValueError as error:
        raise AssertionError(f"{where}: {error}") from error
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    if max(found, default=0) > depth:
        node = int(np.argmax(found))
        raise AssertionError(f"{where}: node {node} lies at depth {found[node]}; the drafter declares depth {depth}")


def _assert_node(draft: Draft, row: int, node: int, vocab: int, kind: Kind) -> None:
    """A valid node's token, and the law that it says it was drawn from."""
    where, token, law = f"row {row}, node {node}", int(draft.tokens[row, node]), int(draft.law[row, node])
    if not 0 <= token < vocab:
        raise AssertionError(f"{where}: token {token}; expected an id in 0..{vocab - 1}")
    if law < 0:
        return
    if kind == "fixed":
        raise AssertionError(f"{where}: drawn from law {law}, but the drafter's kind is 'fixed'")
    if law >= draft.laws.shape[1] or draft.laws.dtype != np.float32:
        raise AssertionError(
            f"{where}: law {law} of {draft.laws.shape[1]} in {draft.laws.dtype}; expected float32 laws"
        )
    q = np.exp(np.asarray(draft.laws[row, law], np.float64))
    if not abs(q.sum() - 1) < 1e-3:
        raise AssertionError(f"{where}: its law sums to {q.sum()}; expected log-probabilities")
    ids = np.arange(len(q)) if draft.vocab is None else np.asarray(draft.vocab)
    # Behind siblings that took all that the law had to give, a draw without replacement has nothing left.
    if draft.siblings == "iid" and not q[ids == token].sum() > 0:
        raise AssertionError(f"{where}: token {token} has no mass under the law that it was drawn from")


def _programs() -> int:
    """How many programs of the loop exist."""
    return Loop.run._cache_size()  # type: ignore[attr-defined]


def _prefill(loop: Loop, weights: Weights, requests: Sequence[Request], seed: int = 0) -> DecodeState:
    return decoding.prefill(loop, weights, requests, context=CONTEXT, seed=seed, buffer=BUFFER)


def _assert_same(expected: Sequence[Completion], found: Sequence[Completion], what: str) -> None:
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.tokens != b.tokens or a.finish != b.finish:
            shared = min(len(a.tokens), len(b.tokens))
            at = next((j for j in range(shared) if a.tokens[j] != b.tokens[j]), shared)
            raise AssertionError(
                f"request {i} differs from {what} at new token {at}: expected {a.tokens[at:][:4]} ({a.finish}), "
                f"found {b.tokens[at:][:4]} ({b.finish})"
            )
