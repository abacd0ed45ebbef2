"""The host side: requests are checked before anything compiles, streaming yields what generation returns."""

import pytest

import specjax
from specjax.decoding import Request, check_requests
from specjax.testing import tiny_target


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request((), 4), "prompt 0 is empty"),
        (Request((1, 300), 4), "prompt 0 holds token 300; expected ids in 0..99"),
        (Request((1,), 0), "max_new_tokens=0 for prompt 0; expected at least 1"),
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


def test_streaming_yields_what_generation_returns(target):
    drafting = specjax.load_drafter("prompt_lookup", target, num_nodes=3)
    result = specjax.generate(target, drafting, "a rose is a rose is a rose", max_new_tokens=12)
    pieces = list(specjax.stream(target, drafting, "a rose is a rose is a rose", max_new_tokens=12))
    assert "".join(text for text, _ in pieces) == result.text
    assert result.completion.finish in ("stop", "length")


def test_the_context_ends_a_text(target):
    import dataclasses

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
    with pytest.raises(ValueError, match="min_ngram=4 and max_ngram=3"):
        specjax.load_drafter("prompt_lookup", target, min_ngram=4)
    with pytest.raises(ValueError, match="the prompt is empty"):
        specjax.generate(target, drafting, "  ")
