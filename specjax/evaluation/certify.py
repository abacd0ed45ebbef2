"""Whether decoding keeps the target's law, on any model: many continuations of one context, held against it.

The rows of a batch share context and cache and differ in their request, hence in every random choice. What they
emit next is counted and compared with the law that the target itself states.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from specjax import decoding
from specjax.analysis import Certificate, GTest, certificate, g_test, required_draws
from specjax.decoding import Completion, DecodeState, Loop, Request, Weights
from specjax.evaluation.next_law import at_edge, compare_texts, make_cells, processed_logits, warped
from specjax.evaluation.teacher import Teacher
from specjax.models import Target
from specjax.parallel import on_mesh_of, to_host, whole_shares

FOREVER = 1 << 30
BATCH = 8  # greedy texts that run together
TOP = 32  # tokens of a next-token law that are cells of their own


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a certificate is about.

    Attributes:
        drafter: name of the drafter.
        rule: name of the rule.
        lossless: whether the rule says that it keeps the target's law.
        planted: name of the fault planted on purpose, or None.
        rule_options: of the rule, where it was given any.
        layout: of the weights in the program that is tested.
        precision: of its matrix products.
    """

    drafter: str
    rule: str
    lossless: bool = True
    planted: str | None = None
    rule_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = "plain"
    precision: str = "float32"


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
        rows: continuations in a batch; on a mesh rounded up to what its devices divide.
        seed: of all of them; the draw i has request id i.
        buffer: token buffer L; what the request needs by default.

    Raises:
        ValueError: the prompt is empty, holds ids outside the vocabulary, or leaves no room in the context.
        FloatingPointError: the target's logits are NaN or infinite.
    """
    if draws < 1 or rows < 1:
        raise ValueError(f"draws={draws} and rows={rows}; expected both at least 1")
    loop = dataclasses.replace(loop, eos=())
    request = dataclasses.replace(request, max_new_tokens=tokens + 1)
    decoding.check_requests([request], target.context - tokens, target.config.vocab_size)
    state = decoding.prefill(loop, weights, [request], context=target.context, seed=seed, buffer=buffer)
    decoding.check_fault(decoding.read_row(state, 0), "the prompt")
    return continue_many(loop, weights, state, tokens=tokens, draws=draws, rows=rows, seed=seed)


def continue_many(
    loop: Loop, weights: Weights, state: DecodeState, *, tokens: int, draws: int, rows: int, seed: int = 0
) -> Continuations:
    """Continues the single row of a prefilled state many times (see `continuations`).

    Args:
        loop: what decodes; without end-of-sequence ids.
        weights: its parameters.
        state: of one request, whose budget is `tokens` behind what the prefill emitted.
        tokens: T, length of a continuation.
        draws: how many; rounded up to whole batches.
        rows: continuations in a batch.
        seed: of all of them.

    Raises:
        FloatingPointError: the target's logits are NaN or infinite.
    """
    rows = whole_shares(rows, weights.target)
    ends = int(state.length[0])
    parts, accepted, steps = [], 0, 0
    for first in range(0, draws, rows):
        with on_mesh_of(weights.target):
            found = _continue(loop, weights, state, jax.random.key(seed), jnp.int32(first), rows, tokens)
        new, kept, taken, fault = to_host(found)
        if fault >= 0:
            raise FloatingPointError(
                f"a continuation of the prompt: the logits are NaN or infinite at position {fault}"
            )
        parts.append(new)
        accepted, steps = accepted + int(kept), steps + int(taken)
    prompt = to_host(state.tokens)[0, :ends].tolist()
    return Continuations(tuple(prompt), np.concatenate(parts), accepted / max(1, steps))


@partial(jax.jit, static_argnames=("loop", "rows", "tokens"))
def _continue(
    loop: Loop, weights: Weights, state: DecodeState, key: jax.Array, first: jax.Array, rows: int, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The single row of `state` under the requests `first`, `first + 1`, ...: tokens, accepted drafts, steps, fault."""
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])), state)
    request = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(first + jnp.arange(rows))
    done = loop.run(weights, dataclasses.replace(many, request=request), jnp.int32(FOREVER))
    new = jax.lax.dynamic_slice_in_dim(done.tokens, state.length[0], tokens, axis=1)
    counts = done.statistics.accepted
    kept = jnp.sum(counts * jnp.arange(counts.shape[1]))
    return new, kept, jnp.sum(done.statistics.steps), jnp.max(done.fault)


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
    min-p belong to the rest, and their mass counts as unseen: where it is much, the test asks for more draws. Where one
    token with much of the mass stands there, the law itself is in doubt, and the test may fail without a fault: take
    another prompt. In 16-bit precision the two passes differ in more than the edge: keep `tv` above what rounding does
    to the law.

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
        FloatingPointError: the target's logits are NaN or infinite.
    """
    # Where little is left for a rest, it is pooled, and what is pooled counts as unseen: hence 0.9.
    draws = draws or required_draws(2 * top + 1, tv=0.9 * tv)
    found = continuations(target, loop, weights, request, tokens=2, draws=draws, rows=rows, seed=seed)
    drawn, size = found.tokens[:, 0], found.tokens.shape[0]
    logits_v = processed_logits(teacher, request, found.context)
    first_v = warped(logits_v, request)
    best = int(np.argmax(first_v))
    logits_behind_v = processed_logits(teacher, request, (*found.context, best))
    behind_v = first_v[best] * warped(logits_behind_v, request)
    first_v[best] = 0.0
    edge_v, edge_behind_v = at_edge(logits_v, request, bound), at_edge(logits_behind_v, request, bound)
    first = make_cells(first_v, edge_v, size, top)
    behind = make_cells(behind_v, edge_behind_v, size, top)
    counts_v = np.bincount(drawn[drawn != best], minlength=first_v.size)
    counts_behind_v = np.bincount(found.tokens[drawn == best, 1], minlength=first_v.size)
    test = g_test(
        np.concatenate([first.sums(counts_v), behind.sums(counts_behind_v)]),
        np.concatenate([first.sums(first_v), behind.sums(behind_v)]),
        tv=tv,
        merged=float(first_v[edge_v].sum() + behind_v[edge_behind_v].sum()),
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

    Near-ties are those of the processed logits, which choose the tokens: penalties, biases and suppression included.

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
    texts = [c.tokens for c in plain], [c.tokens for c in found]
    compared = compare_texts(teacher, requests, *texts, bound)
    accepted = sum(int(np.arange(c.accepted.size) @ c.accepted) for c in found)
    return Certificate(
        **_about(claim),
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
        rule_options: of the rule above temperature 0.
        layout: of the weights of all these.
    """

    drafter: str
    target: Target
    plain: tuple[Loop, Weights]
    greedy: tuple[str, Loop, Weights]
    sampled: tuple[str, Loop, Weights]
    lossless: bool = True
    rule_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = "plain"


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
        rows: likewise; no more greedy texts run together, either.
        seed: likewise.
    """
    target, (loop, weights) = subject.target, subject.plain
    teacher = Teacher(loop.graph, target.params, precision=loop.precision)
    program: dict[str, Any] = {"layout": subject.layout, "precision": loop.precision}
    if texts:
        batch = min(BATCH, len(texts), rows)
        plain = decoding.generate(
            loop, weights, texts, context=target.context, vocab=target.config.vocab_size, batch=batch
        )
        rule, loop, weights = subject.greedy
        claim = Claim(subject.drafter, rule, **program)
        yield certify_greedy(claim, target, loop, weights, texts, plain, teacher, bound=bound, batch=batch)
    rule, loop, weights = subject.sampled
    claim = Claim(subject.drafter, rule, subject.lossless, rule_options=subject.rule_options, **program)
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
    row = certificate(
        claim.drafter,
        claim.rule,
        sampling_of(request),
        test,
        lossless=claim.lossless,
        planted=claim.planted,
        check=check,
        accepted=accepted,
    )
    return dataclasses.replace(row, **_about(claim))


def _about(claim: Claim) -> dict[str, Any]:
    names = ("drafter", "rule", "rule_options", "layout", "precision")
    return {name: getattr(claim, name) for name in names}


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
        idle = ", nothing accepted" if row.verdict == "pass" and row.accepted == 0 else ""  # and little was tested
        out.add_row(
            drafter,
            " ".join([row.rule, *(f"{name}={value}" for name, value in row.rule_options.items())]),
            f"{row.check}, {_said(row.sampling)}",
            f"{row.draws:,}",
            "" if row.cells is None else str(row.cells),
            "" if row.accepted is None else f"{row.accepted:.2f}",
            "exact" if row.p_value is None else f"{row.p_value:.1e}",
            power,
            row.verdict + ties + idle,
            style=None if row.ok else "red",
        )
    return out


def _said(sampling: Mapping[str, Any] | str) -> str:
    if isinstance(sampling, str):
        return sampling
    said = {name: value if isinstance(value, int | float) else json.dumps(value) for name, value in sampling.items()}
    return " ".join(f"{'T' if name == 'temperature' else name}={value}" for name, value in said.items())
