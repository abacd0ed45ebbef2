"""The law of a verification rule, measured: many single steps at once on a Markov target, against the exact law."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

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
CHAINS: frozenset[Kind] = frozenset({"fixed", "iid"})
FALSE_ALARM = 1e-6
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
    """Three children of the root and one grandchild under the first, made as `kind` says."""

    def make(keys: Keys, sampling: Sampling) -> Draft:
        n = keys.length.shape[0]
        logits = jnp.log(jnp.asarray(DRAFTED, jnp.float32))
        root_law = log_law(jnp.broadcast_to(logits[ROOT], (n, VOCAB)), sampling)
        level, law = _children(kind, keys, root_law)
        below_law = log_law(logits[level[0]], sampling)
        below = keys.sample(DRAFT, 3, below_law) if law[3] >= 0 else jnp.argmax(below_law, -1).astype(jnp.int32)
        return Draft(
            tokens=jnp.stack([*level, below], 1),
            parents=jnp.broadcast_to(jnp.asarray([-1, -1, -1, 0], jnp.int32), (n, 4)),
            valid=jnp.ones((n, 4), bool),
            law=jnp.broadcast_to(jnp.asarray(law, jnp.int32), (n, 4)),
            laws=jnp.stack([root_law, below_law], 1) if kind != "fixed" else jnp.zeros((n, 0, 1)),
            siblings="without_replacement" if kind == "without_replacement" else "iid",
        )

    return make


def chain_draft(kind: Kind) -> MakeDraft:
    """Two nodes, drawn (`iid`, where every node is an only child) or chosen (`fixed`)."""

    def make(keys: Keys, sampling: Sampling) -> Draft:
        logits = jnp.log(jnp.asarray(DRAFTED, jnp.float32))
        last, tokens, laws = jnp.full(keys.length.shape, ROOT), [], []
        for slot in range(DEPTH):
            laws.append(log_law(logits[last], sampling))
            likeliest = jnp.argmax(laws[-1], -1).astype(jnp.int32)
            last = likeliest if kind == "fixed" else keys.sample(DRAFT, slot, laws[-1])
            tokens.append(last)
        return chain(jnp.stack(tokens, 1), laws=None if kind == "fixed" else jnp.stack(laws, 1))

    return make


def score(draft: Draft) -> Scores:
    """What the Markov target answers to a draft under the root."""
    table = jnp.log(jnp.asarray(TARGET, jnp.float32))
    n = draft.tokens.shape[0]
    logits = jnp.concatenate([jnp.broadcast_to(table[ROOT], (n, 1, VOCAB)), table[draft.tokens]], 1)
    return Scores(logits, jnp.argmax(logits, -1).astype(jnp.int32), depths(draft.parents), {})


def draw_sequences(
    rule: Rule, make_draft: MakeDraft, make_sampling: MakeSampling, *, draws: int, seed: int = 3
) -> tuple[np.ndarray, float]:
    """One step of the rule a row, completed by plain sampling up to the horizon.

    Returns:
        Tokens `[draws, HORIZON]` and the mean number of accepted draft tokens.
    """
    rows = min(draws, ROWS)
    if draws % rows:
        raise ValueError(f"draws={draws}; expected a multiple of {ROWS}")

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

    @jax.jit
    def run(keys: Keys) -> tuple[jax.Array, jax.Array]:
        parts = jax.tree.map(lambda x: x.reshape(draws // rows, rows, *x.shape[1:]), keys)
        return jax.lax.map(step, parts)

    tokens, accepted = run(step_keys(draws, seed))
    return np.asarray(tokens).reshape(draws, HORIZON), float(np.mean(accepted))


def p_value(tokens_nt: np.ndarray, make_sampling: MakeSampling) -> float:
    """Of a G-test against the target's joint law; 0 when a sequence occurs that the law excludes."""
    law_vv = np.exp(np.asarray(log_law(jnp.log(jnp.asarray(TARGET, jnp.float32)), make_sampling(VOCAB))))
    law = sequence_law(law_vv.astype(np.float64), ROOT, HORIZON)
    counts = sequence_counts(tokens_nt, VOCAB)
    if counts[law == 0].sum():
        return 0.0
    return g_test(counts[law > 0], law[law > 0] / law.sum()).p_value


def check_rule(
    make_rule: Callable[[int], Rule], *, draws: int = 1 << 20, chains_only: bool = False
) -> dict[str, float]:
    """The output law of a rule is the target's, for every kind of draft that it declares itself exact for.

    Args:
        make_rule: depth to rule.
        draws: single steps a case.
        chains_only: for a rule that verifies no trees: drawn and chosen chains instead.

    Returns:
        The p-value of each case.

    Raises:
        AssertionError: names the case whose law differs (false alarms: one in a million).
        ValueError: the rule declares itself exact for no kind of draft that could be tested, or for an unknown one.
    """
    rule = make_rule(DEPTH)
    found: dict[str, float] = {}
    if unknown := sorted(rule.exact_for - set(get_args(Kind))):
        raise ValueError(
            f"{type(rule).__name__}.exact_for has {unknown[0]!r}; known kinds: {', '.join(get_args(Kind))}"
        )
    make_draft, kinds = (chain_draft, CHAINS) if chains_only else (tree_draft, rule.exact_for)
    if not rule.exact_for & kinds:
        raise ValueError(
            f"{type(rule).__name__}.exact_for is {sorted(rule.exact_for)}; expected at least one of "
            f"{', '.join(sorted(kinds) or get_args(Kind))}, else nothing is tested"
        )
    for kind in sorted(rule.exact_for & kinds):
        for name, rows in (("plain", plain), ("warped", warped)):
            tokens, _ = draw_sequences(rule, make_draft(kind), rows, draws=draws)
            found[f"{kind}, {name}"] = p_value(tokens, rows)
            if found[f"{kind}, {name}"] < FALSE_ALARM:
                raise AssertionError(
                    f"{type(rule).__name__} does not keep the target's law on a {kind!r} draft with {name} sampling: "
                    f"p = {found[f'{kind}, {name}']:.1e} after {draws} draws"
                )
    return found


def _children(kind: Kind, keys: Keys, root_law: jax.Array) -> tuple[list[jax.Array], list[int]]:
    n = keys.length.shape[0]
    if kind == "iid":
        return [keys.sample(DRAFT, i, root_law) for i in range(3)], [0, 0, 0, 1]
    if kind == "fixed":
        return list(jnp.broadcast_to(jnp.asarray([2, 0, 3], jnp.int32)[:, None], (3, n))), [-1, -1, -1, -1]
    if kind == "mixed":
        fixed = jnp.full((n,), 2, jnp.int32)
        return [keys.sample(DRAFT, 0, root_law), fixed, keys.sample(DRAFT, 2, root_law)], [0, -1, 0, 1]
    level, left = [], root_law
    for i in range(3):
        level.append(keys.sample(DRAFT, i, left))
        left = jnp.where(jnp.arange(VOCAB) == level[-1][:, None], -jnp.inf, left)
    return level, [0, 0, 0, 1]


def _rows(one: Sampling, draws: int) -> Sampling:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (draws,)), one)
