"""Every rule against the exact law, on many draws (a million in the slow tests); faults that a G-test must catch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.analysis import g_test, sequence_counts
from specjax.decoding import Draft, Keys, Scores, log_law, make_sampling, request_keys
from specjax.decoding.loop import emitted_block
from specjax.decoding.sampling import ACCEPT, DRAFT, draw
from specjax.testing.markov import random_law, sequence_law
from specjax.verification import OneHot, Recursive

V = 4
P, Q = random_law(V, 0), random_law(V, 1)
ROOT = 1
HORIZON = 3


def sampling(draws, temperature=1.0, **warps):
    one = make_sampling([temperature], **{k: [v] for k, v in warps.items()})
    return dataclasses.replace(
        one, **{k: jnp.broadcast_to(getattr(one, k), (draws,)) for k in ("temperature", "top_k", "top_p", "min_p")}
    )


def keys_for(draws, seed):
    base = jax.random.key(seed)
    data = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(base, i)))(jnp.arange(draws))
    return Keys(data, jnp.full((draws,), 5, jnp.int32))


def tree_draft(keys, samp, kind, q_vv=Q):
    """Three children of the root and one grandchild under the first, made as `kind` says."""
    n = keys.length.shape[0]
    logits = jnp.log(jnp.asarray(q_vv, jnp.float32))
    root_law = log_law(jnp.broadcast_to(logits[ROOT], (n, V)), samp)
    if kind == "iid":
        level = [keys.sample(DRAFT, i, root_law) for i in range(3)]
        law = [0, 0, 0, 1]
    elif kind == "without_replacement":
        level, left = [], root_law
        for i in range(3):
            level.append(keys.sample(DRAFT, i, left))
            left = jnp.where(jnp.arange(V) == level[-1][:, None], -jnp.inf, left)
        law = [0, 0, 0, 1]
    elif kind == "fixed":
        level = list(jnp.broadcast_to(jnp.asarray([2, 0, 3], jnp.int32)[:, None], (3, n)))
        law = [-1, -1, -1, -1]
    else:
        level = [keys.sample(DRAFT, 0, root_law), jnp.full((n,), 2, jnp.int32), keys.sample(DRAFT, 2, root_law)]
        law = [0, -1, 0, 1]
    below_law = log_law(logits[level[0]], samp)
    below = keys.sample(DRAFT, 3, below_law) if law[3] >= 0 else jnp.argmax(logits[level[0]], -1).astype(jnp.int32)
    return Draft(
        tokens=jnp.stack([*level, below], 1),
        parents=jnp.broadcast_to(jnp.asarray([-1, -1, -1, 0], jnp.int32), (n, 4)),
        valid=jnp.ones((n, 4), bool),
        law=jnp.broadcast_to(jnp.asarray(law, jnp.int32), (n, 4)),
        laws=jnp.stack([root_law, below_law], 1) if kind != "fixed" else jnp.zeros((n, 0, 1)),
        siblings="without_replacement" if kind == "without_replacement" else "iid",
    )


def score(draft):
    table = jnp.log(jnp.asarray(P, jnp.float32))
    n = draft.tokens.shape[0]
    logits = jnp.concatenate([jnp.broadcast_to(table[ROOT], (n, 1, V)), table[draft.tokens]], 1)
    depths = jnp.broadcast_to(jnp.asarray([0, 1, 1, 1, 2]), (n, 5))
    return Scores(logits, jnp.argmax(logits, -1).astype(jnp.int32), depths, {})


QUICK, MILLION = 1 << 16, 1 << 20


def sequences(rule, kind, samp_of, draft_of, seed, draws):
    """One step of the rule a row, then plain sampling up to the horizon: `[draws, HORIZON]`."""

    @jax.jit
    def run():
        keys, samp = keys_for(draws, seed), samp_of(draws)
        draft = draft_of(keys, samp, kind)
        verdict = rule.verify(draft, score(draft), samp, keys)
        block = emitted_block(draft, verdict)
        table = jnp.log(jnp.asarray(P, jnp.float32))
        out, last = [], jnp.full((draws,), ROOT)
        for t in range(HORIZON):
            fresh = draw(keys.at(9, keys.length + 100 + t, 0), log_law(table[last], samp))
            last = jnp.where(t <= verdict.num_accepted, block[:, min(t, block.shape[1] - 1)], fresh)
            out.append(last)
        return jnp.stack(out, 1), verdict.num_accepted.mean()

    tokens, accepted = run()
    return np.asarray(tokens), float(accepted)


def p_value(tokens, samp_of):
    warped = np.exp(np.asarray(log_law(jnp.log(jnp.asarray(P, jnp.float32)), samp_of(V))))
    law = sequence_law(warped.astype(np.float64), ROOT, HORIZON)
    counts = sequence_counts(tokens, V)
    if counts[law == 0].sum():
        return 0.0
    return g_test(counts[law > 0], law[law > 0] / law.sum()).p_value


PLAIN = sampling
WARPED = lambda n: sampling(n, 0.7, top_k=3, top_p=0.95)  # noqa: E731


@pytest.mark.pitfall("EAGLE#329", "jaymody/speculative-sampling#3", "mlx-swift-lm#459", "LookaheadDecoding#6")
@pytest.mark.parametrize("samp", [PLAIN, WARPED], ids=["plain", "warped"])
@pytest.mark.parametrize("kind", ["iid", "without_replacement", "fixed", "mixed"])
@pytest.mark.parametrize("rule", [Recursive(2), OneHot(2)], ids=["recursive", "one_hot"])
@pytest.mark.parametrize("draws", [QUICK, pytest.param(MILLION, marks=pytest.mark.slow)])
def test_output_law_is_the_targets(rule, kind, samp, draws):
    tokens, accepted = sequences(rule, kind, samp, tree_draft, 3, draws)
    assert accepted > 0.2
    assert p_value(tokens, samp) > 1e-6


def raw_q(keys, samp, kind):
    """Drawn from the warped law, reported raw."""
    draft = tree_draft(keys, samp, kind)
    raw = tree_draft(keys, sampling(keys.length.shape[0]), kind)
    return draft.replace(laws=raw.laws)


def argmax_with_soft_q(keys, samp, kind):
    draft = tree_draft(keys, samp, kind)
    return draft.replace(tokens=draft.tokens.at[:, 0].set(int(np.argmax(Q[ROOT]))))


def sorted_by_q(keys, samp, kind):
    """Drawn siblings put in order of their own probability."""
    draft = tree_draft(keys, samp, kind)
    order = jnp.argsort(-jnp.asarray(Q)[ROOT][draft.tokens[:, :3]], axis=1)
    tokens = jnp.take_along_axis(draft.tokens[:, :3], order, axis=1)
    return draft.replace(tokens=draft.tokens.at[:, :3].set(tokens), valid=draft.valid.at[:, 3].set(False))


def unconditional_q(keys, samp, kind):
    return tree_draft(keys, samp, "without_replacement").replace(siblings="iid")


def dropped_when_unlikely(keys, samp, kind):
    """A drawn token is thrown away because its own q is low."""
    draft = tree_draft(keys, samp, kind)
    likely = jnp.asarray(Q, jnp.float32)[ROOT][draft.tokens] > 0.2
    return draft.replace(valid=draft.valid & likely.at[:, 3].set(True))


FAULTS = {
    "raw_q": (raw_q, WARPED),
    "argmax_with_soft_q": (argmax_with_soft_q, PLAIN),
    "sorted_by_q": (sorted_by_q, PLAIN),
    "unconditional_q": (unconditional_q, PLAIN),
    "dropped_when_unlikely": (dropped_when_unlikely, PLAIN),
}


@pytest.mark.pitfall("transformers#47932")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault):
    draft_of, samp = FAULTS[fault]
    tokens, _ = sequences(Recursive(2), "iid", samp, draft_of, 3, QUICK)
    assert p_value(tokens, samp) < 1e-6
    # The one-hot rule asks nothing of the draft's law.
    tokens, _ = sequences(OneHot(2), "iid", samp, draft_of, 3, QUICK)
    assert p_value(tokens, samp) > 1e-6


@pytest.mark.pitfall("tpu-inference rejection_sampler (code)")
def test_impossible_token_is_rejected_even_when_the_uniform_is_zero(monkeypatch):
    monkeypatch.setattr(Keys, "uniform", lambda self, purpose, slot: jnp.zeros_like(self.length, jnp.float32))
    n = 3
    draft = tree_draft(keys_for(n, 0), sampling(n), "fixed")
    scores = score(draft)
    scores = scores.replace(logits=scores.logits.at[:, 0, 2].set(-jnp.inf))
    verdict = Recursive(2).verify(draft, scores, sampling(n), keys_for(n, 0))
    assert not np.any(np.asarray(verdict.path[:, 0]) == 0)


@pytest.mark.pitfall("llama.cpp#27694")
def test_acceptance_is_the_overlap_and_one_hot_accepts_less():
    def chain_only(keys, samp, kind):
        draft = tree_draft(keys, samp, "iid")
        return draft.replace(valid=draft.valid.at[:, 1:].set(False))

    _, exact = sequences(Recursive(2), "iid", PLAIN, chain_only, 5, QUICK)
    _, match = sequences(OneHot(2), "iid", PLAIN, chain_only, 5, QUICK)
    sigma = 0.5 / np.sqrt(QUICK)
    assert abs(exact - np.minimum(P[ROOT], Q[ROOT]).sum()) < 5 * sigma
    assert abs(match - (P[ROOT] * Q[ROOT]).sum()) < 5 * sigma


def test_inputs_are_unchanged():
    n = 8
    keys = keys_for(n, 0)
    draft = tree_draft(keys, sampling(n), "iid")
    scores = score(draft)
    before = jax.tree.map(np.array, (draft, scores))
    Recursive(2).verify(draft, scores, sampling(n), keys)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, (draft, scores)))


def test_purposes_have_keys_of_their_own():
    keys = Keys(request_keys(0, [0]), jnp.asarray([7]))
    a, b = keys.uniform(ACCEPT, 0), keys.uniform(DRAFT, 0)
    assert a != b
    assert keys.uniform(ACCEPT, 1) != a
    assert Keys(request_keys(0, [1]), jnp.asarray([7])).uniform(ACCEPT, 0) != a
