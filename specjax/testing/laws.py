"""The law of a verification rule, measured: many single steps at once on a Markov target, against the exact law."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specjax.analysis import g_test, sequence_counts
from specjax.decoding import Draft, Keys, Kind, Rule, Sampling, Scores, log_law, make_sampling
from specjax.decoding.loop import emitted_block
from specjax.decoding.sampling import DRAFT, draw
from specjax.decoding.tree import chain, depths
from specjax.testing.markov import random_law, sequence_law

VOCAB, DEPTH, HORIZON, ROOT = 4, 2, 3, 1
TARGET, DRAFTED = random_law(VOCAB, 0), random_law(VOCAB, 1)
TARGET_STEPS, DRAFTED_STEPS = random_law(VOCAB, 0, sharpness=1.0), random_law(VOCAB, 4, sharpness=2.5)
ROWS = 1 << 12  # Steps that run side by side; all draws at once would only fold large constants.
COMPLETION = 99  # A purpose of its own for the tokens behind the step.

# draws -> sampling parameters of so many rows
MakeSampling = Callable[[int], Sampling]
# (keys, sampling) -> draft
MakeDraft = Callable[[Keys, Sampling], Draft]


def plain(draws: int) -> Sampling:
    """Temperature 1."""
    return _rows(make_sampling([1.0]), draws)


def warped(draws: int) -> Sampling:
    """Temperature 0.7, top-k 3, top-p 0.95."""
    return _rows(make_sampling([0.7], [3], [0.95]), draws)


def step_keys(draws: int, seed: int) -> Keys:
    """Keys of so many requests, all at the same committed length."""
    base = jax.random.key(seed)
    data = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(base, i)))(jnp.arange(draws))
    return Keys(data, jnp.full((draws,), 5, jnp.int32))


def tree_draft(kind: Kind) -> MakeDraft:
    """Three children of the root, two under the first of them and one under the second, made as `kind` says.

    So siblings are rejected above and below, and the law moves on to a later sibling that has children of its own.
    """

    def make(keys: Keys, sampling: Sampling) -> Draft:
        n = keys.length.shape[0]
        logits = jnp.log(jnp.asarray(DRAFTED, jnp.float32))
        root_law = log_law(jnp.broadcast_to(logits[ROOT], (n, VOCAB)), sampling)
        level, drawn = _children(kind, keys, root_law, range(3))
        laws, law = [root_law], [0 if own else -1 for own in drawn]
        tokens = list(level)
        for row, (above, slots) in enumerate(((0, range(3, 5)), (1, range(5, 6))), 1):
            laws.append(log_law(logits[level[above]], sampling))
            below, drawn = _children(kind, keys, laws[-1], slots)
            tokens += below
            law += [row if own else -1 for own in drawn]
        return Draft(
            tokens=jnp.stack(tokens, 1),
            parents=jnp.broadcast_to(jnp.asarray([-1, -1, -1, 0, 0, 1], jnp.int32), (n, 6)),
            valid=jnp.ones((n, 6), bool),
            law=jnp.broadcast_to(jnp.asarray(law, jnp.int32), (n, 6)),
            laws=jnp.stack(laws, 1) if kind != "fixed" else jnp.zeros((n, 0, 1)),
            siblings="without_replacement" if kind == "without_replacement" else "iid",
        )

    return make


def mapped(make_draft: MakeDraft) -> MakeDraft:
    """The same drafts by way of a draft vocabulary in an order of its own, with their laws the other way round."""
    order = jnp.asarray([2, 0, 3, 1], jnp.int32)

    def make(keys: Keys, sampling: Sampling) -> Draft:
        draft = make_draft(keys, sampling)
        if not draft.laws.shape[1]:
            return draft
        law = jnp.where(draft.law >= 0, draft.laws.shape[1] - 1 - draft.law, -1)
        return dataclasses.replace(draft, law=law, laws=draft.laws[:, ::-1, order], vocab=order)

    return make


def chain_draft(kind: Kind, table_vv: np.ndarray = DRAFTED) -> Callable[..., Draft]:
    """Two nodes, drawn (`iid`, where every node is an only child) or chosen (`fixed`).

    Args:
        kind: see above.
        table_vv: the draft's laws behind each token.

    Returns:
        A `MakeDraft`, which may be given the root's token `[B]` too.
    """

    def make(keys: Keys, sampling: Sampling, root: jax.Array | int = ROOT) -> Draft:
        logits = jnp.log(jnp.asarray(table_vv, jnp.float32))
        last, tokens, laws = jnp.broadcast_to(jnp.asarray(root), keys.length.shape), [], []
        for slot in range(DEPTH):
            laws.append(log_law(logits[last], sampling))
            likeliest = jnp.argmax(laws[-1], -1).astype(jnp.int32)
            last = likeliest if kind == "fixed" else keys.sample(DRAFT, slot, laws[-1])
            tokens.append(last)
        return chain(jnp.stack(tokens, 1), laws=None if kind == "fixed" else jnp.stack(laws, 1))

    return make


def score(draft: Draft, root: jax.Array | int = ROOT, table_vv: np.ndarray = TARGET) -> Scores:
    """What the Markov target answers to a draft under the root's token, an id or `[B]`."""
    table = jnp.log(jnp.asarray(table_vv, jnp.float32))
    roots = jnp.broadcast_to(jnp.asarray(root), draft.tokens.shape[:1])
    logits = jnp.concatenate([table[roots][:, None], table[draft.tokens]], 1)
    return Scores(logits, jnp.argmax(logits, -1).astype(jnp.int32), depths(draft.parents), {})


