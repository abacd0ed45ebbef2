"""Whether decoding keeps the target's law, on any model: many continuations of one context, held against it.

The rows of a batch share context and cache and differ in their request, hence in every random choice. What they
emit next is counted and compared with the law that the target itself states.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specjax import decoding
from specjax.analysis import Certificate, GTest, certificate, g_test, required_draws, top_with_rest
from specjax.analysis.gtest import MIN_EXPECTED
from specjax.decoding import Completion, DecodeState, Loop, Request, Weights, log_law, make_sampling
from specjax.evaluation.teacher import Teacher
from specjax.models import Target

FOREVER = 1 << 30
BATCH = 8  # greedy texts that run together
TOP = 32  # tokens of a next-token law that are cells of their own
ROUNDINGS = 32  # of the logits, at random, that tell which tokens stand at the edge of a law's support


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a certificate is about.

    Attributes:
        drafter: name of the drafter.
        rule: name of the rule.
        lossless: whether the rule says that it keeps the target's law.
        planted: name of the fault planted on purpose, or None.
    """

    drafter: str
    rule: str
    lossless: bool = True
    planted: str | None = None


@dataclasses.dataclass(frozen=True)
class Continuations:
    """Independent continuations of one context.

    Attributes:
        context: token ids that all continue: the prompt and the token that its prefill emitted.
        tokens: `[draws, T]` what each emitted next.
        accepted: mean number of draft tokens that a step accepted.
    """

    context: tuple[int, ...]
    tokens: np.ndarray
    accepted: float


def continuations(
    target: Target,
    loop: Loop,
    weights: Weights,
    request: Request,
    *,
    tokens: int,
    draws: int,
    rows: int,
    seed: int = 0,
    buffer: int | None = None,
) -> Continuations:
    """Continues one prompt many times, in the loop, each time as another request.

    The prompt is run once. Rows stop at `tokens` tokens and nowhere else: end-of-sequence ids are taken out of the
    loop, so that every continuation has its full length.

    Args:
        target: the model.
        loop: what decodes.
        weights: its parameters.
        request: prompt and sampling parameters; its budget is not used.
        tokens: T, length of a continuation.
        draws: how many; rounded up to whole batches.
        rows: continuations in a batch.
        seed: of all of them; the draw i has request id i.
        buffer: token buffer L; what the request needs by default.

    Raises:
        ValueError: the prompt is empty, holds ids outside the vocabulary, or leaves no room in the context.
    """
    if draws < 1 or rows < 1:
        raise ValueError(f"draws={draws} and rows={rows}; expected both at least 1")
    loop = dataclasses.replace(loop, eos=())
    request = dataclasses.replace(request, max_new_tokens=tokens + 1)
    decoding.check_requests([request], target.context - tokens, target.config.vocab_size)
    state = decoding.prefill(loop, weights, [request], context=target.context, seed=seed, buffer=buffer)
    ends = int(state.length[0])
    parts, accepted, steps = [], 0, 0
    for first in range(0, draws, rows):
        new, kept, taken = _continue(loop, weights, state, jax.random.key(seed), jnp.int32(first), rows, tokens)
        parts.append(np.asarray(new))
        accepted, steps = accepted + int(kept), steps + int(taken)
    prompt = np.asarray(state.tokens)[0, :ends].tolist()
    return Continuations(tuple(prompt), np.concatenate(parts), accepted / max(1, steps))


