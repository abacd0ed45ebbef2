"""Texts end behind the token that ends them, in the middle of a block or across two, and nowhere else."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decoding import Request, StopText, check_requests, cut_text, generate
from specjax.decoding.termination import (
    FINISH_NAMES,
    MAX_STOP_TOKENS,
    cut,
    find_stops,
    stop_array,
)
from specjax.drafting import DraftModel
from specjax.drafting.registry import Drafting
from specjax.testing import contract, noisy_draft, tiny_target
from specjax.verification import Recursive
from tests.contract.test_contract import VOCAB, config, subject


def found(stops, text, prompt, committed):
    """Where sequences end in the block behind `committed` tokens of the text."""
    tokens = np.zeros((1, len(text) + 4), np.int32)
    tokens[0, : len(text)] = text
    arguments = (jnp.asarray(stop_array([stops])), jnp.asarray(tokens), jnp.asarray([committed]), jnp.asarray([prompt]))
    return np.flatnonzero(find_stops(*arguments, jnp.asarray([text[committed:]]))[0]).tolist()


def test_sequences_within_and_across_blocks():
    text = [9, 8, 1, 2, 3, 1, 2, 3, 4]
    assert found([(1, 2, 3)], text, 2, 2) == [2, 5]
    assert found([(1, 2, 3)], text, 2, 4) == [0, 3]  # begun in an earlier block
    assert found([(3, 4), (2,), (1, 2, 3, 1, 2, 3, 4)], text, 2, 3) == [0, 3, 5]  # several, of several lengths
    assert found([(4, 4)], text, 2, 3) == []


def test_the_prompts_tail_is_no_part_of_a_sequence():
    text = [9, 1, 2, 3, 1, 2, 3]
    assert found([(1, 2, 3)], text, 2, 3) == [3]  # the first 1 is the user's
    assert found([(2, 3)], text, 2, 3) == [0, 3]


def test_rows_without_a_sequence_never_stop():
    stops = stop_array([((1, 2), (3,)), ()])
    assert stops.shape == (2, 2, 2)
    tokens = jnp.asarray([[0, 1, 2, 3]] * 2)
    hit = find_stops(jnp.asarray(stops), tokens, jnp.asarray([1, 1]), jnp.asarray([1, 1]), tokens[:, 1:])
    np.testing.assert_array_equal(hit, [[False, True, True], [False, False, False]])
    assert stop_array([(), ()]) is None


@pytest.mark.pitfall("transformers#47912", "vllm#56101", "lattice#245", "koboldcpp#1276")
@pytest.mark.parametrize(
    "offered, room, stop_at, count, finish",
    [
        (4, 9, None, 4, "running"),  # tokens 5 6 0 7: id 0 ends a text
        (4, 9, 1, 2, "stop_sequence"),
        (4, 2, 1, 2, "stop_sequence"),  # the budget ends with the same token
        (4, 1, 1, 1, "length"),
        (2, 9, 3, 2, "running"),  # a sequence in what was not offered
        (4, 4, None, 4, "length"),
    ],
)
def test_the_first_end_cuts(offered, room, stop_at, count, finish):
    stopped = None if stop_at is None else jnp.arange(4)[None] == stop_at
    n, reason = cut(jnp.asarray([[5, 6, 1, 7]]), jnp.asarray([offered]), jnp.asarray([room]), (0,), stopped)
    assert (int(n[0]), FINISH_NAMES[int(reason[0])]) == (count, finish)


@pytest.mark.parametrize("room, stop_at, finish", [(9, None, "stop"), (3, 2, "stop"), (3, None, "stop")])
def test_end_of_sequence_comes_before_what_falls_on_the_same_token(room, stop_at, finish):
    stopped = None if stop_at is None else jnp.arange(4)[None] == stop_at
    n, reason = cut(jnp.asarray([[5, 6, 0, 7]]), jnp.asarray([4]), jnp.asarray([room]), (2, 0), stopped)
    assert (int(n[0]), FINISH_NAMES[int(reason[0])]) == (3, finish)


# ---- In the loop ----


@pytest.fixture(scope="module")
def always_right():
    """The target drafts for itself: whole blocks are accepted, so ends fall inside them."""
    sub = subject("draft_model")
    drafter = DraftModel(config(2), num_nodes=3)
    return dataclasses.replace(sub, drafter=drafter, params=sub.target, eos=())


def run(pair, requests, batch=4):
    return generate(*pair, requests, context=contract.CONTEXT, vocab=VOCAB, batch=batch, buffer=contract.BUFFER)


def first_end(tokens, stops):
    """By brute force: the text up to its first complete stop sequence, and whether there is one."""
    for end in range(1, len(tokens) + 1):
        if any(len(stop) <= end and tuple(tokens[end - len(stop) : end]) == tuple(stop) for stop in stops):
            return tuple(tokens[:end]), True
    return tuple(tokens), False


@pytest.mark.pitfall("transformers#47912", "vllm#56101")
def test_stop_sequences_cut_where_plain_text_says(always_right):
    prompts = [tuple((np.arange(4 + i) * (i + 3) % VOCAB).tolist()) for i in range(8)]
    whole = run(always_right.autoregressive(), [Request(p, 24, id=i) for i, p in enumerate(prompts)])
    requests, expected = [], []
    for i, (prompt, done) in enumerate(zip(prompts, whole, strict=True)):
        text, at = done.tokens, 2 + i  # ends at every offset of a block of four
        stops = [text[at : at + 1 + i % 4], (prompt[-1], *text[:1]), text[at + 5 : at + 7]][: 1 + i % 3]
        # The second one begins in the prompt, and must not count there.
        requests.append(Request(prompt, 24, id=i, stop=tuple(stops)))
        expected.append(first_end(text, stops))
    requests.append(Request(prompts[0], 24, id=0))  # none of its own, beside rows that have some
    expected.append((whole[0].tokens, False))
    for pair in (always_right.autoregressive(), always_right.loop(Recursive)):
        for done, (text, ended) in zip(run(pair, requests), expected, strict=True):
            assert done.tokens == text
            assert done.finish == ("stop_sequence" if ended else "length")
            # Statistics count what was emitted and nothing behind the cut.
            assert done.emitted == len(text) - 1
            drafted = int((done.accepted * np.arange(len(done.accepted))).sum())
            assert done.emitted - done.steps <= drafted <= done.emitted
            assert done.reached.sum() <= done.emitted
    assert drafted > 0


@pytest.mark.pitfall("lattice#245", "koboldcpp#1276", "vllm#53812", "vllm#42533")
def test_every_budget_is_kept_to_the_token(always_right):
    prompt = (1, 2, 3)
    longest = run(always_right.autoregressive(), [Request(prompt, 20)] * 4)[0]  # four rows: a program that exists
    # The context ends inside a block, too.
    near = Request(tuple((np.arange(contract.CONTEXT - 2) % VOCAB).tolist()), 20)
    requests = [Request(prompt, budget) for budget in range(1, 21)]
    *by_budget, last = run(always_right.loop(Recursive), [*requests, near], batch=21)
    for budget, done in enumerate(by_budget, start=1):
        assert done.tokens == longest.tokens[:budget] and done.finish == "length"
        assert done.emitted == budget - 1
    assert len(last.tokens) == 2 and last.finish == "length"


@pytest.mark.parametrize(
    "stop, message",
    [
        (((),), rf"stop sequence 0 of prompt 0 has 0 tokens; expected 1 to {MAX_STOP_TOKENS}"),
        (((1,), (1,) * 40), r"stop sequence 1 of prompt 0 has 40 tokens"),
        (((1, 13),), r"stop sequence 0 of prompt 0 holds token 13; expected ids in 0..12"),
        (("ab",), r"stop sequence 0 of prompt 0 is 'ab'; expected a sequence of token ids"),
        ((3,), r"stop sequence 0 of prompt 0 is 3"),
        ((np.int64(3),), r"stop sequence 0 of prompt 0 is np.int64\(3\)"),
        (((1.7,),), r"stop sequence 0 of prompt 0 holds token 1.7; expected ids"),
        ((("a",),), r"stop sequence 0 of prompt 0 holds token 'a'; expected ids"),
    ],
)
def test_bad_stop_sequences_are_named(stop, message):
    with pytest.raises(ValueError, match=message):
        check_requests([Request((1,), 4, stop=stop)], 64, VOCAB)


# ---- Text ----


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_in_text_however_it_comes(size):
    for text, stops, expected in [
        ("one. Two", ("\n",), ("one. Two", False)),
        ("one.\n\nTwo", ("\n\n", "Two"), ("one.", True)),
        ("aaab", ("aab",), ("a", True)),
        ("abab", ("abac",), ("abab", False)),
        ("ab\n", ("\n\n",), ("ab\n", False)),
        ("xSTOP", ("TOP", "STOP"), ("x", True)),
        ("abcd", ("bc", "abcd"), ("a", True)),
    ]:
        watch = StopText(stops)
        pieces = [watch.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert ("".join(pieces) + watch.finish(), watch.found) == expected
        assert cut_text(text, stops) == expected


def test_stop_strings_of_the_short_api():
    target = dataclasses.replace(tiny_target(layers=1, width=16), eos_ids=())
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    prompt, budget = "a rose is a rose is a rose", 40
    whole = specjax.generate(target, drafting, prompt, max_new_tokens=budget)
    stop = whole.text[12:14]
    assert len(stop) == 2 and "\N{REPLACEMENT CHARACTER}" not in stop
    options = dict(max_new_tokens=budget, stop=stop)
    done = specjax.generate(target, drafting, prompt, **options)
    assert done.text == whole.text.split(stop)[0] and done.finish == "stop_sequence"
    assert len(done.completion.tokens) < len(whole.completion.tokens)  # the loop itself stopped
    pieces = list(specjax.stream(target, drafting, prompt, **options))
    assert "".join(piece for piece, _ in pieces) == done.text
    with pytest.raises(ValueError, match="stop string 0 is ''; expected some text"):
        specjax.generate(target, drafting, prompt, stop="")


def test_stop_strings_are_counted_as_the_loop_counts_them(monkeypatch: pytest.MonkeyPatch):
    """Whether the loop ends a text by token ids or the host by what it reads: the same tokens, the same counts."""
    target = dataclasses.replace(tiny_target(layers=1, width=16), eos_ids=())
    drafting = Drafting("draft_model", DraftModel(target.config, 3), noisy_draft(target, 0.1), {})
    text = [target.tokenizer.decode([i]) for i in range(target.config.vocab_size)]
    silent = [i for i, c in enumerate(text) if not (c.isascii() and c.isprintable() and c)]
    prompts = ["a rose is a rose", "abcabc", "what is it?"]
    options = dict(max_new_tokens=24, batch=2, suppress_tokens=silent)
    whole = specjax.generate(target, drafting, prompts, **options)
    drafted = 0
    for stop in list(dict.fromkeys(whole[0].text))[3::2]:  # ends at one offset of a block and another
        by_loop = specjax.generate(target, drafting, prompts, stop=stop, **options)
        with monkeypatch.context() as patched:
            patched.setattr("specjax.api.answers.stop_tokens", lambda target, stops: ())
            by_host = specjax.generate(target, drafting, prompts, stop=stop, **options)
        assert by_host[0].finish == "stop_sequence" and by_host[0].text == whole[0].text.split(stop)[0]
        for loop, host in zip(by_loop, by_host, strict=True):
            assert loop.text == host.text and loop.finish == host.finish
            one, other = (dataclasses.asdict(r.completion) for r in (loop, host))
            assert all(np.array_equal(one[name], other[name]) for name in one)
            drafted += host.completion.accepted[1:].sum()
    assert drafted > 0