def draw_sequences(
    rule: Rule, make_draft: MakeDraft, make_sampling: MakeSampling, *, draws: int, seed: int = 3
) -> tuple[np.ndarray, float]:
    """One step of the rule a row, completed by plain sampling up to the horizon.

    Returns:
        Tokens `[draws, HORIZON]` and the mean number of accepted draft tokens.
    """
    rows = _rows_of(draws)

    def step(keys: Keys) -> tuple[jax.Array, jax.Array]:
        sampling = make_sampling(rows)
        draft = make_draft(keys, sampling)
        verdict = rule.verify(draft, score(draft), sampling, keys)
        block = emitted_block(draft, verdict)
        table = jnp.log(jnp.asarray(TARGET, jnp.float32))
        out, last = [], jnp.full((rows,), ROOT)
        for t in range(HORIZON):
            fresh = draw(keys.at(COMPLETION, keys.length + t, 0), log_law(table[last], sampling))
            last = jnp.where(t <= verdict.num_accepted, block[:, min(t, block.shape[1] - 1)], fresh)
            out.append(last)
        return jnp.stack(out, 1), verdict.num_accepted

    run = jax.jit(lambda keys: jax.lax.map(step, keys))
    tokens, accepted = run(_batches(step_keys(draws, seed), rows))
    return np.asarray(tokens).reshape(draws, HORIZON), float(np.mean(accepted))


def p_value(tokens_nt: np.ndarray, make_sampling: MakeSampling, table_vv: np.ndarray = TARGET) -> float:
    """Of a G-test against the target's joint law; 0 when a sequence occurs that the law excludes."""
    law_vv = np.exp(np.asarray(log_law(jnp.log(jnp.asarray(table_vv, jnp.float32)), make_sampling(VOCAB))))
    law = sequence_law(law_vv.astype(np.float64), ROOT, HORIZON)
    counts = sequence_counts(tokens_nt, VOCAB)
    if counts[law == 0].sum():
        return 0.0
    return g_test(counts[law > 0], law[law > 0] / law.sum()).p_value


def decodes_p_value(rule: Rule, kind: Kind, *, draws: int, seed: int = 3) -> float:
    """p-value of a G-test of `HORIZON` tokens that several steps of the rule wrote, all on chains of the draft.

    Target and draft are tables on which uniforms that a later step meets again show (see `specjax.testing.faults`).

    Args:
        rule: made for `DEPTH`.
        kind: drawn chains, or `fixed`.
        draws: decodes.
        seed: of all draws.
    """
    rows, make_draft = _rows_of(draws), chain_draft(kind, DRAFTED_STEPS)

    def step(_: jax.Array, carry: tuple[jax.Array, jax.Array], keys: Keys) -> tuple[jax.Array, jax.Array]:
        tokens, count = carry
        root = jnp.where(count > 0, jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0], ROOT)
        here, sampling = Keys(keys.request, keys.length + count), plain(rows)
        draft = make_draft(here, sampling, root)
        verdict = rule.verify(draft, score(draft, root, TARGET_STEPS), sampling, here)
        place = jnp.arange(tokens.shape[1]) - count[:, None]
        block = jnp.take_along_axis(emitted_block(draft, verdict), jnp.clip(place, 0, DEPTH), 1)
        emitted = verdict.num_accepted + 1
        return jnp.where((place >= 0) & (place < emitted[:, None]), block, tokens), count + emitted

    def decode(keys: Keys) -> jax.Array:
        start = jnp.zeros((rows, HORIZON * (DEPTH + 1)), jnp.int32), jnp.zeros((rows,), jnp.int32)
        return jax.lax.fori_loop(0, HORIZON, partial(step, keys=keys), start)[0][:, :HORIZON]

    tokens = jax.jit(lambda keys: jax.lax.map(decode, keys))(_batches(step_keys(draws, seed), rows))
    return p_value(np.asarray(tokens).reshape(draws, HORIZON), plain, TARGET_STEPS)


def _children(kind: Kind, keys: Keys, law_bv: jax.Array, slots: range) -> tuple[list[jax.Array], list[bool]]:
    """Siblings `[B]` each, and which of them were drawn from the law; the others are chosen."""
    n, count = law_bv.shape[0], len(slots)
    if kind == "fixed":
        return [jnp.full((n,), token, jnp.int32) for token in (2, 0, 3)[:count]], [False] * count
    if kind == "mixed":
        chosen = [i == 1 for i in range(count)]
        level = [
            jnp.full((n,), 2, jnp.int32) if own else keys.sample(DRAFT, slot, law_bv)
            for own, slot in zip(chosen, slots, strict=True)
        ]
        return level, [not own for own in chosen]
    level, left = [], law_bv
    for slot in slots:
        level.append(keys.sample(DRAFT, slot, left))
        if kind == "without_replacement":
            left = jnp.where(jnp.arange(VOCAB) == level[-1][:, None], -jnp.inf, left)
    return level, [True] * count


def _rows_of(draws: int) -> int:
    if draws < 1 or draws % min(draws, ROWS):
        raise ValueError(f"draws={draws}; expected 1 to {ROWS}, or a multiple of {ROWS}")
    return min(draws, ROWS)


def _batches(keys: Keys, rows: int) -> Keys:
    return jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), keys)


def _rows(one: Sampling, draws: int) -> Sampling:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (draws,)), one)
