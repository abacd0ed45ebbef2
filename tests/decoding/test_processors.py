"""Penalties, bias and suppression: equal to transformers', and over every node's own ancestors."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Request, check_requests, generate, log_law, make_sampling
from specjax.decoding.processors import History, init_history, process
from specjax.testing import contract
from specjax.verification import OneHot, Recursive
from tests.contract.test_contract import VOCAB, subject

ALL = dict(
    repetition_penalty=1.7,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    logit_bias={3: 1.5, 7: -2.0},
    suppress_tokens=(4,),
)


def rows(count=1, **changed):
    """`ALL` in every row, or what is given."""
    return {name: [value] * count for name, value in {**ALL, **changed}.items()}


def penalised(logits, prompt, output, sampling):
    """One place by the definitions: bias, repetition over prompt and output, frequency and presence over output."""
    x = np.array(logits, np.float64)
    for token, value in sampling["logit_bias"].items():
        x[token] += value
    for token in {*prompt, *output}:
        x[token] *= sampling["repetition_penalty"] ** (1 if x[token] < 0 else -1)
    for token in output:
        x[token] -= sampling["frequency_penalty"]
    for token in set(output):
        x[token] -= sampling["presence_penalty"]
    x[list(sampling["suppress_tokens"])] = -np.inf
    return x


@pytest.mark.parametrize("seed", [0, 1])
def test_the_whole_chain_equals_transformers(seed):
    """Temperature 0.8, top-k 40, top-p 0.9, min-p 0.02 behind bias, repetition penalty and suppression."""
    torch = pytest.importorskip("torch")
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, 100)).astype(np.float32) * 3
    text = rng.integers(0, 100, (3, 30))
    steps = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[3], 1.5], [[7], -2.0]]),
            RepetitionPenaltyLogitsProcessor(1.7),
            SuppressTokensLogitsProcessor([4]),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    expected = torch.softmax(steps(torch.tensor(text), torch.tensor(logits)), -1).numpy()
    sampling = make_sampling(
        [0.8] * 3, [40] * 3, [0.9] * 3, [0.02] * 3, **rows(3, presence_penalty=0.0, frequency_penalty=0.0)
    )
    # The text lies in prompt and output alike: the repetition penalty is over both.
    history = init_history(jnp.asarray(text), jnp.asarray([30, 10, 20]), 100)
    rest = np.stack([np.roll(row, -n) for row, n in zip(text, (30, 10, 20), strict=True)])
    history = history.add(jnp.asarray(rest), jnp.asarray([0, 20, 10]))
    processed = process(jnp.asarray(logits)[:, None], sampling, history)[:, 0]
    np.testing.assert_allclose(jnp.exp(log_law(processed, sampling)), expected, atol=1e-6)


def test_presence_and_frequency_count_the_output_alone():
    logits = np.random.default_rng(2).normal(size=(2, 20)).astype(np.float32)
    prompts, outputs = [[1, 2, 2, 9], [5]], [[2, 2, 11], []]
    history = init_history(jnp.asarray([[1, 2, 2, 9], [5, 0, 0, 0]]), jnp.asarray([4, 1]), 20)
    history = history.add(jnp.asarray([[2, 2, 11, 19], [7, 7, 7, 7]]), jnp.asarray([3, 0]))
    found = process(jnp.asarray(logits)[:, None], make_sampling([1.0] * 2, **rows(2)), history)[:, 0]
    for row in range(2):
        np.testing.assert_allclose(found[row], penalised(logits[row], prompts[row], outputs[row], ALL), atol=1e-5)


def tree_case(seed=3, nodes=9, vocab=12):
    """A random tree of few tokens, so that paths repeat tokens of their own and of the text."""
    rng = np.random.default_rng(seed)
    parents = np.asarray([rng.integers(-1, node) for node in range(nodes)])
    tokens = rng.integers(0, 5, nodes)
    logits = rng.normal(size=(nodes + 1, vocab)).astype(np.float32)
    on_path = np.zeros((nodes + 1, nodes), bool)
    for node in range(nodes):
        at = node
        while at >= 0:
            on_path[node + 1, at] = True
            at = parents[at]
    return tokens, logits, on_path


def test_every_node_sees_its_own_ancestors():
    tokens, logits, on_path = tree_case()
    prompt, output = [0, 8], [1, 1, 6]
    history = init_history(jnp.asarray([prompt]), jnp.asarray([2]), 12).add(jnp.asarray([output]), jnp.asarray([3]))
    sampling = make_sampling([1.0], **rows())
    arguments = (jnp.asarray(logits)[None], sampling, history, jnp.asarray(tokens)[None])
    found = process(*arguments, jnp.asarray(on_path)[None])[0]
    expected = [penalised(logits[m], prompt, [*output, *tokens[on_path[m]]], ALL) for m in range(len(logits))]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # What forgets the path, or takes the whole tree for it, is another law.
    forgets, mixes = process(*arguments[:3])[0], process(*arguments, jnp.ones_like(jnp.asarray(on_path))[None])[0]
    for wrong in (forgets, mixes):
        assert np.abs(np.where(np.isfinite(wrong), wrong - found, 0)).max() > 0.3


def test_a_reduced_draft_vocabulary_is_processed_alike():
    tokens, logits, on_path = tree_case()
    vocab = np.asarray([7, 0, 4, 3, 1, 2])  # draft id to target id; drafted ids are 0..4
    history = init_history(jnp.asarray([[0, 8]]), jnp.asarray([2]), 12)
    sampling = make_sampling([1.0], **rows())
    full = process(jnp.asarray(logits)[None], sampling, history, jnp.asarray(vocab[tokens])[None], on_path[None])
    reduced = process(
        jnp.asarray(logits[:, vocab])[None], sampling, history, tokens[None], on_path[None], jnp.asarray(vocab)
    )
    np.testing.assert_allclose(reduced[0], full[0][:, vocab], atol=1e-6)


def test_rows_without_processors_are_left_alone():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(2, 1, 20)), jnp.float32)
    history = History(jnp.ones((2, 20), bool), jnp.ones((2, 20), jnp.int32))
    sampling = make_sampling([1.0] * 2, repetition_penalty=[1.0, 2.0], logit_bias=[{}, {1: 3.0}])
    found = process(logits, sampling, history)
    np.testing.assert_array_equal(found[0], logits[0])
    assert (np.asarray(found[1]) != np.asarray(logits[1])).all()
    assert process(logits, make_sampling([1.0] * 2), None) is logits


def test_penalties_need_a_history():
    with pytest.raises(ValueError, match="penalties need the rows' history"):
        process(jnp.zeros((1, 1, 4)), make_sampling([1.0], presence_penalty=[1.0]), None)


# ---- In the loop ----


def mixed_requests(temperature):
    """One prompt, in rows that differ in what they use; the first uses nothing."""
    options = [
        {},
        ALL,
        dict(repetition_penalty=1.4),
        dict(presence_penalty=-0.8, frequency_penalty=0.9),
        dict(suppress_tokens=(1, 2, 3), logit_bias={6: 2.0}),
        dict(frequency_penalty=1.5, suppress_tokens=(0,)),
    ]
    return [Request((1, 2, 3, 4, 1, 2, 3, 4), 30, temperature, **option) for option in options]


def endless(name):
    return dataclasses.replace(subject(name), eos=())


def completions(pair, requests, batch=6):
    """Several rows at a time: they share one program, whatever each of them uses."""
    return generate(*pair, requests, context=contract.CONTEXT, vocab=VOCAB, batch=batch, buffer=contract.BUFFER)


@pytest.mark.parametrize(
    "name, rule, temperature, batch", [("draft_model", OneHot, 1.0, 2), ("feature_tree", Recursive, 0.0, 6)]
)
def test_speculative_output_equals_plain_decoding(name, rule, temperature, batch):
    """With and without slot refill."""
    sub, requests = endless(name), mixed_requests(temperature)
    base = completions(sub.autoregressive(), requests)
    mine = completions(sub.loop(rule), requests, batch)
    assert [c.tokens for c in mine] == [c.tokens for c in base]
    assert sum(c.accepted[1:].sum() for c in mine) > 0
    for request, done in zip(requests, base, strict=True):
        assert not set(request.suppress_tokens) & set(done.tokens)
        if request != requests[0]:
            assert done.tokens != base[0].tokens


def test_penalties_that_ignore_drafted_ancestors_are_caught(monkeypatch):
    """The planted fault: the loop's own processing without the path."""
    sub, requests = endless("feature_tree"), mixed_requests(0.0)
    base = completions(sub.autoregressive(), requests)

    def forgetful(logits, sampling, history, drafted=None, on_path=None, vocab=None):
        return process(logits, sampling, history, vocab=vocab)

    monkeypatch.setattr("specjax.decoding.draft.process", forgetful)
    loop, weights = sub.loop(Recursive)
    wrong = dataclasses.replace(loop, chunk=8)  # A program of its own: no other test is given the faulty one.
    assert [c.tokens for c in completions((wrong, weights), requests)] != [c.tokens for c in base]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(repetition_penalty=[0.0]), r"repetition_penalty=0.0 in row 0; expected a number > 0"),
        (dict(repetition_penalty=[-1.0]), r"repetition_penalty=-1.0 in row 0"),
        (dict(repetition_penalty=[1.0, 1.0]), r"repetition_penalty has 2 values for 1 rows"),
        (dict(presence_penalty=[float("nan")]), r"presence_penalty=nan in row 0"),
        (dict(frequency_penalty=[]), r"frequency_penalty has 0 values for 1 rows"),
        (dict(logit_bias=[{5: float("-inf")}]), r"logit_bias of token 5 is -inf in row 0.*suppress_tokens"),
        (dict(suppress_tokens=[(-3,)]), r"token -3 is biased or suppressed in row 0"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_sampling([1.0], **arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(logit_bias={99: 1.0}), r"logit_bias of prompt 0 names token 99; expected ids in 0..12"),
        (dict(suppress_tokens=(13,)), r"suppress_tokens of prompt 0 names token 13"),
        (dict(suppress_tokens=tuple(range(13))), r"holds the whole vocabulary"),
    ],
)
def test_bad_requests_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        check_requests([Request((1,), 4, **options)], 64, VOCAB)
