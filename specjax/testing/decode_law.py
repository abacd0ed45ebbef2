"""The law of what a drafter and a rule write in the loop, on any target, against what the target itself states."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from specjax import decoding
from specjax.analysis import GTest, g_test
from specjax.analysis.gtest import FALSE_ALARM
from specjax.decoding import Request
from specjax.evaluation.certify import continue_many
from specjax.evaluation.next_law import processed_logits, warped
from specjax.evaluation.teacher import Teacher
from specjax.testing.subject import CHUNK, MakeRule, Subject

# With four tokens left at each place a law of three has 64 cells, and so many draws find a total variation of 0.025
# with a power above 0.99.
LAW_TOKENS, LAW_DRAWS, LAW_TV = 3, 1 << 16, 0.025
MOST_TOKENS = 5  # The target is asked for the law behind every sequence of all but the last: 341 at most.
LAW_ROWS = 1 << 9  # more fall out of a core's cache
# Warped: a drafter that draws from the warped law and reports the raw one shows under no other sampling.
LAW_SAMPLING: Mapping[str, Any] = MappingProxyType({"temperature": 0.8, "top_k": 4})


def g_test_of_decodes(
    subject: Subject,
    make_rule: MakeRule,
    *,
    prompt: Sequence[int],
    draws: int = LAW_DRAWS,
    tokens: int = LAW_TOKENS,
    seed: int = 0,
    **sampling: Any,
) -> GTest:
    """A G-test of what the loop writes behind a prompt against the law that the target states, of any target.

    The prompt is run once; its prefill's token is the same in every decode, and the tokens behind it come from steps.

    Args:
        subject: target and drafter; end-of-sequence ids are left out, so that all decodes are equally long.
        make_rule: the rule under test.
        prompt: token ids.
        draws: decodes.
        tokens: of each, at least `LAW_TOKENS`; so many that follow each other are tested at a time.
        seed: of all draws.
        **sampling: fields of a `Request`, a temperature above 0 at least. The target is asked for the law of every
            sequence that they leave possible.

    Returns:
        The test of the tokens that fit the law least; its level allows for their number.

    Raises:
        ValueError: the prompt is empty or not of the target's ids, or no draft token was ever accepted, and so nothing
            was tested but plain decoding.
    """
    loop, weights = dataclasses.replace(subject, eos=()).loop(make_rule)
    buffer = -(-(len(prompt) + tokens + subject.drafter.depth + 2) // CHUNK) * CHUNK
    request = Request(tuple(prompt), tokens + 1, **sampling)
    decoding.check_requests([request], buffer, subject.vocab)
    state = decoding.prefill(loop, weights, [request], context=buffer, seed=seed, buffer=buffer)
    rows = min(draws, LAW_ROWS)
    found = continue_many(loop, weights, state, tokens=tokens, draws=draws, rows=rows, seed=seed)
    if not found.accepted:
        raise ValueError(
            f"none of {draws} decodes behind the prompt {tuple(prompt)} accepted a draft token, which says nothing "
            "about the law: give a prompt behind which the drafter drafts what the target may say, or a target of few "
            "tokens, such as specjax.testing.four_token_target()"
        )
    law = _joint_law(Teacher(loop.graph, weights.target, precision=loop.precision), request, found.context, tokens)
    tests = [
        _g_test_of_window(law, found.tokens, first, FALSE_ALARM / (tokens - LAW_TOKENS + 1))
        for first in range(tokens - LAW_TOKENS + 1)
    ]
    return min(tests, key=lambda test: test.p_value)


def check_law(
    subject: Subject, make_exact_rule: MakeRule, *, prompt: Sequence[int] | None = None, draws: int = LAW_DRAWS
) -> GTest:
    """Whole decodes at temperature 0.8 and top-k 4 have the target's law: what a drafter reports is what it drew from.

    Args:
        subject: target and drafter.
        make_exact_rule: a rule that is exact for the drafter's kind of draft.
        prompt: token ids; the first twelve ids twice by default, so that a look-up finds something.
        draws: decodes; by default as many as find a total variation of 0.025 with a power above 0.99. Each is of one
            token more than the draft is deep, of 3 at least and 5 at most: what is deeper is not tested.

    Returns:
        The test, power and p-value included.

    Raises:
        AssertionError: the law differs (false alarms: one in a million).
        ValueError: see `g_test_of_decodes`.
    """
    vocab = subject.vocab
    prompt = 2 * tuple(range(min(vocab, 12))) if prompt is None else prompt
    sampling = {**LAW_SAMPLING, "top_k": max(2, min(LAW_SAMPLING["top_k"], vocab - 1))}
    tokens = min(max(LAW_TOKENS, subject.drafter.depth + 1), MOST_TOKENS)
    found = g_test_of_decodes(subject, make_exact_rule, prompt=prompt, draws=draws, tokens=tokens, **sampling)
    if found.rejected:
        raise AssertionError(
            f"the law of {tokens} tokens is not the target's at {sampling}: p = {found.p_value:.1e} after {draws} "
            f"decodes (power {found.power:.3f} against a total variation of {LAW_TV}); are `laws` exactly what the "
            "nodes were drawn from, warps, siblings and vocabulary map included?"
        )
    return found


def _joint_law(
    teacher: Teacher, request: Request, context: tuple[int, ...], tokens: int
) -> dict[tuple[int, ...], float]:
    """The probability of every possible sequence behind a context, from the target's logits behind each prefix."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        logits_kv = np.stack([processed_logits(teacher, request, (*context, *prefix)) for prefix in found])
        laws_kv = warped(logits_kv, request)
        found = {
            (*prefix, token): chance * float(law_v[token])
            for (prefix, chance), law_v in zip(found.items(), laws_kv, strict=True)
            for token in np.flatnonzero(law_v).tolist()
        }
    return found


def _g_test_of_window(
    law: Mapping[tuple[int, ...], float], tokens_nt: np.ndarray, first: int, false_alarm: float
) -> GTest:
    """A G-test of `LAW_TOKENS` tokens from the first on, whatever is in front of them."""
    window = slice(first, first + LAW_TOKENS)
    chances: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for sequence, chance in law.items():
        chances[sequence[window]] += chance
    drawn = Counter(map(tuple, tokens_nt[:, window].tolist()))
    outside = sum(times for part, times in drawn.items() if part not in chances)
    expected = np.array(list(chances.values()))
    counts = [drawn[part] for part in chances]
    return g_test([*counts, outside], [*expected / expected.sum(), 0.0], tv=LAW_TV, false_alarm=false_alarm)
