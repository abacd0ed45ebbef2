"""Answers to prompts, whole or as they are decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax import decoding
from specjax.api.programs import make_program, several, token_ids, token_options
from specjax.build import Drafting
from specjax.decoding import Completion, Loop, Request, StopText, TextEnd, Weights, cut_text, request_sampling
from specjax.decoding.sampling import check_seed
from specjax.evaluation.conversations import Message, stop_tokens
from specjax.models import Target


@dataclasses.dataclass(frozen=True)
class Result:
    """One completed prompt.

    Attributes:
        text: the answer, without the end-of-sequence token, up to the first stop string.
        completion: tokens, the end-of-sequence token or those of the stop string included, and counts of them.
        finish: why the text ends: `stop` (end of sequence), `stop_sequence` or `length`.
    """

    text: str
    completion: Completion
    finish: str

    @property
    def tau(self) -> float:
        """Tokens per target pass, bonus included; NaN when the prefill's token ended the text."""
        c = self.completion
        return c.emitted / c.steps if c.steps else float("nan")


def generate(
    target: Target,
    drafting: Drafting,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    suppress_tokens: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    seed: int | Sequence[int] = 0,
    rule: str | None = None,
    rule_options: Mapping[str, Any] | None = None,
    lossless: bool = True,
    batch: int = 1,
) -> Any:
    """Answers one prompt (a `Result`) or several (a list of them), through the chat template.

    Args:
        target: the model whose law the output has.
        drafting: how to draft.
        prompts: user turns.
        max_new_tokens: budget of each.
        temperature: 0 for greedy.
        top_k: 0 for all.
        top_p: in (0, 1].
        min_p: in [0, 1).
        repetition_penalty: > 0, 1 for none; over prompt and answer, as Hugging Face has it.
        presence_penalty: 0 for none; over the answer alone, as OpenAI and vLLM have it.
        frequency_penalty: 0 for none; likewise, for each time that a token was emitted.
        logit_bias: what to add to the logits of token ids.
        suppress_tokens: ids that are never emitted.
        stop: strings that end the answer and are no part of it, whatever tokens spell them. Where there are any, the
            host looks at the text after every step.
        seed: one for all, which with a prompt's index fixes every random choice; or one a prompt, under which a prompt
            gets the answer that it gets alone under that seed.
        rule: verification rule; the exact one that fits best by default.
        rule_options: of the rule, such as {"epsilon": 0.2} of `typical`.
        lossless: refuse a rule that changes the output law; False lets one run.
        batch: prompts that run together.

    Raises:
        ValueError: a value out of range, a prompt that is empty or beyond the context, or a rule that does not fit.
        FloatingPointError: the target's logits are NaN or infinite.
    """
    stops = _stop_strings(stop)
    ids = [token_ids(target, prompt) for prompt in several(prompts)]
    options: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        **token_options(logit_bias, suppress_tokens),
        stop=stop_tokens(target, stops),
    )
    each = isinstance(seed, Sequence)
    requests = [Request(prompt, id=0 if each else i, **options) for i, prompt in enumerate(ids)]
    loop, weights = _program(target, drafting, requests, rule, rule_options, lossless)
    watches = [TextEnd(target.tokenizer.stream(), stops, target.eos_ids) for _ in requests]
    done = decoding.generate(
        loop,
        weights,
        requests,
        context=target.context,
        vocab=target.config.vocab_size,
        seed=seed,
        batch=batch,
        ends=(lambda i, tokens: watches[i].find(tokens)) if stops else None,
    )
    results = [_result(target, c, stops) for c in done]
    return results[0] if isinstance(prompts, str) else results


def stream(
    target: Target,
    drafting: Drafting,
    prompt: str | Sequence[Message],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    suppress_tokens: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    seed: int = 0,
    rule: str | None = None,
    rule_options: Mapping[str, Any] | None = None,
    lossless: bool = True,
) -> Iterator[tuple[str, bool]]:
    """Yields `(piece of text, whether it was drafted)` as steps are taken, over the same compiled step.

    Arguments are those of `generate`; bad ones raise at the call. Text that may begin a stop string is held back until
    it is decided.
    """
    check_seed(seed)
    stops = _stop_strings(stop)
    request = Request(
        token_ids(target, prompt),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        **token_options(logit_bias, suppress_tokens),
        stop=stop_tokens(target, stops),
    )
    loop, weights = _program(target, drafting, [request], rule, rule_options, lossless)
    steps = decoding.stream(loop, weights, request, context=target.context, vocab=target.config.vocab_size, seed=seed)
    return _pieces(target, steps, stops)


def _pieces(target: Target, steps: Iterator[tuple[list[int], int]], stops: Sequence[str]) -> Iterator[tuple[str, bool]]:
    decoder, watch = target.tokenizer.stream(), StopText(stops)
    try:
        for tokens, drafted in steps:
            for i, token in enumerate(tokens):
                if token not in target.eos_ids:
                    yield watch.push(decoder.push(token)), i < drafted
                if watch.found:
                    return
    except FloatingPointError:  # What was held back stands before the fault.
        yield watch.push(decoder.finish()) + watch.finish(), False
        raise
    yield watch.push(decoder.finish()) + watch.finish(), False


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    decoding.check_stop_strings(stops)
    return tuple(stops)


def _program(
    target: Target,
    drafting: Drafting,
    requests: Sequence[Request],
    rule: str | None,
    rule_options: Mapping[str, Any] | None,
    lossless: bool,
) -> tuple[Loop, Weights]:
    decoding.check_requests(requests, target.context, target.config.vocab_size)
    sampling = request_sampling(requests)
    return make_program(target, drafting, sampling, rule=rule, rule_options=rule_options, lossless=lossless)


def _result(target: Target, completion: Completion, stops: Sequence[str]) -> Result:
    text = target.tokenizer.decode([t for t in completion.tokens if t not in target.eos_ids])
    text, found = cut_text(text, stops)
    return Result(text, completion, "stop_sequence" if found else completion.finish)
