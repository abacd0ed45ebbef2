"""The host side: requests are checked before anything compiles, streaming yields what generation returns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import build
from specjax.decoding import Request, check_requests, generate, make_sampling, request_keys, stream
from specjax.drafting import DraftModel
from specjax.evaluation.conversations import encode
from specjax.testing import tiny_target


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request((), 4), "prompt 0 is empty"),
        (Request((1, 300), 4), "prompt 0 holds token 300; expected whole numbers in 0..99"),
        (Request((1,), 0), "max_new_tokens=0 for prompt 0; expected at least 1"),
        (Request((1,), 2.5), "max_new_tokens=2.5 for prompt 0; expected at least 1, a whole number"),
        (Request((1,), 4, id=-1), "id=-1 of prompt 0; expected a number in 0..4294967295"),
        (Request((1,) * 64, 4), "prompt 0 has 64 tokens, but the model's context is 64"),
    ],
)
def test_bad_requests_are_named(request_, message):
    with pytest.raises(ValueError, match=message):
        check_requests([request_], context=64, vocab=100)


def test_no_request_at_all():
    with pytest.raises(ValueError, match="no prompts were given"):
        check_requests([], context=64, vocab=100)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_a_budget_may_be_any_whole_number(target):
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    for budget in (4.0, np.int64(4)):
        assert len(specjax.generate(target, drafting, "a rose is", max_new_tokens=budget).completion.tokens) <= 4


def test_text_held_back_is_streamed_in_front_of_a_fault(target):
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    tokens = specjax.generate(target, drafting, "a rose is a rose", max_new_tokens=12).completion.tokens
    prompt = encode(target, [{"role": "user", "content": "a rose is a rose"}])
    end = next(i for i, t in enumerate(tokens) if i and t not in (*prompt, *tokens[:i], *target.eos_ids))
    embedding = target.params["embed"]["embedding"].at[tokens[end]].set(jnp.nan)
    broken = dataclasses.replace(target, params=target.params | {"embed": {"embedding": embedding}})
    text, pieces = target.tokenizer.decode(tokens[: end + 1]), []
    with pytest.raises(FloatingPointError, match=f"{end + 1} of output"):
        for piece, _ in specjax.stream(
            broken, drafting, "a rose is a rose", max_new_tokens=12, stop=text[-1] + "never"
        ):
            pieces.append(piece)
    assert "".join(pieces) == text


def test_streaming_yields_what_generation_returns(target):
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    result = specjax.generate(target, drafting, "a rose is a rose is a rose", max_new_tokens=12)
    pieces = list(specjax.stream(target, drafting, "a rose is a rose is a rose", max_new_tokens=12))
    assert "".join(text for text, _ in pieces) == result.text
    assert result.completion.finish in ("stop", "length")


def test_a_prompt_of_a_list_is_answered_alone_under_its_own_seed(target):
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    options = dict(max_new_tokens=12, temperature=1.0)
    prompts, seeds = ["a rose is", "abcabc", "a rose is"], [7, 8, 1 << 31]
    answers = specjax.generate(target, drafting, prompts, seed=seeds, batch=2, **options)
    assert answers[0].completion.tokens != answers[2].completion.tokens
    alone = specjax.generate(target, drafting, prompts[2], seed=seeds[2], **options)
    assert answers[2].completion.tokens == alone.completion.tokens
    pieces = specjax.stream(target, drafting, prompts[2], seed=seeds[2], **options)
    assert "".join(text for text, _ in pieces) == answers[2].text
    with pytest.raises(ValueError, match="seed has 2 values for 3 prompts; give one a prompt, or one for all"):
        specjax.generate(target, drafting, prompts, seed=[1, 2], **options)
    with pytest.raises(ValueError, match=r"seed=-1; expected a whole number in 0..4294967295"):
        specjax.generate(target, drafting, prompts, seed=[1, 2, -1], **options)


@pytest.mark.parametrize("seed", [0, 5, (1 << 32) - 1])
def test_keys_of_requests(seed):
    expected = [jax.random.key_data(jax.random.fold_in(jax.random.key(seed), i)) for i in (0, 3)]
    np.testing.assert_array_equal(request_keys(seed, [0, 3]), np.stack(expected))
    np.testing.assert_array_equal(request_keys([1, seed], [2, 3])[1], expected[1])


def test_a_lossy_rule_runs_where_it_is_asked_for(target):
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    options = dict(max_new_tokens=16, temperature=1.0, rule="threshold")
    with pytest.raises(ValueError, match="rule 'threshold' is lossy; use 'one_hot', or set lossless=False beside it"):
        specjax.generate(target, drafting, "a rose is a rose", **options)
    easy, hard = (
        specjax.generate(target, drafting, "a rose is a rose", lossless=False, rule_options={"bar": bar}, **options)
        for bar in (0.0, 0.999)
    )
    assert easy.tau > hard.tau
    with pytest.raises(ValueError, match="rule 'threshold' does not take these options"):
        next(specjax.stream(target, drafting, "a", lossless=False, rule_options={"epsilon": 0.1}, **options))


def test_streaming_tells_drafted_tokens_apart_and_raises_on_a_fault(target):
    """The target drafts for itself: all is accepted. The budget cuts the last block, which leaves drafted tokens."""
    drafting = build.Drafting("draft_model", DraftModel(target.config, num_nodes=3), target.params, {})
    loop, weights = build.make_loop(target, drafting, make_sampling([0.0]))
    loop, arguments = dataclasses.replace(loop, eos=()), dict(context=target.context, vocab=target.config.vocab_size)
    steps = list(stream(loop, weights, Request((7, 8, 9), 8), **arguments))
    assert [(len(tokens), drafted) for tokens, drafted in steps] == [(1, 0), (4, 3), (3, 3)]
    broken = dataclasses.replace(weights, target=jax.tree.map(lambda x: x * jnp.nan, target.params))
    with pytest.raises(FloatingPointError, match="the request: .* NaN or infinite at position 2, behind 3 tokens"):
        list(stream(loop, broken, Request((7, 8, 9), 8), **arguments))


def test_no_row_and_a_short_buffer_are_named(target):
    loop, weights = build.make_loop(target, specjax.load_drafter("autoregressive", target), make_sampling([0.0]))
    arguments = dict(context=target.context, vocab=target.config.vocab_size)
    with pytest.raises(ValueError, match="batch=0; expected a whole number of rows, at least 1"):
        generate(loop, weights, [Request((1,), 4)], batch=0, **arguments)
    with pytest.raises(ValueError, match="buffer=128; these requests need a token buffer of at least 202"):
        generate(loop, weights, [Request((1,), 200)], buffer=128, **arguments)


def test_the_context_ends_a_text(target):
    short = dataclasses.replace(target, context=40, eos_ids=())
    drafting = specjax.load_drafter("autoregressive", short)
    result = specjax.generate(short, drafting, "abc", max_new_tokens=500)
    assert result.completion.finish == "length"
    assert result.completion.prompt_length + len(result.completion.tokens) == 40


def test_bad_names_and_misfits_are_named(target):
    with pytest.raises(ValueError, match="unknown drafter 'prompt_lokup'; did you mean 'prompt_lookup'"):
        specjax.load_drafter("prompt_lokup", target)
    drafting = specjax.load_drafter("prompt_lookup", target)
    with pytest.raises(ValueError, match="unknown rule 'recursiv'; did you mean 'recursive'"):
        specjax.generate(target, drafting, "a", rule="recursiv")
    with pytest.raises(ValueError, match="'greedy' is not exact for a 'fixed' draft at temperature > 0; use 'one_hot'"):
        specjax.generate(target, drafting, "a", rule="greedy", temperature=1.0)
    with pytest.raises(ValueError, match="does not take these options"):
        specjax.load_drafter("prompt_lookup", target, gamma=3)
    with pytest.raises(ValueError, match="max_ngram=2.5 of drafter 'prompt_lookup'; expected a whole number"):
        specjax.load_drafter("prompt_lookup", target, max_ngram=2.5)
    with pytest.raises(ValueError, match=r"recycling.*\{'foo': 1\}.*it takes \(num_nodes, candidates\)$"):
        specjax.load_drafter("recycling", target, foo=1)
    with pytest.raises(ValueError, match="min_ngram=4 and max_ngram=3"):
        specjax.load_drafter("prompt_lookup", target, min_ngram=4)
    with pytest.raises(ValueError, match="the prompt is empty"):
        specjax.generate(target, drafting, "  ")