@partial(jax.jit, static_argnames=("loop", "rows", "tokens"))
def _continue(
    loop: Loop, weights: Weights, state: DecodeState, key: jax.Array, first: jax.Array, rows: int, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The single row of `state` under the requests `first`, `first + 1`, ...: new tokens, accepted drafts, steps."""
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), state)
    request = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(first + jnp.arange(rows))
    done = loop.run(weights, dataclasses.replace(many, request=request), jnp.int32(FOREVER))
    new = jax.lax.dynamic_slice_in_dim(done.tokens, state.length[0], tokens, axis=1)
    counts = done.statistics.accepted
    return new, jnp.sum(counts * jnp.arange(counts.shape[1])), jnp.sum(done.statistics.steps)


def next_law(teacher: Teacher, request: Request, context: Sequence[int]) -> np.ndarray:
    """The law `[V]` float64 of the token behind a context, as the target itself states it.

    Nothing of the loop is in it: one causal pass over the context, penalties counted on the host, then the warps.

    Args:
        teacher: the target.
        request: prompt and sampling parameters.
        context: the prompt's token ids, then what was emitted.
    """
    return _warped(_processed_logits(teacher, request, context)[None], request)[0]


def _processed_logits(teacher: Teacher, request: Request, context: Sequence[int]) -> np.ndarray:
    emitted = context[len(request.prompt) :]
    logits_v = np.asarray(teacher.logits(context, (), 0), np.float64)
    for token, value in request.logit_bias.items():
        logits_v[token] += value
    logits_v[list(request.suppress_tokens)] = -np.inf
    for token in set(context):
        logits_v[token] *= request.repetition_penalty if logits_v[token] < 0 else 1 / request.repetition_penalty
    for token, times in Counter(emitted).items():
        logits_v[token] -= request.frequency_penalty * times + request.presence_penalty
    return logits_v


def _warped(logits_nv: np.ndarray, request: Request) -> np.ndarray:
    n = len(logits_nv)
    warps = make_sampling([request.temperature] * n, [request.top_k] * n, [request.top_p] * n, [request.min_p] * n)
    law_nv = np.exp(np.asarray(log_law(jnp.asarray(logits_nv, jnp.float32), warps), np.float64))
    return law_nv / law_nv.sum(axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class _Cells:
    """The outcomes of a test of one law: some tokens by themselves, the rest, and what the law never gives.

    Attributes:
        ids: `[K]` tokens that are cells of their own.
        never: `[V]` bool, tokens outside the support whichever way the logits are rounded.
    """

    ids: np.ndarray
    never: np.ndarray

    def sums(self, values_v: np.ndarray) -> np.ndarray:
        """A law or counts over the vocabulary as `[K + 2]`: the tokens, the rest, the impossible."""
        possible = top_with_rest(np.where(self.never, 0, values_v), self.ids)
        return np.append(possible, values_v[self.never].sum())


def _edge(logits_v: np.ndarray, request: Request, bound: float) -> np.ndarray:
    """Which tokens `[V]` rounding may take into the support or out of it: top-k, top-p and min-p cut a law off."""
    noise_nv = np.random.default_rng(0).uniform(-bound / 2, bound / 2, (ROUNDINGS, logits_v.size))
    inside_nv = _warped(np.concatenate([logits_v[None], logits_v + noise_nv]), request) > 0
    return (inside_nv != inside_nv[:1]).any(axis=0)


def _cells(law_v: np.ndarray, edge_v: np.ndarray, draws: int, top: int) -> _Cells:
    """The likeliest tokens, `top` at most, that expect draws enough and do not stand at the edge.

    Those at the edge belong to the rest. Where it would have no mass, the least likely of the others joins them.
    """
    sure_v = np.where(edge_v, 0, law_v)
    ids = np.argsort(-sure_v)[:top]
    ids = ids[sure_v[ids] * draws >= MIN_EXPECTED]
    if edge_v.any() and np.isclose(law_v[ids].sum(), law_v.sum(), rtol=1e-12):
        ids = ids[:-1]
    return _Cells(ids, (law_v == 0) & ~edge_v)


def certify_next_tokens(
    claim: Claim,
    target: Target,
    loop: Loop,
    weights: Weights,
    request: Request,
    teacher: Teacher,
    *,
    bound: float,
    tv: float,
    draws: int | None = None,
    rows: int = 64,
    top: int = TOP,
    seed: int = 0,
) -> Certificate:
    """Certifies the law of the next two tokens behind one prompt of a real model.

    Cells are the likeliest next tokens, `top` at most and only those that expect draws enough for a cell of their
    own, the rest, and what the law cuts off, of which one draw is enough to fail; the likeliest one is split by the
    token behind it in the same way. So the test sees what a rule does at the root and behind it. The cells are chosen
    from the target's law, before anything is drawn. Tokens that rounding may move over the edge of top-k, top-p or
    min-p belong to the rest. Where a token with much of the mass stands at the edge of top-p or min-p, the law itself
    is in doubt, and the test may fail without a fault: take another prompt. In 16-bit precision the two passes differ
    in more than the edge: keep `tv` above what rounding does to the law.

    Args:
        claim: what is certified.
        target: the model.
        loop: what decodes.
        weights: its parameters.
        request: prompt and sampling parameters, temperature above 0.
        teacher: the target again.
        bound: a gap of two logits below this may be rounding (see `specjax.evaluation.teacher.rounding_bound`).
        tv: total variation, over the cells, against which the power is stated.
        draws: continuations; as many as power 0.99 needs where None.
        rows: continuations in a batch.
        top: see above.
        seed: of all draws.

    Raises:
        ValueError: the draws are too few for what they should prove.
    """
    # Where little is left for a rest, it is pooled, and what is pooled counts as unseen: hence 0.9.
    draws = draws or required_draws(2 * top + 1, tv=0.9 * tv)
    found = continuations(target, loop, weights, request, tokens=2, draws=draws, rows=rows, seed=seed)
    drawn, size = found.tokens[:, 0], found.tokens.shape[0]
    logits_v = _processed_logits(teacher, request, found.context)
    first_v = _warped(logits_v[None], request)[0]
    best = int(np.argmax(first_v))
    logits_behind_v = _processed_logits(teacher, request, (*found.context, best))
    behind_v = first_v[best] * _warped(logits_behind_v[None], request)[0]
    first_v[best] = 0.0
    first = _cells(first_v, _edge(logits_v, request, bound), size, top)
    behind = _cells(behind_v, _edge(logits_behind_v, request, bound), size, top)
    counts_v = np.bincount(drawn[drawn != best], minlength=first_v.size)
    counts_behind_v = np.bincount(found.tokens[drawn == best, 1], minlength=first_v.size)
    test = g_test(
        np.concatenate([first.sums(counts_v), behind.sums(counts_behind_v)]),
        np.concatenate([first.sums(first_v), behind.sums(behind_v)]),
        tv=tv,
    )
    return _row(claim, request, test, "next tokens", found.accepted)


def certify_greedy(
    claim: Claim,
    target: Target,
    loop: Loop,
    weights: Weights,
    requests: Sequence[Request],
    plain: Sequence[Completion],
    teacher: Teacher,
    *,
    bound: float,
    batch: int = 1,
) -> Certificate:
    """Certifies greedy texts: each equals plain decoding's, or first parts from it at a near-tie.

    Args:
        claim: what is certified.
        target: the model.
        loop: what decodes.
        weights: its parameters.
        requests: prompts and budgets, temperature 0.
        plain: plain decoding's completions of them.
        teacher: the target again.
        bound: a gap of two logits below this is a near-tie (see `specjax.evaluation.teacher.rounding_bound`).
        batch: prompts that run together.
    """
    found = decoding.generate(
        loop, weights, requests, context=target.context, vocab=target.config.vocab_size, batch=batch
    )
    compared = teacher.compare(
        [r.prompt for r in requests], [c.tokens for c in plain], [c.tokens for c in found], bound
    )
    accepted = sum(int(np.arange(c.accepted.size) @ c.accepted) for c in found)
    return Certificate(
        drafter=claim.drafter,
        rule=claim.rule,
        sampling=sampling_of(requests[0]),
        draws=sum(len(c.tokens) for c in found),
        statistic=None,
        p_value=None,
        power=None,
        verdict="pass" if compared.matches else "fail",
        check="greedy text",
        accepted=accepted / max(1, sum(c.steps for c in found)),
        near_ties=len(compared.near_ties),
    )


@dataclasses.dataclass(frozen=True)
class Subject:
    """A drafter on a real model, in the loops that are certified.

    Attributes:
        drafter: name of the drafter.
        target: the model.
        plain: the loop that drafts nothing, at temperature 0.
        greedy: name of the rule, loop and parameters at temperature 0.
        sampled: the same above it.
        lossless: whether the rule says that it keeps the target's law.
    """

    drafter: str
    target: Target
    plain: tuple[Loop, Weights]
    greedy: tuple[str, Loop, Weights]
    sampled: tuple[str, Loop, Weights]
    lossless: bool = True


def certify_model(
    subject: Subject,
    texts: Sequence[Request],
    contexts: Sequence[Request],
    *,
    bound: float,
    tv: float,
    draws: int | None = None,
    rows: int = 64,
    seed: int = 0,
) -> Iterator[Certificate]:
    """Greedy texts in one row, then a row for the next-token law behind each context.

    Args:
        subject: what is certified.
        texts: requests at temperature 0; none leaves the row out.
        contexts: requests above temperature 0.
        bound: see `certify_greedy`.
        tv: see `certify_next_tokens`.
        draws: likewise.
        rows: likewise.
        seed: likewise.
    """
    target, (loop, weights) = subject.target, subject.plain
    teacher = Teacher(loop.graph, target.params, precision=loop.precision)
    if texts:
        batch = min(BATCH, len(texts))
        plain = decoding.generate(
            loop, weights, texts, context=target.context, vocab=target.config.vocab_size, batch=batch
        )
        rule, loop, weights = subject.greedy
        claim = Claim(subject.drafter, rule)
        yield certify_greedy(claim, target, loop, weights, texts, plain, teacher, bound=bound, batch=batch)
    rule, loop, weights = subject.sampled
    claim = Claim(subject.drafter, rule, lossless=subject.lossless)
    for request in contexts:
        yield certify_next_tokens(
            claim, target, loop, weights, request, teacher, bound=bound, tv=tv, draws=draws, rows=rows, seed=seed
        )


def sequence_certificate(
    claim: Claim, request: Request, counts: np.ndarray, law: np.ndarray, *, tv: float, accepted: float
) -> Certificate:
    """Certifies counts of whole sequences of a tiny model against their exact law (see `specjax.testing.sequences`)."""
    return _row(claim, request, g_test(counts, law, tv=tv), "sequences", accepted)


def _row(claim: Claim, request: Request, test: GTest, check: str, accepted: float) -> Certificate:
    return certificate(
        claim.drafter,
        claim.rule,
        sampling_of(request),
        test,
        lossless=claim.lossless,
        planted=claim.planted,
        check=check,
        accepted=accepted,
    )


def sampling_of(request: Request) -> dict[str, Any]:
    """A request's sampling parameters that are not at their defaults; the temperature always."""
    plain = Request(request.prompt, request.max_new_tokens, id=request.id)
    names = [field.name for field in dataclasses.fields(request)]
    changed = [name for name in names if getattr(request, name) != getattr(plain, name)]
    return {name: getattr(request, name) for name in ("temperature", *changed)}


def table(rows: Sequence[Certificate]) -> Table:
    """Certificates for the terminal; what is not as it should be is red."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("drafter", "rule", "check"):
        out.add_column(name, overflow="fold", min_width=9)
    for name in ("draws", "cells", "accepted", "p", "power (tv)", "verdict"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        drafter = row.drafter if row.planted is None else f"{row.drafter}: {row.planted}"
        power = "" if row.power is None else f"{row.power:.3f} ({row.tv:g})"
        ties = f", {row.near_ties} near-ties" if row.near_ties else ""
        out.add_row(
            drafter,
            row.rule,
            f"{row.check}, {_said(row.sampling)}",
            f"{row.draws:,}",
            "" if row.cells is None else str(row.cells),
            "" if row.accepted is None else f"{row.accepted:.2f}",
            "exact" if row.p_value is None else f"{row.p_value:.1e}",
            power,
            row.verdict + ties,
            style=None if row.ok else "red",
        )
    return out


def _said(sampling: Mapping[str, Any] | str) -> str:
    if isinstance(sampling, str):
        return sampling
    said = {name: value if isinstance(value, int | float) else json.dumps(value) for name, value in sampling.items()}
    return " ".join(f"{'T' if name == 'temperature' else name}={value}" for name, value in said.items())
